"""Write the tables of docs/quantization.md and docs/tensorrt.md from the committed baselines.

    python benchmarks/builder/tables.py

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. What has no result has no row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BASELINES = ROOT / "benchmarks" / "baselines"
PAGES = (ROOT / "docs" / "quantization.md", ROOT / "docs" / "tensorrt.md")

MODELS = {"tiny": "`tiny`", "tinyflash": "TinyFlash", "slice": "slice"}
FORMATS = ("as-released", "mxfp8", "nvfp4-experts", "nvfp4")
CLASSES = ("linears", "experts", "drafter", "engram_rows")
SEGMENTS = ("encoder", "decoder", "draft")
_TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

Result = Mapping[str, Any]


def main() -> None:
    for page in PAGES:
        page.write_text(written(page.read_text()))


def written(text: str) -> str:
    """A page with its tables as the baselines have them. KeyError for an unknown table."""
    return _TABLE.sub(lambda found: f"{found[1]}{markdown(TABLES[found[2]]())}{found[3]}", text)


def markdown(rows: Iterator[Sequence[str]]) -> str:
    """The first row is the head; all columns behind the labels are numbers."""
    head, *body = rows
    labels = next(i for i, cell in enumerate([*head, "#"]) if cell.startswith("#"))
    lines = [[cell.removeprefix("#") for cell in head], ["---"] * labels]
    lines[1] += ["---:"] * (len(head) - labels)
    return "".join("| " + " | ".join(line) + " |\n" for line in [*lines, *body])


def results(name: str) -> list[Result]:
    path = BASELINES / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def of_formats() -> Iterator[tuple[str, Result]]:
    """Title and result in the order of MODELS and FORMATS."""
    order = [(model, format) for model in MODELS for format in FORMATS]
    made = {(one["model"], one["format"]): one for one in results("formats.jsonl")}
    for model, format in order:
        if (model, format) in made:
            yield MODELS[model], made[model, format]


def errors() -> Iterator[Sequence[str]]:
    yield "checkpoint", "to", "#linears", "#experts", "#drafter", "#Engram rows", "#files"
    for title, one in of_formats():
        yield title, one["format"], *_errors(one["classes"]), _change(one)
    for one in results("quantize.jsonl"):
        yield "float32 slice", one["format"], *_errors(one["classes"]), _change(one)


def _errors(classes: Mapping[str, Any]) -> Iterator[str]:
    for name in CLASSES:
        found = classes.get(name)
        yield "–" if found is None else f"{found['relative_error']:.4f}"


def _change(one: Result) -> str:
    return f"{_size(one['source_bytes'])} → {_size(one['output_bytes'])}"


def verified() -> Iterator[Sequence[str]]:
    yield (
        "engine", "weights", "#positions", "#largest logit error", "#least cosine",
        "#arg max agreement", "#mean KL",
    )  # fmt: skip
    for title, one in of_formats():
        v = one["verify"]
        yield (
            title, one["format"], f"{v['positions']}", f"{v['max_error']:.2f}",
            f"{v['min_cosine']:.3f}", f"{100 * v['agreement']:.0f} %", f"{v['mean_kl']:.3f}",
        )  # fmt: skip


def costs() -> Iterator[Sequence[str]]:
    yield (
        "checkpoint", "to", "#values quantised", "#quantize", "#its memory", "#engine", "#verify",
    )  # fmt: skip
    for title, one in of_formats():
        values = sum(found["values"] for found in one["classes"].values())
        yield (
            title, one["format"], f"{values / 1e6:,.1f} M",
            _seconds(one["quantize"]["cpu_seconds"]), _size(one["quantize"]["peak_rss_bytes"]),
            _seconds(one["engine"]["cpu_seconds"]), _seconds(one["verify"]["cpu_seconds"]),
        )  # fmt: skip
    for one in results("quantize.jsonl"):
        yield (
            "float32 slice", one["format"], f"{one['quantised_values'] / 1e6:,.1f} M",
            f"{_seconds(one['seconds'])} by the clock", _size(one["peak_rss_bytes"]), "–", "–",
        )  # fmt: skip


def held() -> Iterator[Sequence[str]]:
    yield "held, in parts of bfloat16", *(f"#`{name}`" for name in FORMATS)
    made = {(one["model"], one["format"]): one["packed"] for one in results("formats.jsonl")}
    for model in ("tiny", "tinyflash"):
        yield MODELS[model], *(f"{made[model, name]['held_ratio']:.3f}" for name in FORMATS)
    for one in resident_results():
        yield _slice(one), *(f"{one[name]['held_ratio']:.3f}" for name in FORMATS)


def resident() -> Iterator[Sequence[str]]:
    yield "resident set", "#bfloat16", *(f"#`{name}`" for name in FORMATS)
    for one in resident_results():
        sizes = {name: m["resident_bytes"] - m["vocabulary_bytes"] for name, m in one.items()
                 if isinstance(m, dict)}  # fmt: skip
        whole = sizes.get("bfloat16")
        cells = (
            _size(sizes[name]) + (f", {sizes[name] / whole:.3f}" if whole else "")
            for name in FORMATS
        )
        yield _slice(one), _size(whole) if whole else "not measured", *cells


def resident_results() -> list[Result]:
    return sorted(results("resident.jsonl"), key=lambda one: -int(one["experts"]))


def _slice(one: Result) -> str:
    return f"slice, {one['experts']} experts, {one['values'] / 1e9:.1f} G values"


def plans() -> Iterator[Sequence[str]]:
    yield (
        "model", "weights", "type", "#in the engine", "#beside the graphs",
        *(f"#{name}" for name in SEGMENTS), "#memory",
    )  # fmt: skip
    for one in results("plans.jsonl"):
        made, stored = one["plans"], ", ".join(dict.fromkeys(one["stored"].values()))
        yield (
            MODELS[one["model"]], one["weights"] or stored, one["dtype"],
            _size(one["rank_bytes"]), _size(one["graph_weight_bytes"]),
            *(f"{_size(made[s]['bytes'])}, {made[s]['seconds']:.1f} s" for s in SEGMENTS),
            _size(one["peak_rss_bytes"]),
        )  # fmt: skip


def _seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 100 else f"{value:.1f} s"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


TABLES = {
    "errors": errors, "verify": verified, "costs": costs, "held": held, "resident": resident,
    "plans": plans,
}  # fmt: skip

if __name__ == "__main__":
    main()
