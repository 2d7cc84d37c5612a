"""What is claimed of TinyFlash, judged by committed measurements: the numbers of docs/accuracy.md.

A bar that is missed is said to be missed; a run that does not exist is "not measured".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.config import ModelConfig
from examples.tinyflash import compare, speculate
from examples.tinyflash.compare import paired
from examples.tinyflash.evaluation import TASKS, Report, reading
from examples.tinyflash.measure import FORMATS, Cache, file_name, replay_setting
from examples.tinyflash.scoring import PairedDifference

NOT_MEASURED = "not measured"

ARITHMETIC_BAR, UNSEEN_BAR, RETRIEVAL_BAR = 0.90, 0.80, 0.95
REPLAY_BAR = 1.5  # standard errors of the paired difference, either way
ABLATION_BAR = 2.0  # standard errors that an ablation is worse
DRAFTS_BAR = 2.5

CACHES: tuple[Cache, ...] = ("cold", "warm")
# Setting and state of the cache that shows a mechanism's loss.
MECHANISMS: dict[str, tuple[str, Cache]] = {
    "Engram off": ("no-engram", "cold"),
    "indexer random": ("no-indexer", "cold"),
    "window only": ("no-global", "cold"),
    "replay length 0": ("replay-0", "warm"),
}


@dataclass(frozen=True)
class Results:
    """The reports of one directory by file name."""

    config: ModelConfig
    reports: dict[str, Report]

    @staticmethod
    def read(config: ModelConfig, directory: Path) -> Results:
        """Raises ValueError for a file that holds no report, and where more than one engine made
        them; each format may have an engine of its own."""
        reports = {path.name: _read(path) for path in sorted(directory.glob("*.*.json"))}
        first: dict[str, str] = {}
        for name, made in reports.items():
            setting = name.split(".")[1]
            engine = made["settings"]["engine"]
            if engine != first.setdefault(setting if setting in FORMATS else "", engine):
                raise ValueError(
                    f"expected results of one engine in {directory}, got another in {name}: "
                    f"{engine}; measure all of them again"
                )
        return Results(config, reports)

    def run(self, task: str, setting: str, cache: Cache = "cold") -> Report | None:
        return self.reports.get(file_name(task, setting, cache))

    def served(self, task: str, cache: Cache = "cold") -> Report | None:
        """The setting of a server without options: bounded replay of one window."""
        return self.run(task, replay_setting(self.config, 1)[0], cache)

    def acceptance(self, dtype: str) -> Report | None:
        return self.reports.get(f"acceptance.{dtype}.json")


def _read(path: Path) -> Report:
    """A report with what the pages need of it."""
    if path.name.startswith("acceptance."):
        return speculate.read(path)
    _, made = compare.read(path)
    with reading(path, "a report of measure", "measure it again"):
        f"{made['mean_cached_tokens']:f} {made['parts'].items()}"
        [f"{r['correct']} {r['source']} {r['expected']} {r['text']}" for r in made["records"]]
        [made["settings"][key] for key in ("device", "torch", "dtype", "engine")]
    return made


class Claim(NamedTuple):
    """`is_met` None: not measured."""

    what: str
    bar: str
    measured: str
    is_met: bool | None
    missed_by: str = ""

    @property
    def verdict(self) -> str:
        if self.is_met is None:
            return NOT_MEASURED
        return "met" if self.is_met else f"**missed** by {self.missed_by}"


def percent(part: Report | None) -> str:
    if part is None:
        return NOT_MEASURED
    error = "" if part["stderr"] is None else f" ± {100 * part['stderr']:.2f}"
    return f"{100 * part['accuracy']:.2f}{error} %"


def difference(base: Report | None, other: Report | None) -> PairedDifference | None:
    """How much better `other` is than `base`."""
    return None if base is None or other is None else paired(base, other)


def signed(found: PairedDifference | None) -> str:
    if found is None:
        return NOT_MEASURED
    size = f"{100 * found.difference:+.2f} ± {100 * found.stderr:.2f} %"
    return f"{size} ({found.in_stderr:+.1f} se)"


def claims(results: Results) -> Iterator[Claim]:
    """Every claim in the order of the table."""
    arithmetic, retrieval = results.served("arithmetic"), results.served("retrieval")
    unseen = None if arithmetic is None else arithmetic["parts"].get("unseen templates")
    yield _accuracy("word problems, greedy, weights as released", arithmetic, ARITHMETIC_BAR)
    yield _accuracy("of them on templates never trained", unseen, UNSEEN_BAR)
    yield _accuracy("facts in documents of 4K to 8K tokens", retrieval, RETRIEVAL_BAR)
    for task in TASKS:
        for cache in CACHES:
            yield _replay(results, task, cache)
    yield from _drafts(results)
    for name in MECHANISMS:
        yield _mechanism(results, name)


def quantised(results: Results) -> str:
    """A table of the formats that were measured, as released first; empty where none was."""
    found = [name for name in FORMATS if any(results.run(task, name) for task in TASKS)]
    if not found:
        return ""
    rows = [("weights", *(cell for task in TASKS for cell in (task, "difference")))]
    cells = [cell for task in TASKS for cell in (percent(results.served(task)), "")]
    rows.append(("as released", *cells))
    for name in found:
        cells = []
        for task in TASKS:
            made = results.run(task, name)
            cells += [percent(made), signed(difference(results.served(task), made))]
        rows.append((f"`{name}`", *cells))
    return markdown(rows)


def _accuracy(what: str, part: Report | None, bar: float) -> Claim:
    text = f"≥ {100 * bar:.0f} %"
    if part is None:
        return Claim(what, text, NOT_MEASURED, None)
    short = f"{100 * (bar - part['accuracy']):.2f} %"
    return Claim(what, text, f"{percent(part)} of {part['n']:,}", part["accuracy"] >= bar, short)


def _replay(results: Results, task: str, cache: Cache) -> Claim:
    what = f"bounded replay on − off, {task}, {'after prefix hits' if cache == 'warm' else 'cold'}"
    bar = f"≤ {REPLAY_BAR} standard errors"
    found = difference(results.run(task, "exact", cache), results.served(task, cache))
    if found is None:
        return Claim(what, bar, NOT_MEASURED, None)
    size = abs(found.in_stderr)
    missed = f"{size - REPLAY_BAR:.1f} standard errors"
    return Claim(what, bar, signed(found), size <= REPLAY_BAR, missed)


def _drafts(results: Results) -> Iterator[Claim]:
    def claim(
        what: str,
        bar: str,
        dtype: str,
        measured: Callable[[Report], str],
        is_met: Callable[[Report], bool],
        missed_by: Callable[[Report], str],
    ) -> Claim:
        found = results.acceptance(dtype)
        if found is None:
            return Claim(what, bar, NOT_MEASURED, None)
        return Claim(what, bar, measured(found), is_met(found), missed_by(found))

    yield claim(
        "accepted drafts per verification, word problems",
        f"≥ {DRAFTS_BAR} of {results.config.dspark_block_size}",
        "float32",
        lambda found: f"{found['accepted_per_verification']:.2f}",
        lambda found: found["accepted_per_verification"] >= DRAFTS_BAR,
        lambda found: f"{DRAFTS_BAR - found['accepted_per_verification']:.2f}",
    )
    yield claim(
        "texts with drafts that differ from those without, float64",
        "none",
        "float64",
        lambda found: f"{differing(found)} of {found['n']:,}",
        lambda found: differing(found) == 0,
        lambda found: f"{differing(found)} texts",
    )


def differing(found: Report) -> int:
    """Texts with drafts that are not those without."""
    return round(float(found["share_of_texts_that_differ"]) * int(found["n"]))


def mechanism(results: Results, name: str, task: str) -> PairedDifference | None:
    """What leaving a mechanism out costs (a negative difference), against the served setting."""
    setting, cache = MECHANISMS[name]
    return difference(results.served(task, cache), results.run(task, setting, cache))


def _mechanism(results: Results, name: str) -> Claim:
    """Worse on one of the two sets at least: a mechanism may matter to one of them only."""
    what, bar = f"{name}: worse", f"> {ABLATION_BAR:.0f} standard errors on one set"
    found = {task: mechanism(results, name, task) for task in TASKS}
    known = [f"{task} {signed(one)}" for task, one in found.items() if one is not None]
    if not known:
        return Claim(what, bar, NOT_MEASURED, None)
    worst = max(-one.in_stderr for one in found.values() if one is not None)
    missed = f"{ABLATION_BAR - worst:.1f} standard errors"
    return Claim(what, bar, "; ".join(known), worst > ABLATION_BAR, missed)


def markdown(rows: Sequence[Sequence[Any]]) -> str:
    """A table whose first row is the head."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    lines.insert(1, "| " + " | ".join(["---"] * len(rows[0])) + " |")
    return "\n".join(lines)
