"""Verdicts on made-up measurements, worked by hand, and pages that are what their numbers say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.config_reader import read_config_file
from examples.tinyflash import report as pages
from examples.tinyflash.claims import Claim, Results, claims, mechanism, percent, quantised
from examples.tinyflash.evaluation import Answer, Report, report
from examples.tinyflash.scoring import Question

CONFIG, _ = read_config_file(pages.CHECKPOINT / "config.json")
WINDOW = CONFIG.sliding_window


def made(task: Any, right: str) -> Report:
    """A report on as many questions as `right` has digits, all about numbers that are unseen."""
    asked = [Question(task, "template", "source", f"question {i}", "7") for i in range(len(right))]
    text = {"arithmetic": "#### ", "retrieval": "It is "}[task]
    answers = [Answer(f"{text}{7 if digit == '1' else 8}", "stop", 90, 32, 5) for digit in right]
    settings = {"device": "cpu", "torch": "2", "dtype": "float32", "engine": "e"}
    return report(asked, answers, seed=1, settings=settings, seconds=1.0)


def judged(**reports: Report) -> dict[str, Claim]:
    """The claims by their text; `arithmetic_exact_cold` is a file's name with underscores."""
    named = {name.replace("_", ".") + ".json": made for name, made in reports.items()}
    named = {name.replace("replay.1.", f"replay-{WINDOW}."): m for name, m in named.items()}
    named = {name.replace("replay.0.", "replay-0."): m for name, m in named.items()}
    return {claim.what: claim for claim in claims(Results(CONFIG, named))}


def test_bars_on_accuracy() -> None:
    """18 of 20 is 90 %: met; 3 of 4 misses 95 % by 20 %."""
    found = judged(
        arithmetic_replay_1_cold=made("arithmetic", "1" * 18 + "00"),
        retrieval_replay_1_cold=made("retrieval", "1110"),
    )
    greedy = found["word problems, greedy, weights as released"]
    assert (greedy.verdict, greedy.measured) == ("met", "90.00 ± 6.88 % of 20")
    documents = found["facts in documents of 4K to 8K tokens"]
    assert documents.verdict == "**missed** by 20.00 %"
    drafts = found["accepted drafts per verification, word problems"]
    assert (drafts.verdict, drafts.measured) == ("not measured", "not measured")


def test_replay_is_judged_by_the_paired_difference() -> None:
    """One of four questions changes: 0.25 ± 0.25, one standard error. All four: without bound."""
    exact = made("retrieval", "1111")
    what = "bounded replay on − off, retrieval, cold"
    found = judged(retrieval_exact_cold=exact, retrieval_replay_1_cold=made("retrieval", "1101"))
    assert found[what].measured == "-25.00 ± 25.00 % (-1.0 se)"
    assert found[what].verdict == "met"
    found = judged(retrieval_exact_cold=exact, retrieval_replay_1_cold=made("retrieval", "0000"))
    assert found[what].verdict == "**missed** by inf standard errors"
    found = judged(retrieval_exact_cold=exact, retrieval_replay_1_cold=exact)
    assert found[what].verdict == "met"


def test_a_mechanism_matters_when_it_is_missed_on_one_set() -> None:
    """Arithmetic loses 3 of 4, 0.75 ± 0.25 or three standard errors; retrieval nothing."""
    base, same = made("arithmetic", "1111"), made("retrieval", "1111")
    reports = {
        "arithmetic_replay_1_cold": base,
        "retrieval_replay_1_cold": same,
        "arithmetic_no-engram_cold": made("arithmetic", "0001"),
        "retrieval_no-engram_cold": same,
        "arithmetic_no-global_cold": made("arithmetic", "1101"),
        "arithmetic_replay_1_warm": base,
        "arithmetic_replay_0_warm": made("arithmetic", "0100"),
    }
    found = judged(**reports)
    assert found["Engram off: worse"].verdict == "met"
    assert found["window only: worse"].verdict == "**missed** by 1.0 standard errors"
    assert found["indexer random: worse"].verdict == "not measured"
    assert found["replay length 0: worse"].verdict == "met"
    nothing = mechanism(Results(CONFIG, {}), "Engram off", "arithmetic")
    assert nothing is None


def test_drafts() -> None:
    found = {"n": 8, "accepted_per_verification": 2.4, "share_of_texts_that_differ": 0.25}
    results = judged(acceptance_float32=found, acceptance_float64=found)
    accepted = results["accepted drafts per verification, word problems"]
    assert (accepted.measured, accepted.verdict) == ("2.40", "**missed** by 0.10")
    texts = results["texts with drafts that differ from those without, float64"]
    assert (texts.measured, texts.verdict) == ("2 of 8", "**missed** by 2 texts")


def test_quantised_weights_are_compared_with_those_as_released() -> None:
    """MXFP8 answers alike; NVFP4 loses one of four, 0.25 ± 0.25, and was not asked for facts."""
    base, facts = made("arithmetic", "1110"), made("retrieval", "1111")
    some = Results(
        CONFIG,
        {
            f"arithmetic.replay-{WINDOW}.cold.json": base,
            f"retrieval.replay-{WINDOW}.cold.json": facts,
            "arithmetic.mxfp8.cold.json": base,
            "retrieval.mxfp8.cold.json": facts,
            "arithmetic.nvfp4.cold.json": made("arithmetic", "1010"),
        },
    )
    assert quantised(some).splitlines()[2:] == [
        "| as released | 75.00 ± 25.00 % |  | 100.00 ± 0.00 % |  |",
        "| `nvfp4` | 50.00 ± 28.87 % | -25.00 ± 25.00 % (-1.0 se) | not measured | not measured |",
        "| `mxfp8` | 75.00 ± 25.00 % | +0.00 ± 0.00 % (+0.0 se) | 100.00 ± 0.00 % "
        "| +0.00 ± 0.00 % (+0.0 se) |",
    ]
    assert "## Quantised weights" in pages.quantised_section(some)
    assert pages.quantised_section(Results(CONFIG, {})) == ""


def test_a_single_question_has_no_standard_error() -> None:
    assert percent({"accuracy": 1.0, "stderr": None, "n": 1}) == "100.00 %"


def test_the_pages_are_what_the_numbers_say() -> None:
    """After a new measurement: python -m examples.tinyflash.report."""
    results = Results.read(CONFIG, pages.RESULTS)
    for name, text in pages.pages(results, pages.RESULTS).items():
        assert (pages.ROOT / pages.PAGES[name]).read_text() == text
    assert all((pages.ROOT / path).is_file() for path in pages.PLOTS.values())


def test_plots_of_whatever_was_measured(tmp_path: Path) -> None:
    history = json.loads((pages.RESULTS / "history.json").read_text())
    some = Results(CONFIG, {f"retrieval.replay-{WINDOW}.cold.json": made("retrieval", "1110")})
    for figure, panels in (
        (pages.replay_plot(some), 2),
        (pages.training_plot(history), 2),
        (pages.training_plot([r for r in history if "answer" in r]), 2),
    ):
        figure.savefig(tmp_path / "plot.svg")
        assert len(figure.axes) == panels
    assert pytest.approx(75.0) == pages.replay_plot(some).axes[1].containers[0].lines[0].get_ydata()


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of what is committed, read in its place; pages are written below it."""
    folder = tmp_path / "results"
    shutil.copytree(pages.RESULTS, folder)
    monkeypatch.setattr(pages, "RESULTS", folder)
    monkeypatch.setattr(pages, "ROOT", tmp_path)
    return folder


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("training.json", None),
        ("training.json", "{}"),
        ("history.json", None),
        ("history.json", "[1]"),
        ("arithmetic.exact.cold.json", "{"),
        ("arithmetic.exact.cold.json", "[]"),
        ("acceptance.float32.json", "{}"),
    ],
)
def test_what_no_page_can_be_written_from(
    results: Path, name: str, content: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """None: the file is missing."""
    (results / name).unlink()
    if content is not None:
        (results / name).write_text(content)
    assert pages.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("report: expected ")
    assert str(results / name) in line
    assert list(results.parent.iterdir()) == [results]


@pytest.mark.parametrize("name", ["arithmetic.float64.cold.json", "acceptance.float64.json"])
def test_results_of_two_engines_make_no_page(
    results: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = json.loads((results / name).read_text())
    changed["settings"]["engine"] = "another"
    (results / name).write_text(json.dumps(changed))
    assert pages.main([]) == 2
    assert "expected results of one engine" in capsys.readouterr().err


def test_a_format_has_an_engine_of_its_own(results: Path) -> None:
    made = json.loads((results / "arithmetic.exact.cold.json").read_text())
    made["settings"]["engine"] = "another"
    (results / "arithmetic.mxfp8.cold.json").write_text(json.dumps(made))
    assert Results.read(CONFIG, results).run("arithmetic", "mxfp8") == made
