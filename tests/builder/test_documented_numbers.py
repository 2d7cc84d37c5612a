"""Tables of docs/quantization.md and docs/tensorrt.md are those of the committed results."""

from __future__ import annotations

import importlib.util
import json
import types
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "builder"


@pytest.fixture(scope="module")
def tables() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("tables", BENCHMARKS / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_what_the_results_say(tables: types.ModuleType) -> None:
    """After a new measurement: python benchmarks/builder/tables.py."""
    for page in tables.PAGES:
        text = page.read_text()
        assert text.count("<!-- table: ") == text.count("<!-- end -->") > 0
        assert tables.written(text) == text


def test_a_table_by_hand(
    tables: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_plan = {"bytes": 1e6, "seconds": 2.04}
    line = {
        "model": "tiny", "weights": "", "stored": {"linears": "f32", "experts": "f32"},
        "dtype": "float32", "rank_bytes": 18_540_000, "graph_weight_bytes": 1_960_000_000,
        "plans": dict.fromkeys(("encoder", "decoder", "draft"), one_plan),
        "peak_rss_bytes": 250e6,
    }  # fmt: skip
    (tmp_path / "plans.jsonl").write_text(json.dumps(line) + "\n")
    monkeypatch.setattr(tables, "BASELINES", tmp_path)
    page = "Before.\n<!-- table: plans -->\nold\n<!-- end -->\nAfter.\n"
    head, rule, row = tables.written(page).splitlines()[2:5]
    assert head.count("|") == rule.count("|") == row.count("|") == 10
    assert rule.startswith("| --- | --- | --- | ---: |")
    assert row == (
        "| `tiny` | f32 | float32 | 18.5 MB | 1.96 GB | 1.0 MB, 2.0 s | 1.0 MB, 2.0 s "
        "| 1.0 MB, 2.0 s | 250.0 MB |"
    )
    assert tables.written(page).endswith("<!-- end -->\nAfter.\n")
    with pytest.raises(KeyError):
        tables.written("<!-- table: unknown -->\n<!-- end -->")
