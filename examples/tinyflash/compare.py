"""Paired comparison of evaluation reports: the same questions under other settings.

    python -m examples.tinyflash.compare base.json other.json … --plot curve.png

The difference of two runs is judged by the standard error of the per-question differences, so
questions on which both agree add nothing to it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from client.commands.common import check_writable
from client.plot import check_picture
from examples.tinyflash import scoring
from examples.tinyflash.evaluation import Report, aligned, reading
from examples.tinyflash.scoring import PairedDifference

Named = tuple[str, Report]


def read(path: Path) -> Named:
    """A report with its file's name. Raises ValueError for a file that holds none."""
    with reading(path, "a report of evaluate or dsv41-client eval", "make it with --json"):
        loaded = json.loads(path.read_text())
        f"{loaded['asked']} {loaded['task']}"
        f"{loaded['accuracy']:f} {loaded['stderr']:f} {loaded['n']:d}"
        correct = loaded["correct"]
        if len(correct) != loaded["n"] or correct.strip("01"):
            raise ValueError(f"`correct` is not {loaded['n']} digits 0 or 1")
    return path.stem, loaded


def paired(base: Report, other: Report) -> PairedDifference:
    """How much better `other` is than `base`.

    Raises ValueError when they answer other questions.
    """
    check_questions(base, other["task"], other["asked"])
    a, b = ([digit == "1" for digit in report["correct"]] for report in (base, other))
    return scoring.compare(a, b)


def check_questions(base: Report, task: str, asked: str) -> None:
    """Raises ValueError unless `base` answers the questions of that task and digest."""
    if (base["task"], base["asked"]) != (task, asked):
        raise ValueError(
            "expected reports on the same questions, got others; use equal --task, --limit, --seed "
            "and --document-tokens"
        )


def check_outputs(json_file: Path | None, plot_file: Path | None) -> None:
    """Raises ValueError, before anything is asked, for a file that could not be written."""
    check_writable(json_file, plot_file)
    if plot_file is not None:
        check_picture(plot_file)


def table(reports: Sequence[Named]) -> str:
    """Each report, and its paired difference from the first, also in standard errors."""
    base = reports[0][1]
    rows = [("run", "right", "± stderr", "difference", "± stderr", "in stderr")]
    for place, (name, report) in enumerate(reports):
        row = (name, f"{100 * report['accuracy']:.2f} %", f"{100 * report['stderr']:.2f} %")
        if place == 0:
            rows.append((*row, "", "", ""))
            continue
        found = paired(base, report)
        rows.append(
            (
                *row,
                f"{100 * found.difference:+.2f} %",
                f"{100 * found.stderr:.2f} %",
                f"{found.in_stderr:+.2f}",
            )
        )
    return "\n".join(aligned(rows))


def plot(reports: Sequence[Named], path: Path) -> None:
    """Accuracy of each run with one standard error, in the order given."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.5 + 1.1 * max(3, len(reports)), 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.errorbar(
        [name for name, _ in reports],
        [100 * report["accuracy"] for _, report in reports],
        yerr=[100 * report["stderr"] for _, report in reports],
        marker="o",
        capsize=4,
    )
    task = reports[0][1]["task"]
    axes.set_title(f"{task}, {reports[0][1]['n']} held-out questions")
    axes.set_ylabel("right answers, % (one standard error)")
    axes.margins(x=0.1)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tinyflash.compare",
        description="Compare evaluation reports on the same questions, pair by pair.",
        allow_abbrev=False,
    )
    parser.add_argument("base", type=Path, help="the report that the others are compared with")
    parser.add_argument("others", type=Path, nargs="+", metavar="other")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the accuracies")
    arguments = parser.parse_args(argv)
    try:
        check_outputs(None, arguments.plot)
        reports = [read(path) for path in (arguments.base, *arguments.others)]
        print(table(reports))
        if arguments.plot:
            plot(reports, arguments.plot)
    except (ValueError, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
