"""From guides to grammars: trials, what is remembered, what answers share and what they do not."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from python_backend.grammar import compiler as compiling
from python_backend.grammar.compiler import GrammarCompiler
from python_backend.grammar.guide import Guide, GuideKind
from python_backend.grammar.masks import GrammarMasks
from python_backend.grammar.messages import Tried
from python_backend.request import RequestError
from python_backend.text.tokenizer import TextTokenizer
from tests.python_backend.grammar_texts import (
    END,
    VOCAB,
    accepts,
    rows_of,
    setup_of,
    tinyflash_text,
    tokens_of,
)


@pytest.fixture(scope="module")
def text() -> TextTokenizer:
    return tinyflash_text()


@pytest.fixture(scope="module")
def compiler(text: TextTokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(setup_of(text))
    yield made
    made.close()


@pytest.fixture(scope="module")
def hasty(text: TextTokenizer) -> Iterator[GrammarCompiler]:
    """One with little patience."""
    made = GrammarCompiler(setup_of(text, seconds=0.2))
    yield made
    made.close()


def chain(length: int) -> str:
    """A schema whose references are as deep as it is long."""
    links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(length)}
    return json.dumps({"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "null"}}})


@pytest.mark.parametrize(
    ("kind", "guide", "said"),
    [
        (GuideKind.JSON_SCHEMA, chain(3500), "too deep"),
        (GuideKind.JSON_SCHEMA, '{"type":"integer","multipleOf":9999991}', "0.2 seconds"),
        (GuideKind.JSON_SCHEMA, '{"items":' * 9000 + "{}" + "}" * 9000, "nested too deeply"),
        (GuideKind.REGEX, "(" * 60000 + ")" * 60000, "nested parentheses"),
        (GuideKind.GRAMMAR, "root ::= " + "(" * 9000 + '"a"' + ")" * 9000, "deeply nested"),
    ],
)
def test_a_hostile_guide_ends_with_its_process(
    hasty: GrammarCompiler, kind: GuideKind, guide: str, said: str
) -> None:
    """Neither the server nor the worker falls over; what is known is compiled meanwhile."""
    other = Guide(GuideKind.REGEX, "a+")
    hasty.compile(other).result()
    worker = hasty._trials._worker
    hostile = hasty.compile(Guide(kind, guide))
    hasty.compile(other).result()
    assert said in str(hostile.exception())
    hasty.compile(Guide(GuideKind.REGEX, f"b{len(guide)}")).result()
    assert hasty._trials._worker is worker


class SlowTrials:
    """Those of a compiler, which last until `gate` is set."""

    def __init__(self, compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tried: list[str] = []
        self.begun, self.gate = threading.Event(), threading.Event()
        self._try_out = compiler._trials.try_out
        monkeypatch.setattr(compiler._trials, "try_out", self.try_out)

    def try_out(self, guide: Guide, seconds: float) -> Tried:
        self.tried.append(guide.text)
        self.begun.set()
        assert self.gate.wait(20)
        return self._try_out(guide, seconds)


def test_a_known_guide_does_not_wait_for_the_trial_of_another(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Guide(GuideKind.REGEX, "a+")
    compiler.compile(known).result()
    slow = SlowTrials(compiler, monkeypatch)
    new = compiler.compile(Guide(GuideKind.REGEX, "slow+"))
    compiler.compile(known).result(20)
    assert not new.done()
    slow.gate.set()
    new.result(20)


def test_slow_guides_are_tried_again_behind_new_ones(
    text: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = GrammarCompiler(setup_of(text, seconds=0.4))
    try:
        slow = [f'{{"type":"integer","multipleOf":{number}}}' for number in (9999991, 9999973)]
        held = SlowTrials(made, monkeypatch)
        late = [made.compile(Guide(GuideKind.JSON_SCHEMA, one)) for one in slow]
        quick = made.compile(Guide(GuideKind.REGEX, "a"))
        held.gate.set()
        assert all("more than 0.4 seconds" in str(future.exception(20)) for future in late)
        assert accepts(quick.result(), text, "a")
        assert held.tried == [*slow, "a", *slow]
    finally:
        made.close()


def test_nothing_is_done_for_those_who_left(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a trial nor, behind the one of others, an answer's own grammar."""
    made: list[Tried] = []
    compile = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda tried: (made.append(tried), compile(tried))[1])
    slow = SlowTrials(compiler, monkeypatch)
    stays, left, last = (Guide(GuideKind.REGEX, f"{word}+") for word in ("stays", "left", "last"))
    waiting = [compiler.compile(guide) for guide in (stays, left, stays, left, last)]
    del waiting[1:4]
    slow.gate.set()
    assert [future.exception(20) for future in waiting] == [None, None]
    assert slow.tried == ["stays+", "last+"]
    assert len(made) == 2
    assert compiler.compile(left).exception(20) is None


def test_a_compiler_that_is_closed_refuses_who_waits(
    text: TextTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And tries nothing out any more: that could take minutes."""
    made = GrammarCompiler(setup_of(text))
    slow = SlowTrials(made, monkeypatch)
    waiting = [made.compile(Guide(GuideKind.REGEX, f"{i}+")) for i in range(3)]
    assert slow.begun.wait(20)
    closing = threading.Thread(target=made.close)
    closing.start()
    while not made._closing:
        pass
    slow.gate.set()
    closing.join(20)
    assert slow.tried == ["0+"]
    for future in waiting:
        with pytest.raises(RequestError, match=r"\[shutting_down\]"):
            future.result(0)


def test_a_worker_that_was_killed_is_started_again(text: TextTokenizer) -> None:
    made = GrammarCompiler(setup_of(text))
    try:
        made.compile(Guide(GuideKind.REGEX, "a")).result()
        assert made._trials._worker is not None
        os.kill(made._trials._worker.pid, signal.SIGKILL)
        made._trials._worker.wait()
        assert accepts(made.compile(Guide(GuideKind.REGEX, "b")).result(), text, "b")
    finally:
        made.close()


def test_what_passed_its_trial_and_is_refused_here_is_an_error_of_the_server(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler._trials, "try_out", lambda guide, seconds: Tried("start: (", ""))
    with pytest.raises(RequestError, match=r"\[internal\] expected to compile the guide, but "):
        compiler.compile(Guide(GuideKind.REGEX, "passes")).result(20)


@pytest.fixture
def trials(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of guides that are tried out from now on."""
    tried: list[str] = []
    try_out = compiler._trials.try_out

    def counted(guide: Guide, seconds: float) -> Tried:
        tried.append(guide.text)
        return try_out(guide, seconds)

    monkeypatch.setattr(compiler._trials, "try_out", counted)
    return tried


def test_what_passed_is_remembered_while_there_is_room(
    compiler: GrammarCompiler, trials: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(pattern: str) -> BaseException | None:
        return compiler.compile(Guide(GuideKind.REGEX, pattern)).exception()

    monkeypatch.setattr(compiling, "KNOWN_GUIDES", 2)
    compiler._known.clear()
    for pattern in ("x1", "x2", "x1", "x3", "x1", "x2", "x(", "x("):
        assert (compiled(pattern) is None) == (pattern != "x(")
    # The second x1 makes x2 the oldest, which x3 then displaces; a refusal is not remembered.
    assert trials == ["x1", "x2", "x3", "x2", "x(", "x("]
    monkeypatch.setattr(compiling, "KNOWN_CHARS", 3)
    assert compiled("a longer one") is None
    assert len(compiler._known) == 1
    assert Guide(GuideKind.REGEX, "a").digest != Guide(GuideKind.REGEX, "a", True).digest
    monkeypatch.setattr(compiling, "MAX_NEW", 0)
    assert compiled("a longer one") is None
    with pytest.raises(RequestError, match=r"\[grammar_queue_full\]"):
        compiler.compile(Guide(GuideKind.REGEX, "x4"))


def test_answers_that_wait_for_one_new_guide_share_its_trial(
    compiler: GrammarCompiler, trials: list[str]
) -> None:
    waiting = [compiler.compile(Guide(GuideKind.REGEX, text)) for text in ("y+", "z(") * 5]
    assert [future.exception() is None for future in waiting] == [True, False] * 5
    assert trials == ["y+", "z("]
    assert len({id(future.result()) for future in waiting[::2]}) == 5


LARGE = json.dumps({"enum": [f"{i:05}" for i in range(5000)]})


@pytest.mark.parametrize(
    ("guide", "least"),
    [
        (Guide(GuideKind.JSON_SCHEMA, LARGE), 1 << 20),
        (Guide(GuideKind.JSON, ""), 80 << 10),  # of which there are thousands
    ],
)
def test_guides_at_work_are_limited_together(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, guide: Guide, least: int
) -> None:
    first = compiler.compile(guide).result()
    assert first.num_bytes > least
    monkeypatch.setattr(compiling, "LIVE_BYTES", 2 * first.num_bytes - 1)
    with pytest.raises(RequestError, match=r"\[grammar_queue_full\] .* one more of \d+ KiB"):
        compiler.compile(guide).result()
    del first
    assert compiler.compile(guide).result() is not None


def test_an_answer_that_uses_up_its_lexer_fails_alone(
    compiler: GrammarCompiler, text: TextTokenizer
) -> None:
    """Every place in a text of bounded length has states of its own."""
    schema = {"type": "string", "maxLength": 20_000}
    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))
    masks = GrammarMasks(VOCAB, END, 1)
    (the,) = text.encode_word(" the")
    begin = np.array(text.encode_word('"a'), np.int32)
    first, second, third = (compiler.compile(guide).result() for _ in range(3))
    masks.begin(0, first, begin)
    masks.begin(1, second, begin)
    rows = rows_of([0])
    length = 0
    while not (failures := masks.failures(np.array([0, 1]))) and length < 5000:
        masks.append(np.array([0]), np.array([[the]], np.int32), np.array([1]))
        masks.masks(rows)
        length += 1
    assert 1000 < length < 4000
    assert failures.keys() == {0}
    assert "too many states" in failures[0]
    masks.begin(0, third, begin)
    allowed = masks.masks(rows_of([0, 1]))
    assert not masks.failures(np.array([0, 1]))
    assert all(the in tokens_of(row) for row in allowed)
