"""Requests with grammars in the core: waiting for them, and on the real network with drafts."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from builder.byte_tokenizer import byte_tokenizer
from engine.config import ModelConfig
from engine.network import Network
from python_backend.grammar.compiler import GrammarCompiler
from python_backend.grammar.grammar import Grammar
from python_backend.grammar.guide import Guide, GuideKind
from python_backend.request import FinishReason, RequestError
from python_backend.text.tokenizer import TextTokenizer
from tests.python_backend.grammar_texts import END, setup_of
from tests.python_backend.real_core import (
    VOCAB,
    assert_same,
    bounds_of,
    cases,
    core_of,
    serve,
    stream,
)
from tests.python_backend.serving import Stream, finish, limits, new_core, tokens
from tests.python_backend.test_draft_network import ALL, Answers, drafting_core

# -- waiting for a grammar, on an executor that needs none ----------------------------------------


def waiting(name: str) -> tuple[Stream, Future[Grammar]]:
    made, grammar = Stream(name, tokens(1, 5), 3), Future[Grammar]()
    made.request = replace(made.request, grammar=grammar)
    return made, grammar


def test_a_request_waits_for_its_grammar_and_nobody_else_does() -> None:
    core = new_core(limits())
    guided, grammar = waiting("guided")
    other = Stream("other", tokens(2, 5), 3)
    core.add_request(guided.request)
    core.add_request(other.request)
    finish(core)
    other.assert_served()
    assert guided.deltas == []
    assert not core.has_work
    assert not core.step()  # and this is no error
    statistics = core.statistics()
    assert (statistics.num_waiting, statistics.num_compiling) == (1, 1)
    grammar.set_result(None)  # type: ignore[arg-type]
    finish(core)
    guided.assert_served()
    assert core.statistics().num_waiting == 0


def test_a_grammar_that_is_there_is_not_waited_for() -> None:
    core = new_core(limits())
    guided, grammar = waiting("guided")
    grammar.set_result(None)  # type: ignore[arg-type]
    core.add_request(guided.request)
    finish(core)
    guided.assert_served()


def test_a_request_may_be_cancelled_before_its_grammar_is_there() -> None:
    core = new_core(limits())
    guided, grammar = waiting("guided")
    core.add_request(guided.request)
    core.cancel("guided")
    finish(core)
    assert guided.finish_reason == FinishReason.CANCELLED
    grammar.set_result(None)  # type: ignore[arg-type]
    finish(core)
    assert len(guided.deltas) == 1
    assert core.statistics().num_waiting == 0


def test_a_refused_grammar_ends_its_request() -> None:
    core = new_core(limits())
    for name, problem, code in (
        ("wrong", RequestError("invalid_grammar", "expected one"), "invalid_grammar"),
        ("broken", OSError("no process"), "internal"),
    ):
        guided, grammar = waiting(name)
        core.add_request(guided.request)
        grammar.set_exception(problem)
        finish(core)
        assert guided.finish_reason == FinishReason.ERROR
        assert guided.deltas[-1].error is not None
        assert guided.deltas[-1].error.code == code
    assert core.statistics().num_finished[FinishReason.ERROR] == 2


def test_requests_without_a_grammar_fill_the_queue() -> None:
    core = new_core(limits(max_batch_size=1, max_queued_requests=1))
    first, grammar = waiting("first")
    core.add_request(first.request)
    core.step()
    core.add_request(waiting("second")[0].request)
    core.step()
    with pytest.raises(RequestError, match=r"\[queue_full\]"):
        core.add_request(waiting("third")[0].request)
    grammar.set_result(None)  # type: ignore[arg-type]
    finish(core)
    core.add_request(waiting("third")[0].request)


def test_a_stopped_core_ends_who_waits_for_a_grammar() -> None:
    core = new_core(limits())
    guided, _ = waiting("guided")
    core.add_request(guided.request)
    core.step()
    core.stop()
    core.run()
    assert guided.finish_reason == FinishReason.ERROR


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing that leads back to itself is found."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("cancelled", [False, True])
def test_nothing_keeps_the_grammar_of_a_request_that_ended(cancelled: bool) -> None:
    """Also where it was waited for."""
    core = new_core(limits())
    guided, grammar = waiting("guided")
    core.add_request(guided.request)
    core.step()
    if cancelled:
        core.cancel("guided")
    grammar.set_result(None)  # type: ignore[arg-type]
    finish(core)
    assert guided.finish_reason is not None
    kept = weakref.ref(grammar)
    del guided, grammar
    assert kept() is None


# -- the real network, in float64 ----------------------------------------------------------------

PATTERNS = ("[a-c]{2,9}", "(ab|ba|c)*d", "x[0-9]{1,3}(,x[0-9]{1,3})*", "(yes|no|yeah)!?", "a*")


@pytest.fixture(scope="module")
def text(tiny_config: ModelConfig) -> TextTokenizer:
    return TextTokenizer(byte_tokenizer(tiny_config), VOCAB)


@pytest.fixture(scope="module")
def compiler(text: TextTokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(setup_of(text, VOCAB))
    yield made
    made.close()


def guided_stream(
    compiler: GrammarCompiler,
    name: str,
    pattern: str | None,
    length: int,
    heat: float,
    seed: int,
    kind: GuideKind = GuideKind.REGEX,
) -> Stream:
    prompt = np.random.default_rng(seed).integers(3, VOCAB, length, dtype=np.int32)
    made = stream(name, prompt, 8, heat > 0, seed)
    grammar = None
    if pattern is not None:
        grammar = compiler.compile(Guide(kind, pattern))
        grammar.result()  # known before the core is run step by step
    made.request = replace(
        made.request,
        sampling=replace(made.request.sampling, temperature=heat),
        end_ids=frozenset({END}),
        grammar=grammar,
    )
    return made


def test_drafts_and_preemption_change_no_guided_answer(
    network64: Network, compiler: GrammarCompiler, text: TextTokenizer
) -> None:
    """Right and wrong drafts, in pools that not all requests fit, beside requests without a
    grammar: tokens and logits are those of each alone without drafts, and texts are of their
    languages."""
    seen = {"accepted": 0, "rejected": 0, "preempted": 0, "complete": 0}

    @settings(cases(3), derandomize=True)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        patterns = data.draw(st.lists(st.sampled_from([None, *PATTERNS]), min_size=3, max_size=3))
        lengths = [data.draw(st.integers(9, 20)) for _ in patterns]
        heats = [data.draw(st.sampled_from([0.0, 1.0, 4.0])) for _ in patterns]

        def streams() -> list[Stream]:
            return [
                guided_stream(compiler, f"r{i}", patterns[i], lengths[i], heats[i], i)
                for i in range(3)
            ]

        plain, drafted = streams(), streams()
        alone = core_of(network64, bounds_of(prefix_cache=False, global_page_tokens=2))
        answers: Answers = {}
        for i, one in enumerate(plain):
            serve(alone, [one], [0])
            answers[i] = one.output
        bounds = bounds_of(
            prefix_cache=False,
            global_page_tokens=2,
            num_global_pages=1 + sum(length // 2 + 1 for length in lengths),
            draft=ALL,
        )
        together = drafting_core(network64, bounds, answers)
        serve(together, drafted, [0, 0, 1])
        for one, expected, pattern in zip(drafted, plain, patterns, strict=True):
            assert_same(together, alone, one, expected)
            assert one.finish_reason == expected.finish_reason
            if pattern is not None and one.finish_reason == FinishReason.STOP:
                spoken = np.array(one.output[:-1], dtype=np.int32)
                said = text.detokenizer().feed(spoken, last=True)
                assert re.fullmatch(pattern, said), said
                seen["complete"] += 1
        statistics = together.statistics()
        seen["accepted"] += int(statistics.num_accepted.sum())
        seen["rejected"] += int((statistics.num_drafted - statistics.num_accepted).sum())
        seen["preempted"] += statistics.num_preemptions

    check()
    assert min(seen.values()) > 0, seen


def test_an_exhausted_grammar_ends_its_own_request_only(
    network64: Network, compiler: GrammarCompiler, text: TextTokenizer
) -> None:
    """Behind its first letter more rules begin than a parser follows at once."""
    rules = [f'r{i} ::= "b" r{i} "c" | "d"' for i in range(1100)]
    names = " | ".join(f"r{i}" for i in range(1100))
    guide = "\n".join([f'root ::= "a" ({names})', *rules])
    hungry = guided_stream(compiler, "hungry", guide, 5, 0.0, 1, GuideKind.GRAMMAR)
    other = guided_stream(compiler, "other", "[a-c]{9,}", 5, 0.0, 2)
    alone = guided_stream(compiler, "alone", "[a-c]{9,}", 5, 0.0, 2)
    core = core_of(network64, bounds_of(prefix_cache=False))
    serve(core, [hungry, other], [0, 0])
    assert hungry.finish_reason == FinishReason.ERROR
    assert hungry.deltas[-1].error is not None
    assert hungry.deltas[-1].error.code == "grammar_exhausted"
    assert hungry.output == [text.encode_word("a")[0]]
    serve(core, [alone], [0])
    assert other.output == alone.output
    assert core.statistics().num_running == core.statistics().num_global_pages_used == 0


@pytest.mark.usefixtures("uncollected")
def test_a_slot_keeps_no_grammar_of_an_answer_that_ended(
    network64: Network, compiler: GrammarCompiler
) -> None:
    """What guides may take together would be used up on a server that does nothing."""
    core = core_of(network64, bounds_of(prefix_cache=False))
    streams = [guided_stream(compiler, f"{i}", "[a-c]{9,}", 5, 0.0, i) for i in range(3)]
    grammars = [weakref.ref(one.request.grammar.result()) for one in streams if one.request.grammar]
    serve(core, streams, [0, 0, 0])
    assert [one.finish_reason for one in streams] == [FinishReason.LENGTH] * 3
    del streams
    assert [one() for one in grammars] == [None] * 3
