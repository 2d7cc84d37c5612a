"""Stop strings: every way of cutting a text gives the answer of the whole text."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from python_backend.generation.answer import AnswerText
from python_backend.generation.stop_strings import StopStrings
from python_backend.request import Delta
from python_backend.sequence import AnswerSequence
from python_backend.text.detokenizer import Detokenizer


def oracle(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the first moment at which the text ends with a stop string."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


letters = st.text(alphabet="ab好", max_size=14)
stops = st.lists(st.text(alphabet="ab好", min_size=1, max_size=4), min_size=1, max_size=3)


@settings(deadline=None, max_examples=300)
@given(text=letters, stops=stops, cuts=st.sets(st.integers(0, 14)))
def test_every_cut_gives_the_answer_of_the_whole_text(
    text: str, stops: list[str], cuts: set[int]
) -> None:
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    watch, said, stopped = StopStrings(stops), "", None
    for begin, end in itertools.pairwise(edges):
        piece = watch.feed(text[begin:end], last=end == len(text))
        said += piece.text
        assert text.startswith(said)
        if piece.stop is not None:
            stopped = piece.stop
            break
    assert (said, stopped) == oracle(text, stops)


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    watch = StopStrings(["END."])
    assert watch.feed("The E") == ("The ", None)
    assert watch.feed("N") == ("", None)
    assert watch.feed("Tities EN") == ("ENTities ", None)
    assert watch.feed("D. more") == ("", "END.")


def test_the_stop_string_can_be_included() -> None:
    assert StopStrings(["b"], include=True).feed("abc") == ("ab", "b")


WORDS = [b"a", b"ST", b"OP", b" xST", b"OPy", "é".encode()[:1], "é".encode()[1:], b"", b"STOP"]
END = 7


def answer(stops: list[str], min_tokens: int = 0, include: bool = False) -> AnswerText:
    watch = StopStrings(stops, include=include) if stops else None
    return AnswerText(Detokenizer(WORDS), watch, min_tokens)


def feed(text: AnswerText, ids: list[int], **how: bool) -> tuple[str, int, str | None]:
    how = {"last": False, "ends_with_end_id": False} | how
    return text.feed(np.array(ids, dtype=np.int32), **how)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0, 1, 2, 0], ("a", 3, "STOP")),  # spans two tokens
        ([0, 3, 4, 0], ("a x", 3, "STOP")),  # begins inside one, ends inside another
        ([0, 8], ("a", 2, "STOP")),
        ([0, 1, 1, 2], ("aST", 4, "STOP")),
    ],
)
def test_the_answer_ends_with_the_token_that_completes_a_stop_string(
    ids: list[int], expected: tuple[str, int, str | None]
) -> None:
    assert feed(answer(["STOP"]), ids) == expected
    one_by_one = answer(["STOP"])
    came = [feed(one_by_one, [id]) for id in ids[: expected[1]]]
    assert "".join(text for text, _, _ in came) == expected[0]
    assert [stop for _, _, stop in came] == [None] * (expected[1] - 1) + ["STOP"]


def test_a_stop_string_does_not_count_before_the_minimum() -> None:
    assert feed(answer(["STOP"], min_tokens=2), [8, 0, 8]) == ("STOPa", 3, "STOP")
    assert feed(answer(["STOP"], min_tokens=1), [1, 2]) == ("", 2, "STOP")


def test_what_was_held_back_comes_when_the_answer_ends_otherwise() -> None:
    text = answer(["STOP"])
    assert feed(text, [0, 1]) == ("a", 2, None)
    assert feed(text, [END], last=True, ends_with_end_id=True) == ("ST", 1, None)


def test_a_stop_string_that_ends_inside_a_character_of_several_tokens() -> None:
    text = answer(["é"])
    assert feed(text, [0, 5]) == ("a", 2, None)
    assert feed(text, [6]) == ("", 1, "é")


def test_drafts_behind_a_stop_string_are_not_counted() -> None:
    """Of the drafts a, b, c the stop string keeps two; the choice behind them is gone as well."""
    letters = Detokenizer([b"a", b"b", b"c", b"d"])
    sequence = AnswerSequence("k", 1, False, AnswerText(letters, StopStrings(["b"]), 0))
    _, outputs = sequence.take(Delta(np.array([0, 1, 2, 3], np.int32), 0, num_drafts=3))
    assert outputs is not None
    assert (outputs["num_output_tokens"].item(), outputs["num_accepted_drafts"].item()) == (2, 2)
