"""The runtime's page has the numbers of the committed run."""

from __future__ import annotations

import pytest

from benchmarks.forward.page import PAGE, read, shares, written

HIT = {
    "row": "hit", "new": 32_768, "cached": 131_072, "ms": 2000.0,
    "operators_ms": {"moe": 900.0, "linear": 600.0, "mega_attention": 300.0},
    "without_trimming_ms": 2300.0, "trimming_gain": 0.15,
    "without_candidates_ms": 2050.0, "candidates_gain": 0.025,
}  # fmt: skip


def test_the_page_is_what_the_rows_say() -> None:
    """After a new run: python -m benchmarks.forward.page."""
    text = PAGE.read_text()
    assert text.count("<!-- table: ") == text.count("<!-- end -->") > 0
    assert written(text, read()) == text


def test_a_table_by_hand() -> None:
    page = "Before.\n<!-- table: hit -->\nold\n<!-- end -->\nAfter.\n"
    assert written(page, [HIT, {"row": "hit", "skipped": "for want of time"}]).splitlines() == [
        "Before.",
        "<!-- table: hit -->",
        "| new tokens | ms | without trimming layer 20, ms | without candidates, ms |",
        "| --- | ---: | ---: | ---: |",
        "| 32,768 behind 131,072 | 2,000 | 2,300 (+15.0 %) | 2,050 (+2.5 %) |",
        "<!-- end -->",
        "After.",
    ]
    with pytest.raises(KeyError):
        written("<!-- table: unknown -->\n<!-- end -->", [])


def test_shares_add_up_to_the_whole() -> None:
    assert list(shares([HIT])) == [
        ("moe", 900.0), ("linear", 600.0), ("mega_attention", 300.0), ("the rest", 200.0),
    ]  # fmt: skip
