"""docs/runtime.md's tables, and its plot, from the committed rows of benchmarks/forward/show.py.

    python -m benchmarks.forward.page

A table stands between `<!-- table: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "runtime.md"
PLOT = ROOT / "docs" / "images" / "prefill.svg"
ROWS = ROOT / "benchmarks" / "baselines" / "runtime-h200.jsonl"

_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_ASKED = {"arithmetic": "word problems", "retrieval": "documents"}
_SHOWN = 7  # operators by name in the plot; the rest is one

Row = Mapping[str, Any]


def read(path: Path = ROWS) -> list[Row]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def written(text: str, rows: Sequence[Row]) -> str:
    """A page with its tables as `rows` have them. KeyError for an unknown table."""
    return _TABLE.sub(lambda found: f"{found[1]}{_markdown(found[2], rows)}{found[3]}", text)


def _markdown(name: str, rows: Sequence[Row]) -> str:
    head, cells = TABLES[name]
    launches = {row["case"]: row for row in rows if row.get("row") == "launches"}
    of_kind = [row for row in rows if row.get("row") == name and "failed" not in row]
    complete = (launches.get(row.get("case", ""), {}) | dict(row) for row in of_kind)
    lines = [cells(row) for row in complete if "skipped" not in row]
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *lines))


def _replay(row: Row) -> list[str]:
    times = (row[name] for name in ("off_ms", "off_graphs_ms", "on_ms", "on_graphs_ms"))
    return [f"{row['tokens']:,}", *(f"{ms:,.1f}" for ms in times), f"{row['graphs_to_off']:.2f}"]


def _decode(row: Row) -> list[str]:
    cells = [f"`{row['case']}`", f"{row['floor_ms']:.2f}"]
    for ms, grown in (("served_ms", "served_growth"), ("gpu_ms", "growth")):
        growth = f"{100 * row[grown]:.1f} %" if grown in row else ""
        cells += [f"{row[ms]:.2f}", f"{row[ms] / row['floor_ms']:.2f}", growth]
    return [*cells, f"{row['launches']:,}", f"{row['launches_per_layer']:.1f}"]


def _engram(row: Row) -> list[str]:
    where = "host" if row["on_host"] else "device"
    return [where, f"`{row['case']}`", f"{row['served_ms']:.2f}", f"{row['gpu_ms']:.2f}"]


def _served(row: Row) -> list[str]:
    drafts = "no"
    if row.get("speculative"):
        drafts = "by cost" if row.get("speculative_schedule", True) else "all above the threshold"
    return [
        "yes" if row["cuda_graphs"] else "no", drafts, f"{row['right']} of {row['questions']}",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['first_token_ms']:.0f}", f"{row['alone_tokens_per_s']:,.0f}",
        f"{row['alone_first_token_ms']:.1f}",
    ]  # fmt: skip


def _triton(row: Row) -> list[str]:
    tokens = (f"{row[f'mean_{kind}_tokens']:,.0f}" for kind in ("input", "cached", "output"))
    right = f"{row['right']} of {row['questions']}"
    return [
        _ASKED[row["task"]], str(row["concurrency"]), *tokens, right, f"{row['seconds']:.1f}",
        f"{row['tokens_per_s']:,.0f}",
    ]  # fmt: skip


def _agreement(row: Row) -> list[str]:
    asked = _ASKED[row["task"]]
    if "agreement" not in row:
        tokens, right = f"{row['tokens']:,}", f"{row['right']} of {row['questions']}"
        return [asked, row["dtype"], "", "", tokens, "", "", "", right, ""]
    graphs = "yes" if row["graphs"] else "no"
    right, paired = "", ""
    if "right" in row:
        right = str(row["right"])
        paired = f"{100 * row['paired']['difference']:+.2f} ± {100 * row['paired']['stderr']:.2f} %"
    return [
        asked, row["dtype"], graphs, str(row["drafts"]), f"{row['tokens']:,}",
        f"{100 * row['agreement']:.3f} %", f"{row['near_ties']} of {row['differing']}",
        f"{row['logit_error']:.1e}", right, paired,
    ]  # fmt: skip


def _hit(row: Row) -> list[str]:
    gains = [
        f"{row[f'without_{name}_ms']:,.0f} ({100 * row[f'{name}_gain']:+.1f} %)"
        for name in ("trimming", "candidates")
    ]
    return [f"{row['new']:,} behind {row['cached']:,}", f"{row['ms']:,.0f}", *gains]


TABLES = {
    "replay": (
        ["prompt, tokens", "off", "off, graphs", "on", "on, graphs", "on with graphs ÷ off"],
        _replay,
    ),
    "decode": (
        ["step", "floor, ms", "served, ms", "÷ floor", "growth", "one graph, ms", "÷ floor",
         "growth", "launches", "a layer"],
        _decode,
    ),
    "engram": (["tables in the memory of the", "step", "served, ms", "one graph, ms"], _engram),
    "served": (
        ["graphs", "drafts", "right", "tokens a second, 64 at once", "first token, ms",
         "tokens a second, one alone", "first token, ms"],
        _served,
    ),
    "triton": (
        ["questions", "at once", "tokens of a prompt", "of them cached", "of an answer", "right",
         "seconds", "tokens a second"],
        _triton,
    ),
    "agreement": (
        ["questions", "compute", "graphs", "drafts", "tokens", "same choice", "near ties",
         "error of logits", "right answers", "paired difference"],
        _agreement,
    ),
    "hit": (
        ["new tokens", "ms", "without trimming layer 20, ms", "without candidates, ms"],
        _hit,
    ),
}  # fmt: skip


def shares(rows: Sequence[Row]) -> Iterator[tuple[str, float]]:
    """Operators of the long prefill and their milliseconds, most first; the rest last."""
    row = next(row for row in rows if row.get("row") == "hit" and "ms" in row)
    operators = list(row["operators_ms"].items())
    yield from operators[:_SHOWN]
    yield "the rest", row["ms"] - sum(ms for _, ms in operators[:_SHOWN])


def plot(rows: Sequence[Row]) -> Figure:
    """One stacked bar a setting of the long prefill."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "runtime"  # equal numbers give equal files
    figure = Figure(figsize=(9.0, 2.4), layout="constrained")
    axes, left = figure.add_subplot(), 0.0
    for name, ms in shares(rows):
        axes.barh([0], [ms], left=[left], label=f"{name}, {ms:,.0f} ms")
        left += ms
    axes.set(yticks=[], xlabel="milliseconds of the device", xlim=(0, left))
    axes.legend(ncols=4, fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return figure


def main() -> None:
    rows = read()
    PAGE.write_text(written(PAGE.read_text(), rows))
    if any(row.get("row") == "hit" for row in rows):
        plot(rows).savefig(PLOT, metadata={"Date": None})


if __name__ == "__main__":
    main()
