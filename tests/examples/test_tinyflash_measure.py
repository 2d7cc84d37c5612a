"""The list of runs, and how a measurement is interrupted, resumed and survives a failing run."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch

from builder.cli import main as build
from engine.directory import Engine
from examples.tinyflash import measure
from examples.tinyflash.compare import paired
from examples.tinyflash.evaluation import Answer, Report, report
from examples.tinyflash.measure import AcceptanceJob, Job, Sizes
from examples.tinyflash.scoring import Task
from examples.tinyflash.tokenizer import TOKENIZER_FILE

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "tinyflash" / "config.json"
SIZES = Sizes(arithmetic=2, retrieval=2, seed=9, document_tokens=(200, 264), max_tokens=2)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained TinyFlash."""
    folder = tmp_path_factory.mktemp("measure")
    made = ["init", f"--config={CONFIG}", f"--output_dir={folder / 'c'}"]
    assert build([*made, f"--tokenizer={TOKENIZER_FILE}"]) == 0
    made = ["engine", f"--checkpoint_dir={folder / 'c'}", f"--output_dir={folder / 'e'}"]
    assert build([*made, "--max_batch_size=4", "--max_num_tokens=512", "--max_seq_len=512"]) == 0
    return folder / "e"


def engine_digest(engine: Path) -> str:
    """Of the files' names and contents; the manifest's versions and times are left out."""
    names = (path.relative_to(engine).as_posix() for path in engine.rglob("*") if path.is_file())
    hashes = [
        [name, hashlib.sha256((engine / name).read_bytes()).hexdigest()]
        for name in sorted(names)
        if name != "manifest.json"
    ]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16]


def kept_report(engine: Path, task: Task, sizes: Sizes = SIZES) -> Report:
    """Of an earlier measurement by `engine`, with empty answers."""
    asked = sizes.ask(task)
    answers = [Answer("", "stop", 9, 0, 1)] * len(asked)
    settings = {"engine": engine_digest(engine)}
    return report(asked, answers, seed=sizes.seed, settings=settings, seconds=1.0)


def test_every_claim_has_its_runs(engine: Path) -> None:
    """A window is 16 rows: replays of 0, 1/4, 1/2, 1, 2 and 4 windows, cold and warm."""
    names = [
        name for job in measure.jobs(Engine.open(engine).config, {}) for name in job.files.values()
    ]
    assert len(names) == len(set(names))
    lengths = [0, 4, 8, 16, 32, 64]
    expected = {f"{task}.exact.{cache}.json" for task in ("arithmetic", "retrieval")
                for cache in ("cold", "warm")}  # fmt: skip
    expected |= {name.replace("exact", f"replay-{n}") for name in expected for n in lengths}
    expected |= {f"{task}.no-{name}.cold.json" for task in ("arithmetic", "retrieval")
                 for name in ("engram", "indexer", "global")}  # fmt: skip
    expected |= {"arithmetic.float64.cold.json"}
    expected |= {"acceptance.float32.json", "acceptance.float64.json"}
    assert set(names) == expected


def test_what_is_there_is_kept(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = ("cold", "warm")
    there = Job("retrieval", "replay-16", caches=both)
    failing = Job("arithmetic", "replay-16", {"replay_length": -1})
    last = Job("retrieval", "replay-0", {"replay_length": 0}, caches=both)
    monkeypatch.setattr(measure, "jobs", lambda config, quantised: [there, failing, last])
    kept = json.dumps(kept_report(engine, "retrieval"))
    for name in there.files.values():
        (tmp_path / name).write_text(kept)
    todo = measure.missing(engine, tmp_path, SIZES, {})
    ended = list(measure.measure(todo, engine, tmp_path, SIZES, device="cpu", workers=1))
    assert [job for job, _, _ in ended] == [failing, last]
    assert "replay_length of at least 0, got -1" in (ended[0][1] or "")
    assert ended[1][1] is None
    assert (tmp_path / there.files["cold"]).read_text() == kept
    assert {path.name for path in tmp_path.iterdir()} == {
        *there.files.values(), *last.files.values()
    }  # fmt: skip
    cold, warm = (json.loads((tmp_path / last.files[cache]).read_text()) for cache in both)
    assert paired(cold, warm).n == 2
    assert cold["mean_cached_tokens"] == 0
    assert warm["mean_cached_tokens"] >= 160  # whole pages of 32 of some 200 tokens
    assert warm["settings"]["warm"] is True
    # An untrained model answers nothing, so the mistakes that are kept are all records.
    assert [record["correct"] for record in cold["records"]] == [False, False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 8}, "'seed': 8"),
        ({"n": 3}, "'n': 3"),
        ({"settings": {"engine": "another"}}, "'engine': 'another'"),
        ({"asked": "others"}, "'asked': 'others'"),
        ({"max_tokens": 255}, "'max_tokens': 255"),
    ],
)
def test_results_of_other_engines_and_questions_are_not_kept(
    engine: Path,
    tmp_path: Path,
    change: dict[str, object],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = kept_report(engine, "arithmetic")
    if "n" in change:
        made["correct"] = "000"
    if "max_tokens" in change:
        made["settings"] |= change
    else:
        made |= change
    (tmp_path / "arithmetic.exact.cold.json").write_text(json.dumps(made))
    asked = ["--arithmetic=2", "--retrieval=2", "--seed=9"]
    assert measure.main([f"--engine={engine}", f"--out={tmp_path}", *asked]) == 2
    assert words in capsys.readouterr().err.partition("got")[2]


def test_documents_of_other_lengths_are_other_questions(engine: Path, tmp_path: Path) -> None:
    others = SIZES._replace(document_tokens=(200, 300))
    made = kept_report(engine, "retrieval", others)
    (tmp_path / "retrieval.exact.cold.json").write_text(json.dumps(made))
    measure.missing(engine, tmp_path, others, {})
    with pytest.raises(ValueError, match=r"expected results of .* got .*; give --out another"):
        measure.missing(engine, tmp_path, SIZES, {})


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"n": 2, "correct": [1, 0]}', None])
@pytest.mark.parametrize("name", ["arithmetic.exact.cold.json", "acceptance.float32.json"])
def test_what_holds_no_results_is_not_kept(
    engine: Path,
    tmp_path: Path,
    name: str,
    content: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """None: a folder of that name."""
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text(content)
    assert measure.main([f"--engine={engine}", f"--out={tmp_path}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("measure: expected ")
    assert f"{tmp_path / name}, got" in line


def test_what_cannot_be_measured_is_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before the engine, which does not exist, is missed."""
    (tmp_path / "file").touch()
    asked = [f"--engine={tmp_path / 'no engine'}", f"--out={tmp_path}"]
    for options, words in (
        ([f"--out={tmp_path / 'file'}"], "expected a folder of results that can be written"),
        ([f"--out={tmp_path / 'file' / 'x'}"], "expected a folder of results"),
        (["--document-tokens", "5", "1"], "got 5 to 1; widen the range"),
        ([], "expected an engine directory"),
    ):
        assert measure.main([*asked, *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    for option, words in (
        ("--workers=0", "expected at least 1, got 0"),
        ("--device=foo", "invalid choice: 'foo'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            measure.main([*asked, option])
        assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [f"--engine={tmp_path / 'none'}", f"--out={tmp_path}", "--device=cuda"]
    assert measure.main(asked) == 2
    assert "expected a CUDA device, found none" in capsys.readouterr().err


@pytest.fixture(scope="module")
def mxfp8(engine: Path) -> Path:
    """The same model with MXFP8 weights."""
    folder = engine.parent
    made = ["quantize", f"--checkpoint_dir={folder / 'c'}", f"--output_dir={folder / 'q'}"]
    assert build([*made, "--format=mxfp8"]) == 0
    made = ["engine", f"--checkpoint_dir={folder / 'q'}", f"--output_dir={folder / 'eq'}"]
    assert build([*made, "--max_batch_size=4", "--max_num_tokens=512", "--max_seq_len=512"]) == 0
    return folder / "eq"


def test_quantised_engines_are_asked_in_the_served_setting(
    engine: Path, mxfp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From FP8 and FP4 with power-of-two scales MXFP8 loses nothing: the same answers."""
    config = Engine.open(engine).config
    every = measure.jobs(config, {"mxfp8": mxfp8})
    own = [job for job in every if isinstance(job, Job) and job.engine is not None]
    assert [list(job.files.values()) for job in own] == [
        ["retrieval.mxfp8.cold.json"], ["arithmetic.mxfp8.cold.json"]
    ]  # fmt: skip
    served = Job("arithmetic", "replay-16", {"replay_length": 16})
    monkeypatch.setattr(measure, "jobs", lambda config, quantised: [served, own[1]])
    todo = measure.missing(engine, tmp_path, SIZES, {"mxfp8": mxfp8})
    ended = list(measure.measure(todo, engine, tmp_path, SIZES, device="cpu", workers=1))
    assert [error for _, error, _ in ended] == [None, None]
    base, other = (json.loads(path.read_text()) for path in sorted(tmp_path.iterdir())[::-1])
    assert [r["text"] for r in other["records"]] == [r["text"] for r in base["records"]]
    changed = {"engine", "threads"}
    assert {k for k in base["settings"] if base["settings"][k] != other["settings"][k]} <= changed
    digest = engine_digest(mxfp8)
    assert other["settings"]["engine"] == digest
    assert measure.missing(engine, tmp_path, SIZES, {"mxfp8": mxfp8}) == []
    (tmp_path / "arithmetic.mxfp8.cold.json").write_text(json.dumps(base))
    with pytest.raises(ValueError, match=f"'engine': '{digest}'.*mxfp8.cold.json, got"):
        measure.missing(engine, tmp_path, SIZES, {"mxfp8": mxfp8})


def test_engines_of_another_format_or_model_are_refused(
    engine: Path, mxfp8: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [f"--engine={engine}", f"--out={tmp_path}", "--quantised"]
    assert measure.main([*asked, f"nvfp4={mxfp8}"]) == 2
    assert "for nvfp4, got {'linears': 'mxfp8'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        measure.main([*asked, f"fp8={mxfp8}"])
    assert "one of nvfp4, nvfp4-w4a4, nvfp4-experts, mxfp8, got fp8=" in capsys.readouterr().err
    assert build(["init", "--config=tiny", f"--output_dir={tmp_path / 'c'}"]) == 0
    made = ["engine", f"--checkpoint_dir={tmp_path / 'c'}", f"--output_dir={tmp_path / 'e'}"]
    assert build(made) == 0
    assert measure.main([*asked, f"mxfp8={tmp_path / 'e'}"]) == 2
    assert "got another; build both from one checkpoint" in capsys.readouterr().err


def test_too_few_questions_are_refused(engine: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 2 questions of each kind, got 2 and 1"):
        measure.missing(engine, tmp_path, Sizes(2, 1, 0), {})


def test_acceptance(engine: Path) -> None:
    job = AcceptanceJob("float64")
    made = job.run(engine, SIZES, "cpu")[job.files["cold"]]
    assert (made["n"], made["settings"]["dtype"]) == (2, "float64")
    assert made["share_of_texts_that_differ"] == 0.0
    assert len(made["acceptance_by_position"]) == 5
    assert sum(made["acceptance_by_position"]) == pytest.approx(made["accepted_per_verification"])
