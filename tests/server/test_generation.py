"""Generation options through the real Triton server, over both protocols.

Expected tokens are the golden ones: what a rule forbids or favours follows from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.server.deployment import GOLDEN, PROMPT, Deployment, RefusedError, joined

pytestmark = pytest.mark.server

REPLAYED: list[int] = GOLDEN["greedy_from_20_replay"].tolist()
MOST = 512
SPELLED = {"output_token_bytes", "top_token_bytes"}
LOG_PROBS = SPELLED | {"output_log_probs", "cum_log_probs", "top_log_probs", "top_log_prob_ids"}


@pytest.fixture(scope="module")
def server(engine: Path) -> Iterator[Deployment]:
    deployment = Deployment(
        engine, "--dtype=float64", "--global-page-tokens=32", f"--max-seq-len={MOST}"
    )
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
