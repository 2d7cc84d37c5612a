"""Generation options through the real Triton server, over both protocols.

Expected tokens are the golden ones: what a rule forbids or favours follows from them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from tokenizers import Tokenizer

from tests.server.deployment import (
    GOLDEN,
    PROMPT,
    Deployment,
    EventStream,
    RefusedError,
    joined,
)

pytestmark = pytest.mark.server

REPLAYED: list[int] = GOLDEN["greedy_from_20_replay"].tolist()
MOST = 512
PROMPT_LOG_PROBS = {
    "prompt_ids", "prompt_log_probs", "top_prompt_log_prob_ids", "top_prompt_log_probs"
}  # fmt: skip
SPELLED = {"output_token_bytes", "top_token_bytes"}
LOG_PROBS = SPELLED | {"output_log_probs", "cum_log_probs", "top_log_probs", "top_log_prob_ids"}


def events_of(engine: Path) -> str:
    return f"ipc://{engine.parent}/kv-events"


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Deployment]:
    sizes = ("--global-page-tokens=32", f"--max-seq-len={MOST}")
    deployment = Deployment(engine, "--dtype=float64", *sizes, f"--kv-events={events_of(engine)}")
    try:
        yield deployment.wait_until_ready()
    finally:
        deployment.end()


def golden(**values: Any) -> dict[str, Any]:
    return {"input_ids": PROMPT, "max_tokens": 24, "end_id": -1} | values


def both(server: Deployment, **values: Any) -> dict[str, Any]:
    """The whole answer, which must be the same over HTTP and gRPC."""
    (by_grpc,) = list(server.stream(**values))
    by_http = server.generate(**values)
    assert by_http["output_ids"] == by_grpc["output_ids"]
    assert by_http["text_output"] == by_grpc["text_output"]
    return by_http


def test_a_bias_rules_and_a_bad_word_never_comes(server: Deployment) -> None:
    answer = both(server, **golden(max_tokens=4, logit_bias='{"77": 100}'))
    assert answer["output_ids"] == [77] * 4
    penalised = both(
        server, **golden(max_tokens=4, logit_bias='{"77": 100}', frequency_penalty=100.0)
    )
    assert penalised["output_ids"].count(77) == 1


def test_stop_tokens_wait_for_the_minimum(server: Deployment) -> None:
    stop = REPLAYED[3]
    first = REPLAYED.index(stop)
    answer = both(server, **golden(stop_token_ids=[stop]))
    assert answer["output_ids"] == REPLAYED[: first + 1]
    assert answer["finish_reason"] == "stop"
    later = both(server, **golden(stop_token_ids=[stop], min_tokens=10))["output_ids"]
    assert later[:first] == REPLAYED[:first]
    assert stop not in later[:10]


def test_a_stop_string_over_tokens_ends_streamed_and_whole_answers(
    server: Deployment, engine: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    text = tokenizer.decode(REPLAYED)
    stop = text[6:9]
    asked = golden(stop_words=[stop, "no such text"], return_stop_reason=True)
    whole = both(server, **asked)
    streamed = list(server.sse(**asked, stream=True))
    assert whole["text_output"] == joined(streamed)[0] == text[: text.find(stop)]
    assert whole["output_ids"] == joined(streamed)[1]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
    # The answer ends with the first token after which the text has the stop string.
    count = whole["num_output_tokens"]
    assert stop in tokenizer.decode(REPLAYED[:count])
    assert stop not in tokenizer.decode(REPLAYED[: count - 1])
    included = both(server, **golden(stop_words=[stop], include_stop_str_in_output=True))
    assert included["text_output"] == text[: text.find(stop) + len(stop)]


def test_the_stop_of_existing_clients_is_no_stop_string(server: Deployment) -> None:
    assert both(server, **golden(stop=False))["output_ids"] == REPLAYED
    with pytest.raises(RefusedError, match=r"^400 \[invalid_argument\] expected stop to be False"):
        server.generate(**golden(stop=True))


def test_a_stop_string_that_comes_with_the_last_token_is_counted_as_a_stop(
    server: Deployment, engine: Path
) -> None:
    """As the client is told and as the log says; the core sees the length alone."""
    text = Tokenizer.from_file(str(engine / "tokenizer.json")).decode(REPLAYED)
    asked = golden(stop_words=[text[6:9]])
    asked["max_tokens"] = server.generate(**asked)["num_output_tokens"]

    def ended() -> dict[str, float]:
        time.sleep(0.3)  # two rounds of publishing
        name = "dsv41_request_success_total"
        return {r: server.metric(name, finished_reason=r) for r in ("stop", "length", "error")}

    before = ended()
    assert server.generate(**asked)["finish_reason"] == "stop"
    more = {reason: value - before[reason] for reason, value in ended().items()}
    assert more == {"stop": 1, "length": 0, "error": 0}
    assert server.events("request_finished")[-1]["finish_reason"] == "stop"


def test_log_probs_come_where_they_are_asked_for(server: Deployment) -> None:
    plain = both(server, **golden())
    assert not LOG_PROBS & set(plain)
    asked = both(server, **golden(logprobs=3))
    assert asked["output_ids"] == REPLAYED
    chosen, top = asked["output_log_probs"], asked["top_log_probs"]
    assert (len(chosen), len(top)) == (24, 72)
    assert asked["top_log_prob_ids"][::3] == REPLAYED
    assert top[::3] == chosen
    assert max(chosen) < 0
    assert asked["cum_log_probs"] == pytest.approx(sum(chosen), abs=1e-4)
    assert not SPELLED & set(asked)
    only = both(server, **golden(return_log_probs=True))
    assert only["output_log_probs"] == chosen
    assert "top_log_probs" not in only


def test_bytes_of_tokens(server: Deployment, engine: Path) -> None:
    """A character of two bytes, forced as the token of each, which no text can show."""
    tokenizer = Tokenizer.from_file(str(engine / "tokenizer.json"))
    ids = tokenizer.encode("ü", add_special_tokens=False).ids
    asked = golden(max_tokens=1, logprobs=1, return_token_bytes=True)
    for id, spelled in zip(ids, ("c3", "bc"), strict=True):
        answer = server.generate(**asked, logit_bias=f'{{"{id}": 100}}')
        assert (answer["output_ids"], answer["output_token_bytes"]) == (id, spelled)
        assert answer["top_log_prob_ids"] == REPLAYED[0]
        top = bytes.fromhex(answer["top_token_bytes"]).decode(errors="replace")
        assert top == tokenizer.decode(REPLAYED[:1])


def test_as_many_tokens_as_fit(server: Deployment) -> None:
    answer = server.generate(input_ids=[5] * (MOST - 12), max_tokens=-1, end_id=-1)
    assert (answer["num_output_tokens"], answer["finish_reason"]) == (12, "length")
    refusal = rf"at most {MOST} tokens together, got {MOST} \+ 1; shorten"
    with pytest.raises(RefusedError, match=refusal):
        server.generate(input_ids=[5] * MOST, max_tokens=-1)


def test_equal_seeds_agree_and_others_differ(server: Deployment) -> None:
    hot = {"temperature": 1.5, "top_p": 0.99, "repetition_penalty": 1.1}
    streams = [server.stream(**golden(**hot, seed=seed, stream=True)) for seed in (*range(1, 9), 3)]
    answers = [joined(list(stream))[1] for stream in streams]
    assert answers[8] == answers[2]
    assert len({tuple(answer) for answer in answers}) == 8


def test_the_prompt_comes_back_where_it_is_asked_for(server: Deployment) -> None:
    answer = both(
        server, text_input="Grüße", max_tokens=3, end_id=-1, exclude_input_in_output=False
    )
    plain = both(server, text_input="Grüße", max_tokens=3, end_id=-1)
    assert answer["text_output"] == "Grüße" + plain["text_output"]


def test_generate_and_generate_stream_with_stream_on_and_off(server: Deployment) -> None:
    """TensorRT-LLM backend 233: `generate` takes one response, which a stream of one token is."""
    whole = server.generate(**golden(stream=False))
    assert whole["output_ids"] == REPLAYED
    (only,) = list(server.sse(**golden(stream=False)))
    assert (only["output_ids"], only["finish_reason"]) == (REPLAYED, "length")
    chunks = list(server.sse(**golden(stream=True)))
    assert (len(chunks), joined(chunks)) == (24, (whole["text_output"], REPLAYED))
    one = server.generate(**golden(stream=True, max_tokens=1))
    assert (one["output_ids"], one["finish_reason"]) == (REPLAYED[0], "length")
    with pytest.raises(RefusedError, match=r"^200 generate expects model to produce exactly 1"):
        server.generate(**golden(stream=True))


def by_sequence(chunks: list[dict[str, Any]], count: int) -> list[list[dict[str, Any]]]:
    """The responses of each sequence, each of which ends once and last."""
    parts = [[c for c in chunks if c["sequence_index"] == i] for i in range(count)]
    for part in parts:
        assert ["finish_reason" in chunk for chunk in part] == [False] * (len(part) - 1) + [True]
    return parts


def one_of(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def test_n_answers_are_those_of_the_derived_seeds(server: Deployment) -> None:
    """A prompt of 20 tokens cannot hit on pages of 32: every sequence computes it."""
    hot = golden(temperature=1.5, max_tokens=12)
    stream = server.stream(**hot, seed=2**64 - 2, num_return_sequences=3, stream=True)
    chunks = [{k: one_of(v) for k, v in chunk.items()} for chunk in stream]
    assert stream.finals == [False] * (len(chunks) - 1) + [True]
    answers = [joined(part)[1] for part in by_sequence(chunks, 3)]
    alone = [list(server.stream(**hot, seed=seed)) for seed in (2**64 - 2, 2**64 - 1, 0)]
    assert answers == [only["output_ids"] for (only,) in alone]
    assert len({tuple(answer) for answer in answers}) == 3
    # Not streamed, each answer is one response; HTTP has generate_stream for several.
    stream = server.stream(**hot, seed=2**64 - 2, num_return_sequences=3)
    whole = [{k: one_of(v) for k, v in chunk.items()} for chunk in stream]
    assert sorted(chunk["sequence_index"] for chunk in whole) == [0, 1, 2]
    assert stream.finals == [False, False, True]
    assert [joined(part)[1] for part in by_sequence(whole, 3)] == answers
    assert len(list(server.sse(**hot, num_return_sequences=2))) == 2
    with pytest.raises(RefusedError, match="generate expects model to produce exactly 1 response"):
        server.generate(**hot, num_return_sequences=2)


def test_n_answers_compute_the_prompt_once(server: Deployment) -> None:
    """Of 61 prompt tokens the others hit one page of 32 and run one window of 8 again."""
    asked = {"input_ids": GOLDEN["tokens"].tolist(), "max_tokens": 6, "end_id": -1}
    asked |= {"temperature": 1.5, "seed": 5}
    names = ("prompt_tokens", "prefix_cache_hits", "replayed_rows")
    before = [server.metric(f"dsv41_{name}_total") for name in names]
    parts = by_sequence(list(server.sse(**asked, num_return_sequences=3, stream=True)), 3)
    assert [part[0]["cached_tokens"] for part in parts] == [0, 32, 32]
    assert server.seconds_until_empty(1.0) < 1.0
    after = [server.metric(f"dsv41_{name}_total") for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [183, 64, 16]
    later = server.generate(**asked | {"seed": 7})
    assert (later["cached_tokens"], later["output_ids"]) == (32, joined(parts[2])[1])


@pytest.mark.parametrize("count", [2, 6])
def test_leaving_frees_the_pages_of_all_answers_within_a_second(
    server: Deployment, count: int
) -> None:
    asked = golden(max_tokens=480, num_return_sequences=count, stream=True)
    with EventStream(server.http, asked) as events:
        seen = {event["sequence_index"] for event in itertools.islice(events, 2 * count)}
        assert seen == set(range(count))
        server.wait_for_work()
        assert server.metric("dsv41_num_requests_running") == count
    assert server.seconds_until_empty(1.0) < 1.0
    called = server.stream(**asked)
    next(iter(called))
    called.cancel()
    assert server.seconds_until_empty(1.0) < 1.0


def test_echo_with_log_probabilities_of_the_prompt(server: Deployment, engine: Path) -> None:
    """By the golden logits of the full forward, float64; reported as float32."""
    tokens = GOLDEN["tokens"].tolist()
    asked = {"input_ids": tokens, "max_tokens": 2, "end_id": -1, "logprobs": 2, "echo": True}
    logits = GOLDEN["logits_full"]
    peak = logits.max(axis=1, keepdims=True)
    table = logits - peak - np.log(np.exp(logits - peak).sum(axis=1, keepdims=True))
    expected = table[np.arange(60), tokens[1:]]
    text = Tokenizer.from_file(str(engine / "tokenizer.json")).decode(tokens)
    answer = both(server, **asked)
    first, *others = list(server.sse(**asked, stream=True, num_return_sequences=2))
    for shown in (answer, first):
        assert shown["prompt_ids"] == tokens
        np.testing.assert_allclose(shown["prompt_log_probs"], expected, rtol=1e-5, atol=1e-6)
        top = np.array(shown["top_prompt_log_prob_ids"]).reshape(60, 2)
        assert top.tolist() == np.argsort(-table[:60], axis=1)[:, :2].tolist()
        assert shown["text_output"].startswith(text)
        assert shown["cached_tokens"] == 0
    assert answer["output_ids"][0] == int(logits[60].argmax())
    assert not any(PROMPT_LOG_PROBS & set(chunk) for chunk in others)
    other = next(chunk for chunk in others if chunk["sequence_index"] == 1)
    assert other["text_output"].startswith(text)
    assert not PROMPT_LOG_PROBS & set(both(server, **asked | {"echo": False}))
    for nothing_more in (
        both(server, **asked | {"max_tokens": 0}),
        *server.sse(**asked | {"max_tokens": 0}, stream=True),
    ):
        assert nothing_more["prompt_log_probs"] == answer["prompt_log_probs"]
        assert (nothing_more["text_output"], nothing_more["output_ids"]) == (text, [])
        assert (nothing_more["finish_reason"], nothing_more["num_output_tokens"]) == ("length", 0)
        assert nothing_more["cum_log_probs"] == 0
    several = {**asked, "max_tokens": 0, "logprobs": 0, "num_return_sequences": 3}
    shown = list(server.stream(**several | {"exclude_input_in_output": False, "echo": True}))
    assert [chunk["text_output"] for chunk in shown] == [text] * 3


def test_a_deadline_ends_a_request_and_frees_its_pages(server: Deployment) -> None:
    """As an input, and as gRPC's own parameter, which the Triton server knows."""
    endless = golden(max_tokens=480, stream=True)
    for values, parameters in (({"timeout": 300_000}, {}), ({}, {"timeout": 300_000})):
        started = time.monotonic()
        with pytest.raises(RefusedError, match=r"\[deadline_exceeded\] .*timeout of 0.3 s"):
            list(server.stream("late", parameters=parameters, **endless, **values))
        assert time.monotonic() - started < 1.0
        assert server.seconds_until_empty(1.0) < 1.0
    assert server.events("request_finished")[-1]["finish_reason"] == "timeout"
    enough = server.generate(**golden(max_tokens=3, timeout=30_000_000))
    assert enough["output_ids"] == REPLAYED[:3]


def test_salts_isolate_prefixes_and_a_reset_forgets_them(server: Deployment) -> None:
    asked = {"input_ids": GOLDEN["tokens"].tolist(), "max_tokens": 1, "end_id": -1}
    assert server.generate(control="reset_prefix_cache")["finish_reason"] == "stop"

    def cached(**values: Any) -> int:
        hit: int = server.generate(**asked, **values)["cached_tokens"]
        return hit

    assert [cached(cache_salt="a"), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 32, 0]
    assert [cached(), cached(), cached(cache_salt="b")] == [0, 32, 32]
    (only,) = list(server.stream(parameters={"cache_salt": "a"}, **asked))
    assert only["cached_tokens"] == [32]
    (told,) = list(server.stream(control="reset_prefix_cache"))
    assert (told["text_output"], told["output_ids"], told["finish_reason"]) == ("", [], "stop")
    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b")] == [0, 0, 0]
    with pytest.raises(RefusedError, match=r"expected control reset_prefix_cache and no other"):
        server.generate(control="reset_prefix_cache", **asked)


def test_a_router_hears_of_the_prefix_cache(server: Deployment, engine: Path) -> None:
    """The golden prompt fills a page of 32 tokens and a part of the next."""
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.setsockopt(zmq.RCVTIMEO, 200)
    subscriber.connect(events_of(engine))

    def received() -> list[Any]:
        (event,) = msgspec.msgpack.decode(subscriber.recv_multipart()[2])[1]
        return list(event)

    deadline = time.monotonic() + 10
    while True:  # a subscriber misses what is sent before the server knows it
        server.generate(control="reset_prefix_cache")
        try:
            assert received() == ["AllBlocksCleared"]
            break
        except zmq.Again:
            assert time.monotonic() < deadline
    tokens = GOLDEN["tokens"].tolist()
    server.generate(input_ids=tokens, max_tokens=1, end_id=-1)
    kind, (key,), parent, stored, size, *_ = received()
    assert (kind, parent, stored, size) == ("BlockStored", None, tokens[:32], 32)
    server.generate(input_ids=tokens + tokens[:10], max_tokens=1, end_id=-1)
    kind, _, parent, stored, *_ = received()
    assert (kind, parent, stored) == ("BlockStored", key, (tokens + tokens[:10])[32:64])
    context.destroy(linger=0)


def test_what_a_router_says_is_accepted_and_logged(server: Deployment) -> None:
    asked = golden(max_tokens=1)
    server.generate(**asked, session_id="a session", priority=-1)
    list(server.stream(parameters={"session_id": "another", "priority": 3}, **asked))
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        sessions = [event["session_id"] for event in server.events("request_finished")[-2:]]
        if sessions == ["a session", "another"]:
            return
        time.sleep(0.05)
    raise AssertionError(sessions)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"min_p": 2.0}, "expected min_p from 0 (off) to 1, got 2.0"),
        ({"repetition_penalty": 0.0}, "expected a repetition_penalty above 0 (1 is off), got 0.0"),
        ({"logprobs": 21}, "expected logprobs from 0 to 20, got 21"),
        ({"logit_bias": '{"512": 1}'}, "expected logit_bias of token ids from 0 to 511, got 512"),
        ({"stop_token_ids": [512]}, "expected end ids from 0 to 511, got 512"),
        ({"min_tokens": -1}, "expected min_tokens ≥ 0, got -1"),
    ],
)  # fmt: skip
def test_a_bad_value_gets_one_sentence(
    server: Deployment, values: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RefusedError, match=r"\[invalid_argument\]") as caught:
        server.generate(**golden(**values))
    assert sentence in str(caught.value)
