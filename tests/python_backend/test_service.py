"""An engine being served in this process, and the thread that answers its clients."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from builder.byte_tokenizer import byte_tokenizer
from builder.cli import main
from engine.config_reader import read_config_file
from engine.directory import Engine
from engine.manifest import EngineError
from python_backend import service
from python_backend.generation.answer import AnswerText
from python_backend.generation.options import Shown
from python_backend.generation.stop_strings import StopStrings
from python_backend.request import Delta, FinishReason, Request, RequestError, SamplingParams
from python_backend.responses import Responder, ResponseStream
from python_backend.sequence import AnswerSequence, Outputs
from python_backend.service import ServedModel, settings_for
from python_backend.settings import SettingsError
from python_backend.text.detokenizer import Detokenizer


@pytest.fixture(scope="module")
def small_engine(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """The golden model built for 4 requests, 32 rows a step and 100 tokens, with a tokenizer."""
    folder = tmp_path_factory.mktemp("service") / "engine"
    checkpoint = shutil.copytree(tiny_dir, folder.parent / "checkpoint")
    config, _ = read_config_file(tiny_dir / "config.json")
    byte_tokenizer(config).save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    options = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(folder)]
    limits = ["--max_batch_size=4", "--max_num_tokens=32", "--max_seq_len=100"]
    classes = f"--token_class={tiny_dir / 'golden_quant.safetensors'}"
    assert main(["engine", *options, *limits, classes]) == 0
    return Engine.open(folder)


@pytest.fixture(scope="module")
def model(small_engine: Engine) -> Iterator[ServedModel]:
    stages: list[tuple[str, float]] = []
    opened = ServedModel.open(
        small_engine.path, {"dtype": "float64"}, lambda stage, share: stages.append((stage, share))
    )
    shares = [share for stage, share in stages if stage == "loading weights"]
    assert shares == sorted(shares)
    assert 2 <= len(shares) <= 20
    opened.start()
    opened.warm_up()
    yield opened
    opened.stop()
    with pytest.raises(RequestError, match=r"\[shutting_down\]"):
        opened.warm_up()


def test_what_is_not_asked_is_the_engines_limit(small_engine: Engine) -> None:
    settings = settings_for(small_engine, {"max-num-tokens": "16", "dtype": "float64"})
    assert (settings.max_batch_size, settings.max_num_tokens, settings.max_seq_len) == (4, 16, 100)
    assert settings.dtype == "float64"


def test_steps_on_a_cpu_are_short_unless_their_rows_are_set(small_engine: Engine) -> None:
    path = small_engine.path
    assert service.check(path, {"dtype": "float64"}).limits().step_seconds == 0.5
    for name in ("max-num-tokens", "max_num_tokens"):
        assert service.check(path, {name: 32}).limits().step_seconds is None


@pytest.mark.parametrize("name", ["max_batch_size", "max_num_tokens", "max_seq_len"])
def test_no_setting_exceeds_what_the_engine_is_built_for(small_engine: Engine, name: str) -> None:
    limit = getattr(small_engine.build, name)
    with pytest.raises(SettingsError, match=rf"expected {name} of at most {limit}, .* got 101"):
        settings_for(small_engine, {name: 101})


def test_end_tokens_are_those_of_both_configurations(model: ServedModel) -> None:
    assert model.end_ids == {1, 7}


def test_memory_of_a_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    monkeypatch.setattr(service, "_CGROUP_LIMIT", limit)
    monkeypatch.setattr(service, "_CGROUP_USED", used)
    whole = service.available_memory()
    used.write_text("400\n")
    limit.write_text("1000\n")
    assert service.available_memory() == 600
    limit.write_text("300\n")
    assert service.available_memory() == 0
    limit.write_text("max\n")
    assert service.available_memory() == pytest.approx(whole, rel=0.5)


class Client:
    """The far end of a reply: may leave, may break, and notices a second end or a late question."""

    def __init__(self, *, leaves_after: int = 10**9, breaks_after: int = 10**9) -> None:
        self.received: list[Outputs] = []
        self.errors: list[RequestError] = []
        self.ended = threading.Event()
        self.wrongs: list[str] = []
        self._leaves_after = leaves_after
        self._breaks_after = breaks_after

    def send(self, outputs: Outputs, *, final: bool) -> None:
        if len(self.received) >= self._breaks_after:
            raise OSError("the line is cut")
        self.received.append(outputs)
        if final:
            self._end()

    def fail(self, error: RequestError) -> None:
        self.errors.append(error)
        self._end()

    def is_cancelled(self) -> bool:
        if self.ended.is_set():
            self.wrongs.append("asked after the end")
        return len(self.received) >= self._leaves_after

    def _end(self) -> None:
        if self.ended.is_set():
            self.wrongs.append("ended twice")
        self.ended.set()


@pytest.fixture
def ask(model: ServedModel) -> Iterator[Any]:
    """ask(key, client, max_tokens, streamed): a request on the golden prompt."""
    prompt = load_file(Path(__file__).parents[1] / "vectors" / "tiny" / "golden_quant.safetensors")[
        "tokens"
    ][:20].astype(np.int32)
    responder = Responder(model.core.cancel, lambda: None)
    responder.start()

    def start(key: str, client: Client, max_tokens: int = 8, streamed: bool = True) -> None:
        assert model.text is not None
        sequence = AnswerSequence(
            key=key,
            num_input_tokens=20,
            streamed=streamed,
            text=AnswerText(model.text.detokenizer(), None, 0),
            shown=Shown(num_output_tokens=False),
        )
        stream = ResponseStream(key, client, [sequence])
        responder.open(stream)
        deliver = partial(responder.deliver, stream, 0)
        request = Request(key, prompt, max_tokens, SamplingParams(), frozenset(), deliver)
        try:
            model.core.add_request(request)
        except RequestError as error:
            responder.forget(stream, error)

    yield start
    responder.close()


def test_every_way_to_end_ends_once(model: ServedModel, ask: Any) -> None:
    clients = {
        "reads": Client(),
        "leaves": Client(leaves_after=2),
        "breaks": Client(breaks_after=2),
        "too long": Client(),
    }
    for key, client in clients.items():
        ask(key, client, max_tokens=81 if key == "too long" else 60 if key != "reads" else 8)
    for client in clients.values():
        assert client.ended.wait(30)
    time.sleep(0.3)  # rounds of questions that must not come any more
    assert [client.wrongs for client in clients.values()] == [[]] * 4
    codes = {key: [e.code for e in client.errors] for key, client in clients.items()}
    assert codes == {
        "reads": [],
        "leaves": ["cancelled"],
        "breaks": ["internal"],
        "too long": ["too_long"],
    }
    assert len(clients["reads"].received) == 8
    assert len(clients["breaks"].received) == 2
    assert 2 <= len(clients["leaves"].received) < 60
    statistics = model.core.statistics()
    assert (statistics.num_running, statistics.num_global_pages_used) == (0, 0)


class BrokenAtTheEnd(Detokenizer):
    def feed(self, output_ids: npt.NDArray[np.int32], *, last: bool = False) -> str:
        if last:
            raise IndexError("no such token")
        return super().feed(output_ids)


@pytest.mark.parametrize("breaks_after", [1, 10**9])
def test_a_last_delta_that_cannot_be_sent_ends_its_stream(breaks_after: int) -> None:
    """The core has forgotten the request by then: a stream left open would hang its client, and
    the responder's close, for ever."""
    client = Client(breaks_after=breaks_after)
    responder = Responder(lambda key, reason: None, lambda: None)
    responder.start()
    sends_break = breaks_after == 1
    detokenizer = Detokenizer([b"a", b"b"]) if sends_break else BrokenAtTheEnd([b"a", b"b"])
    sequence = AnswerSequence("k", 1, True, AnswerText(detokenizer, None, 0))
    stream = ResponseStream("k", client, [sequence])
    responder.open(stream)
    responder.deliver(stream, 0, Delta(np.array([0], np.int32), 0))
    responder.deliver(stream, 0, Delta(np.array([1], np.int32), 0, FinishReason.LENGTH))
    assert client.ended.wait(10)
    responder.close()
    assert [error.code for error in client.errors] == ["internal"]
    assert client.received[0]["text_output"].item() == b"a"
    assert client.wrongs == []


class SlowClient(Client):
    """A line on which a response takes 20 ms."""

    def send(self, outputs: Outputs, *, final: bool) -> None:
        time.sleep(0.02)
        super().send(outputs, final=final)


@pytest.mark.parametrize("ends_with_an_error", [False, True])
def test_what_waits_for_a_slow_line_is_joined(ends_with_an_error: bool) -> None:
    """Two sequences of 150 steps, of which each brings two tokens, faster than any can be sent:
    both come whole and in order in a few responses, and an error comes behind them."""
    client = SlowClient()
    responder = Responder(lambda key, reason: None, lambda: None)
    detokenizers = [Detokenizer([bytes([48 + i]) for i in range(10)]) for _ in range(2)]
    sequences = [
        AnswerSequence(f"k{i}", 1, True, AnswerText(detokenizers[i], None, 0), index=i)
        for i in range(2)
    ]
    stream = ResponseStream("k", client, sequences)
    responder.open(stream)
    answers = np.random.default_rng(0).integers(0, 10, (2, 150, 2)).astype(np.int32)
    for step in range(150):
        last = FinishReason.LENGTH if step == 149 and not ends_with_an_error else None
        for index in (0, 1):
            delta = Delta(answers[index, step], 7, last, num_drafts=1)
            responder.deliver(stream, index, delta)
    if ends_with_an_error:
        responder.forget(stream, RequestError("internal", "a step failed"))
    responder.start()
    assert client.ended.wait(10)
    responder.close()
    for index in (0, 1):
        mine = [o for o in client.received if o["sequence_index"].item() == index]
        ids = np.concatenate([o["output_ids"][0] for o in mine])
        assert ids.tolist() == answers[index].ravel().tolist()
        assert b"".join(o["text_output"].item() for o in mine).decode() == "".join(map(str, ids))
        if not ends_with_an_error:
            assert mine[-1]["num_accepted_drafts"].item() == 150
    assert len(client.received) == 2
    assert [error.code for error in client.errors] == ["internal"] * ends_with_an_error
    assert (client.wrongs, len(stream.waiting)) == ([], 0)


def test_sequences_end_one_by_one() -> None:
    """The first ends with a stop string, the second with its length; the core hears of both, and
    the last end is final."""
    client, cancelled, begun = Client(), list[tuple[str, FinishReason]](), list[str]()
    responder = Responder(lambda key, reason: cancelled.append((key, reason)), lambda: None)
    responder.start()
    texts = [
        AnswerText(Detokenizer([b"a", b"b"]), StopStrings(["b"]) if i == 0 else None, 0)
        for i in range(2)
    ]
    sequences = [AnswerSequence(f"k{i}", 1, True, text, index=i) for i, text in enumerate(texts)]
    begin = partial(begun.append, "others")
    stream = ResponseStream("k", client, sequences, begin)
    responder.open(stream)
    judged = Delta(np.empty(0, np.int32), 0)
    responder.deliver(stream, 0, judged)
    responder.deliver(stream, 0, Delta(np.array([0], np.int32), 0))
    responder.deliver(stream, 1, Delta(np.array([1], np.int32), 7))
    responder.deliver(stream, 0, Delta(np.array([1, 0], np.int32), 0))
    responder.deliver(stream, 0, Delta(np.empty(0, np.int32), 0, FinishReason.STOP))
    responder.deliver(stream, 1, Delta(np.array([0], np.int32), 7, FinishReason.LENGTH))
    assert client.ended.wait(10)
    responder.close()
    assert cancelled == [("k0", FinishReason.STOP), ("k1", FinishReason.LENGTH)]
    assert begun == ["others"]
    said = [(o["sequence_index"].item(), o["text_output"].item()) for o in client.received]
    assert said == [(0, b"a"), (1, b"b"), (0, b""), (1, b"a")]
    reasons = [o["finish_reason"].item() for o in client.received if "finish_reason" in o]
    assert (reasons, client.wrongs, client.errors) == ([b"stop", b"length"], [], [])


def test_a_sequence_that_fails_ends_the_others() -> None:
    client, cancelled = Client(), list[tuple[str, FinishReason]]()
    responder = Responder(lambda key, reason: cancelled.append((key, reason)), lambda: None)
    responder.start()
    sequences = [AnswerSequence(f"k{i}", 1, True, None, index=i) for i in range(2)]
    stream = ResponseStream("k", client, sequences)
    responder.open(stream)
    responder.deliver(stream, 0, Delta(np.array([0], np.int32), 0))
    error = RequestError("executor_failed", "expected a step to run, but it failed")
    no_ids = np.empty(0, np.int32)
    responder.deliver(stream, 1, Delta(no_ids, 0, FinishReason.ERROR, error))
    responder.deliver(stream, 0, Delta(no_ids, 0, FinishReason.ERROR))
    assert client.ended.wait(10)
    responder.close()
    assert client.errors == [error]
    assert cancelled == [("k0", FinishReason.ERROR), ("k1", FinishReason.ERROR)]
    assert client.wrongs == []


@pytest.mark.parametrize("why", ["late", "left", "stopped"])
def test_a_stream_ends_while_the_core_is_busy(why: str) -> None:
    """The core hears of it and says nothing for a while; what it then says is dropped."""
    client = Client(leaves_after=1 if why == "left" else 10**9)
    cancelled = list[tuple[str, FinishReason]]()
    stopped = RequestError("shutting_down", "expected to finish, but the server stopped")

    def tick() -> None:
        if why == "stopped" and client.received:
            responder.end_all(stopped)

    responder = Responder(lambda key, reason: cancelled.append((key, reason)), tick)
    sequences = [AnswerSequence(f"k{i}", 1, True, None, index=i) for i in range(2)]
    stream = ResponseStream("k", client, sequences, seconds=0.3 if why == "late" else None)
    responder.open(stream)
    responder.deliver(stream, 0, Delta(np.array([0], np.int32), 0))
    responder.start()
    assert client.ended.wait(10)
    for index, last in ((0, FinishReason.LENGTH), (1, FinishReason.CANCELLED)):
        responder.deliver(stream, index, Delta(np.array([1], np.int32), 0))
        responder.deliver(stream, index, Delta(np.empty(0, np.int32), 0, last))
    responder.close()
    code, reason = {
        "late": ("deadline_exceeded", FinishReason.TIMEOUT),
        "left": ("cancelled", FinishReason.CANCELLED),
        "stopped": ("shutting_down", FinishReason.ERROR),
    }[why]
    assert [error.code for error in client.errors] == [code]
    assert cancelled == [("k0", reason), ("k1", reason)]
    assert (len(client.received), client.wrongs, responder.num_open) == (1, [], 0)


def test_a_whole_answer_is_the_streamed_one(ask: Any) -> None:
    streamed, whole = Client(), Client()
    ask("streamed", streamed)
    ask("whole", whole, streamed=False)
    assert streamed.ended.wait(30)
    assert whole.ended.wait(30)
    (only,) = whole.received
    text = b"".join(outputs["text_output"].item() for outputs in streamed.received)
    ids = np.concatenate([outputs["output_ids"][0] for outputs in streamed.received])
    assert (text, ids.tolist()) == (only["text_output"].item(), only["output_ids"][0].tolist())
    assert set(only) == {
        "text_output", "output_ids", "cached_tokens", "finish_reason", "num_input_tokens"
    }  # fmt: skip
    assert only["num_input_tokens"].tolist() == [[20]]


def built_with(tiny_dir: Path, folder: Path, end_token: object, *options: str) -> Path:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (checkpoint / name).symlink_to(tiny_dir / name)
    text = json.dumps({"eos_token_id": end_token})
    (checkpoint / "generation_config.json").write_text(text)
    classes = f"--token_class={tiny_dir / 'golden_quant.safetensors'}"
    paths = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(folder / "engine")]
    assert main(["engine", *paths, classes, *options]) == 0
    return folder / "engine"


def test_end_tokens_are_checked_before_weights_are_read(tiny_dir: Path, tmp_path: Path) -> None:
    """A wrong end token would refuse every request and blame its sender; null is no end token."""
    for i, wrong in enumerate([512, -1, "x", True, [1, None]]):
        with pytest.raises(EngineError, match=r"token ids from 0 to 511, got "):
            service.check(built_with(tiny_dir, tmp_path / str(i), wrong), {})
    with pytest.raises(EngineError, match=r"at most 32 end tokens .* got 33"):
        service.check(built_with(tiny_dir, tmp_path / "many", list(range(33))), {})
    checked = service.check(built_with(tiny_dir, tmp_path / "null", None), {})
    assert checked.end_ids == {1}
    checked = service.check(built_with(tiny_dir, tmp_path / "one", 7), {})
    assert checked.end_ids == {1, 7}


def test_an_engine_of_several_ranks_is_refused_at_once(tiny_dir: Path, tmp_path: Path) -> None:
    engine = built_with(tiny_dir, tmp_path / "ranks", 1, "--tp_size=2")
    with pytest.raises(EngineError, match="one rank, got 2 ranks"):
        service.check(engine, {})
