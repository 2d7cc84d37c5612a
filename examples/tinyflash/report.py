"""Writes docs/accuracy.md, the model card and their plots from the committed measurements.

    python -m examples.tinyflash.report

Reads benchmarks/tinyflash: the reports of `measure`, `history.json` of the training run, and
`training.json`, which says how it was run. No number in the two pages is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from builder.layout import all_weights
from engine.config import ModelConfig
from engine.config_reader import read_config_file
from examples.tinyflash.arithmetic import held_out_templates, trained_templates
from examples.tinyflash.claims import (
    CACHES,
    MECHANISMS,
    NOT_MEASURED,
    Results,
    claims,
    difference,
    differing,
    markdown,
    mechanism,
    percent,
    quantised,
    signed,
)
from examples.tinyflash.evaluation import DOCUMENT_TOKENS, TASKS, Report, reading
from examples.tinyflash.measure import CURVE_WINDOWS, replay_setting

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "tinyflash"
CHECKPOINT = ROOT / "examples" / "tinyflash" / "checkpoint"
TEMPLATES = Path(__file__).parent / "pages"
PAGES = {"accuracy.md": "docs/accuracy.md", "card.md": "examples/tinyflash/README.md"}
PLOTS = {"replay.svg": "docs/images/replay.svg", "training.svg": "docs/images/training.svg"}

# Runs of engines in other formats, and of the one as released that they are compared with.
QUANTISED = "formats"
_SHOWN_MISTAKES = 2
_FRACTIONS = {0: "0", 0.25: "1/4", 0.5: "1/2", 1: "1", 2: "2", 4: "4"}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tinyflash.report", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.parse_args(argv)
    try:
        config, _ = read_config_file(CHECKPOINT / "config.json")
        results = Results.read(config, RESULTS)
        made, history = pages(results, RESULTS), _history(RESULTS)
        for name, text in made.items():
            (ROOT / PAGES[name]).write_text(text)
        (ROOT / "docs" / "images").mkdir(exist_ok=True)
        _save(replay_plot(results), ROOT / PLOTS["replay.svg"])
        _save(training_plot(history), ROOT / PLOTS["training.svg"])
    except (ValueError, OSError) as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    return 0


def pages(results: Results, directory: Path) -> dict[str, str]:
    """The two pages by the names of their templates."""
    values = dict(_values(results, directory))
    return {name: Template((TEMPLATES / name).read_text()).substitute(values) for name in PAGES}


def _values(results: Results, directory: Path) -> Iterator[tuple[str, str]]:
    config = results.config
    base = results.served("arithmetic")
    rows = [("claim", "bar", "measured", "")]
    rows += [(c.what, c.bar, c.measured, c.verdict) for c in claims(results)]
    yield "claims", markdown(rows)
    yield "parts", "\n\n".join(_parts(results, task) for task in TASKS)
    yield "replay", _replay_table(results)
    yield "curve", _curve_table(results)
    yield "mechanisms", _mechanism_table(results)
    yield "quantised", quantised_section(Results.read(config, directory / QUANTISED))
    yield "drafts", _drafts(results)
    yield "float64", _float64(results)
    yield "mistakes", _mistakes(results)
    yield "measured_on", NOT_MEASURED if base is None else _measured_on(base)
    yield "window", str(config.sliding_window)
    yield "exact", f"{config.exact_replay_length:,}"
    yield "parameters", f"{sum(prod(w.shape) for w in all_weights(config)) / 1e6:.1f} M"
    size = sum(path.stat().st_size for path in CHECKPOINT.iterdir())
    yield "megabytes", f"{size / 1e6:.1f} MB"
    yield "model", _model(config)
    yield from _training(directory)
    yield "document_tokens", " to ".join(f"{tokens:,}" for tokens in DOCUMENT_TOKENS)
    held_out, trained = held_out_templates(), trained_templates()
    yield "held_out_templates", str(len(held_out))
    yield "templates", str(len(held_out) + len(trained))
    yield "seen_sequences", str(len({t.kinds for t in held_out} & {t.kinds for t in trained}))
    for task in TASKS:
        yield f"accuracy_{task}", percent(results.served(task))


def _parts(results: Results, task: str) -> str:
    made = results.served(task)
    if made is None:
        return f"{task}: {NOT_MEASURED}"
    rows = [(task, "questions", "right")]
    for name, part in [("all", made), *made["parts"].items()]:
        rows.append((name, f"{part['n']:,}", percent(part)))
    return markdown(rows)


def _replay_table(results: Results) -> str:
    rows = [("set", "cache", "tokens found", "replay on", "replay off", "on − off")]
    for task in TASKS:
        for cache in CACHES:
            on, off = results.served(task, cache), results.run(task, "exact", cache)
            found = NOT_MEASURED if on is None else f"{on['mean_cached_tokens']:.0f}"
            paired = signed(difference(off, on))
            rows.append((task, cache, found, percent(on), percent(off), paired))
    return markdown(rows)


def _curve_table(results: Results) -> str:
    rows = [("windows", "rows", *(f"{task}, {cache}" for task in TASKS for cache in CACHES))]
    for windows in CURVE_WINDOWS:
        name, length = replay_setting(results.config, windows)
        cells = [percent(results.run(task, name, cache)) for task in TASKS for cache in CACHES]
        rows.append((_FRACTIONS[windows], str(length), *cells))
    cells = [percent(results.run(task, "exact", cache)) for task in TASKS for cache in CACHES]
    rows.append(("replay off", f"{results.config.exact_replay_length}", *cells))
    return markdown(rows)


def _mechanism_table(results: Results) -> str:
    rows = [("without", *(cell for task in TASKS for cell in (task, "difference")))]
    for name, (setting, cache) in MECHANISMS.items():
        cells = []
        for task in TASKS:
            cells.append(percent(results.run(task, setting, cache)))
            cells.append(signed(mechanism(results, name, task)))
        rows.append((name, *cells))
    return markdown(rows)


def quantised_section(results: Results) -> str:
    """A section of its own, nothing before a quantised engine was measured."""
    table = quantised(results)
    page = Template((TEMPLATES / "quantised.md").read_text())
    runs = [(task, results.served(task)) for task in TASKS]
    devices = "; ".join(f"{task}: {_measured_on(made)}" for task, made in runs if made)
    return page.substitute(table=table, devices=devices) if table else ""


def _drafts(results: Results) -> str:
    size = results.config.dspark_block_size
    rows = [("dtype", "accepted of " + str(size), *(f"draft {k + 1}" for k in range(size)),
             "texts that differ")]  # fmt: skip
    for dtype in ("float32", "float64"):
        found = results.acceptance(dtype)
        if found is None:
            rows.append((dtype, *[NOT_MEASURED] * (size + 2)))
            continue
        shares = [f"{100 * share:.1f} %" for share in found["acceptance_by_position"]]
        mean = f"{found['accepted_per_verification']:.2f}"
        rows.append((dtype, mean, *shares, f"{differing(found)} of {found['n']:,}"))
    return markdown(rows)


def _float64(results: Results) -> str:
    exact = results.run("arithmetic", "float64")
    found = difference(exact, results.served("arithmetic"))
    if found is None:
        return NOT_MEASURED
    return f"{percent(exact)} in float64, float32 − float64 {signed(found)}"


def _mistakes(results: Results) -> str:
    """The first mistakes on each set, as the model wrote them."""
    shown = []
    for task in TASKS:
        made = results.served(task)
        for record in (made or {"records": []})["records"][:_SHOWN_MISTAKES]:
            if not record["correct"]:
                said = record["text"].strip().replace("\n", "\n  ")
                what = f"{task} ({record['source']}), expected {record['expected']}:"
                shown.append(f"- {what}\n\n  ```text\n  {said}\n  ```")
    return "\n".join(shown) or "None in what was measured."


def _measured_on(base: Report) -> str:
    settings = base["settings"]
    return (
        f"{settings['device']}, torch {settings['torch']}, {settings['dtype']}, "
        f"engine {settings['engine']}"
    )


def _model(config: ModelConfig) -> str:
    rows = [
        ("layers", f"{config.num_hidden_layers}, of them {config.decoder_start} encoder, and "
         f"{config.num_nextn_predict_layers} draft stages"),
        ("hidden size, streams", f"{config.hidden_size}, {config.hc_mult}"),
        ("heads", f"{config.num_attention_heads} of {config.head_dim}, "
         f"{config.qk_rope_head_dim} rotated"),
        ("window", f"{config.sliding_window} tokens"),
        ("selected entries", f"{config.index_topk}, from {config.candidate_topk_blocks} candidate "
         f"blocks of {config.candidate_block_size} in the decoder"),
        ("experts", f"{config.num_experts_per_tok} of {config.n_routed_experts}, and "
         f"{config.n_shared_experts} shared"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("longest sequence", f"{config.max_position_embeddings:,} tokens"),
    ]  # fmt: skip
    return markdown([("", ""), *rows])


def _history(directory: Path) -> list[dict[str, float]]:
    path = directory / "history.json"
    with reading(path, "the history of a training run", "copy that of the run"):
        loaded: list[dict[str, float]] = json.loads(path.read_text())
        [f"{value:f}" for record in loaded for value in (record["step"], *record.values())]
    return loaded


def _training(directory: Path) -> Iterator[tuple[str, str]]:
    """What training.json says: device, commands, and `runs`, each with a name, commit, steps,
    tokens and minutes."""
    path = directory / "training.json"
    rows = [("part", "commit", "steps", "tokens", "minutes")]
    with reading(path, "how the model was trained", "write it by the last training"):
        made: dict[str, Any] = json.loads(path.read_text())
        for run in made["runs"]:
            tokens = f"{run['tokens'] / 1e6:.0f} M"
            steps, minutes = f"{run['steps']:,}", f"{run['minutes']:.1f}"
            rows.append((run["name"], run["commit"], steps, tokens, minutes))
        total = sum(run["minutes"] for run in made["runs"])
        commands, device = "\n".join(made["commands"]), made["device"]
    rows.append(("together", "", "", "", f"{total:.1f}"))
    yield "training_table", markdown(rows)
    yield "training_commands", commands
    yield "training_device", device


def replay_plot(results: Results) -> Figure:
    """Accuracy over the replayed rows, one panel per set; the exact mode as a line."""
    figure = _figure(9.0)
    for place, task in enumerate(TASKS):
        axes = figure.add_subplot(1, 2, place + 1)
        for cache, marker in zip(CACHES, "os", strict=True):
            runs = [results.run(task, replay_setting(results.config, w)[0], cache)
                    for w in CURVE_WINDOWS]  # fmt: skip
            points = [(w, r) for w, r in zip(_FRACTIONS.values(), runs, strict=True) if r]
            axes.errorbar(
                [w for w, _ in points],
                [100 * r["accuracy"] for _, r in points],
                yerr=[100 * r["stderr"] for _, r in points],
                marker=marker, capsize=3, label=cache,
            )  # fmt: skip
        exact = results.run(task, "exact")
        if exact is not None:
            axes.axhline(100 * exact["accuracy"], ls="--", color="0.4", label="replay off")
        axes.set(title=task, xlabel="windows replayed", ylabel="right answers, %")
        axes.grid(alpha=0.3)
        if axes.containers:
            axes.legend()
    return figure


def training_plot(history: Sequence[dict[str, float]]) -> Figure:
    """The losses, and the held-out probes, over the steps."""
    figure = _figure(9.0)
    losses = [record for record in history if "answer" in record]
    axes = figure.add_subplot(1, 2, 1)
    for name in ("answer", "indexer"):
        axes.semilogy([r["step"] for r in losses], [r[name] for r in losses], label=name)
    axes.set(title="loss", xlabel="step")
    probes = [record for record in history if "answer" not in record]
    shares = figure.add_subplot(1, 2, 2)
    for name in sorted({name for record in probes for name in record} - {"step"}):
        asked = [record for record in probes if name in record]
        right = [100 * record[name] for record in asked]
        shares.plot([record["step"] for record in asked], right, label=name)
    shares.set(title="held-out conversations right, teacher-forced, %", xlabel="step")
    for each in (axes, shares):
        each.grid(alpha=0.3)
        if each.lines:
            each.legend(fontsize=6)
    return figure


def _figure(width: float) -> Figure:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "tinyflash"  # equal numbers give equal files
    return Figure(figsize=(width, 3.6), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    sys.exit(main())
