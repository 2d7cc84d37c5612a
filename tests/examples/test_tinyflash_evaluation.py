"""Reports, paired comparison and ablations, against numbers worked by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from builder.cli import main as build
from engine.directory import Engine
from engine.network import attention, encoder, select
from examples.tinyflash import compare, evaluate
from examples.tinyflash.ablations import ablated
from examples.tinyflash.evaluation import Answer, Report, questions, report, table
from examples.tinyflash.in_process import InProcess, moved
from examples.tinyflash.scoring import Question
from examples.tinyflash.tokenizer import TOKENIZER_FILE
from examples.tinyflash.tokenizer import encoder as text_encoder
from plugins.formats.rows import PackedRows

CONFIG = Path(__file__).resolve().parents[2] / "examples" / "tinyflash" / "config.json"
SWAPPED = (
    (select, "candidate_topk"),
    (encoder, "inject"),
    (select, "index_scores"),
    (attention, "mega_attention"),
)
LABELS = ("template", "numbers", "range", "template", "numbers")


def made(texts: list[str], finish: str = "stop") -> Report:
    """A report on five word problems whose answers are 0 … 4."""
    asked = [
        Question("arithmetic", label, "source", f"question {i}", str(i))
        for i, label in enumerate(LABELS)
    ]
    answers = [Answer(text, finish, 100 * (i + 1), 32, 10) for i, text in enumerate(texts)]
    return report(asked, answers, seed=5, settings={"warm": True}, seconds=1.0)


def test_a_report_and_its_parts() -> None:
    """Right: 0, 2 and 3. Mean 3/5; sample variance 0.3, so its standard error is √0.06."""
    found = made(["#### 0", "#### 7", "#### 2", "so\n#### 3", "four"])
    assert (found["accuracy"], found["n"], found["seed"]) == (0.6, 5, 5)
    assert found["stderr"] == pytest.approx(0.06**0.5)
    assert found["parts"]["unseen templates"]["accuracy"] == 1.0
    assert found["parts"]["seen templates"]["accuracy"] == pytest.approx(1 / 3)
    assert found["parts"]["unseen range"] == {"accuracy": 1.0, "stderr": None, "n": 1}
    # 100; 200; 300, 400 and 500 tokens, in powers of two.
    assert {name: part["n"] for name, part in found["parts"].items() if "tokens" in name} == {
        "64 to 127 tokens": 1,
        "128 to 255 tokens": 1,
        "256 to 511 tokens": 3,
    }
    assert (found["mean_input_tokens"], found["mean_cached_tokens"]) == (300, 32)
    assert [record["correct"] for record in found["records"]] == [True, False, True, True, False]
    assert found["correct"] == "10110"
    assert found["num_cut_short"] == 0
    assert json.loads(json.dumps(found)) == found
    lines = table(found).splitlines()
    assert lines[1].split() == ["all", "5", "60.00", "%", "24.49", "%"]
    assert all(line == line.rstrip() for line in lines)


def test_equal_results_show_what_their_number_allows() -> None:
    """Wilson's bounds for 5 of 5 and 0 of 5 at z = 1.96: 5/(5 + 3.8416) = 56.55 % and its rest; one
    question: 1/4.8416 = 20.65 %."""
    right = table(made([f"#### {i}" for i in range(5)])).splitlines()
    assert right[1].split()[2:] == ["100.00", "%", "95", "%:", "≥", "56.6", "%"]
    assert right[-4].split()[-5:] == ["95", "%:", "≥", "20.7", "%"]
    wrong = table(made([""] * 5)).splitlines()
    assert wrong[1].split()[2:] == ["0.00", "%", "95", "%:", "≤", "43.4", "%"]


def test_answers_that_were_cut_short_are_counted() -> None:
    assert made(["#### 0"] * 5, finish="length")["num_cut_short"] == 5


def test_paired_comparison() -> None:
    """b − a is 0, +1, 0, −1, +1: mean 0.2; sample variance 0.7, so its standard error is √0.14."""
    a = made(["#### 0", "", "", "#### 3", ""])
    b = made(["#### 0", "#### 1", "", "", "#### 4"])
    found = compare.paired(a, b)
    assert (found.difference, found.n) == (pytest.approx(0.2), 5)
    assert found.stderr == pytest.approx(0.14**0.5)
    (_, _, row) = compare.table([("a", a), ("b", b)]).splitlines()
    assert row.split() == ["b", "60.00", "%", "24.49", "%", "+20.00", "%", "37.42", "%", "+0.53"]


def test_other_questions_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = made([""] * 5), made([""] * 5)
    assert a["asked"] == b["asked"]
    others = [Question("arithmetic", "range", "source", f"another {i}", "1") for i in range(5)]
    b = report(others, [Answer("", "stop", 9, 0, 1)] * 5, seed=5, settings={}, seconds=1.0)
    with pytest.raises(ValueError, match="expected reports on the same questions"):
        compare.paired(a, b)
    for name, content in (("a", json.dumps(a)), ("b", json.dumps(b)), ("c", "{}")):
        (tmp_path / f"{name}.json").write_text(content)
    assert compare.main([str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 2
    assert compare.main([str(tmp_path / "a.json"), str(tmp_path / "c.json")]) == 2
    assert "expected a report" in capsys.readouterr().err


def test_any_seed_makes_other_questions() -> None:
    first, second = (questions("arithmetic", 6, seed) for seed in (1, 2))
    assert not {q.prompt for q in first} & {q.prompt for q in second}
    with pytest.raises(ValueError, match="at least 2 questions, got 1"):
        questions("retrieval", 1, 0)


# -- in process ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained TinyFlash, built for four short requests."""
    folder = tmp_path_factory.mktemp("evaluate")
    checkpoint = f"{folder / 'checkpoint'}"
    made = ["init", f"--config={CONFIG}", f"--output_dir={checkpoint}"]
    assert build([*made, f"--tokenizer={TOKENIZER_FILE}"]) == 0
    limits = ["--max_batch_size=4", "--max_num_tokens=512", "--max_seq_len=512"]
    made = ["engine", f"--checkpoint_dir={checkpoint}", f"--output_dir={folder / 'e'}"]
    assert build([*made, *limits]) == 0
    return folder / "e"


@pytest.fixture(scope="module")
def cold(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    """The plain run that others are compared with."""
    folder = tmp_path_factory.mktemp("cold")
    return folder / "report.json", run(engine, folder)


def run(engine: Path, tmp_path: Path, *options: str) -> Report:
    """A report of two retrieval questions of some 300 tokens, five tokens an answer."""
    asked = ["--task=retrieval", "--limit=2", "--document-tokens", "256", "320", "--max-tokens=5"]
    out = tmp_path / "report.json"
    assert evaluate.main([f"--engine={engine}", *asked, *options, f"--json={out}"]) == 0
    loaded: Report = json.loads(out.read_text())
    return loaded


def texts(found: Report) -> list[str]:
    return [record["text"] for record in found["records"]]


def test_warm_questions_are_asked_after_a_hit(
    engine: Path, cold: tuple[Path, Report], tmp_path: Path
) -> None:
    """A hit covers all whole pages of 32 tokens that leave a token to compute."""
    assert [record["cached_tokens"] for record in cold[1]["records"]] == [0, 0]
    plot = tmp_path / "plot.png"
    warm = run(engine, tmp_path, "--warm", f"--compare={cold[0]}", f"--plot={plot}")
    for record in warm["records"]:
        assert record["cached_tokens"] == (record["num_input_tokens"] - 1) // 32 * 32
    assert warm["settings"]["warm"] is True
    assert plot.read_bytes().startswith(b"\x89PNG")
    # Nothing replayed is an approximation that an untrained model's answers show.
    none = run(engine, tmp_path, "--warm", "--replay-length=0")
    assert texts(none) != texts(warm)


@pytest.mark.parametrize("name", ["engram", "indexer", "global"])
def test_each_ablation_changes_answers_and_leaves_no_trace(
    engine: Path, cold: tuple[Path, Report], tmp_path: Path, name: str
) -> None:
    before = [getattr(module, operator) for module, operator in SWAPPED]
    without = run(engine, tmp_path, f"--ablate={name}")
    assert texts(without) != texts(cold[1])
    assert without["settings"]["ablate"] == name
    assert [getattr(module, operator) for module, operator in SWAPPED] == before


def test_random_selection_stays_within_what_a_row_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = torch.tensor([[1.0, -torch.inf, 2.0]])
    monkeypatch.setattr(select, "index_scores", lambda: scores)
    with ablated("indexer"):
        drawn = vars(select)["index_scores"]()
    assert drawn.isneginf().tolist() == [[False, True, False]]
    assert (drawn != scores)[0, [0, 2]].all()


def test_random_selection_stays_within_the_candidates() -> None:
    """Blocks of two: 0, 1, 6 and 7 are candidates, 7 is not seen. Every one is drawn at times."""
    slots = torch.zeros(1, 8, dtype=torch.int64)
    rows = torch.zeros(64, dtype=torch.int64)
    blocks = torch.tensor([[0, 3, -1]]).expand(64, -1)
    with ablated("indexer"):
        drawn = vars(select)["candidate_topk"](
            None, None, None, slots, rows, rows + 7, blocks, k=2, block_size=2
        )
    assert {tuple(row) for row in drawn.tolist()} == {(0, 1), (0, 6), (1, 6)}


def test_the_text_of_an_answer_is_its_tokens(engine: Path) -> None:
    model = InProcess(engine, {})
    try:
        prompt = model.encode("Hello.", thinking=True)
        (answer,) = model.answers([prompt], max_tokens=3)
    finally:
        model.close()
    assert (answer.finish_reason, answer.num_output_tokens, answer.cached_tokens) == (
        "length",
        3,
        0,
    )
    assert answer.num_input_tokens == len(
        text_encoder().encode(
            "<｜begin▁of▁sentence｜><｜System｜>Reasoning Effort: 75 (range 1-100, the higher the "
            "value, the more thorough the reasoning)\n\n<｜User｜>Hello.<｜Assistant｜><think>"
        )
    )


def test_all_weights_move_to_the_device(engine: Path) -> None:
    weights = moved(Engine.open(engine).load_weights(torch.float32), "meta")
    layer = weights.layers[1]  # with Engram
    assert layer.engram is not None
    assert isinstance(layer.engram.table, PackedRows)
    tensors = [weights.embed, weights.token_class, weights.head.value, layer.attn_hc.scale]
    tensors += [layer.attention.wq_a.value, layer.moe.gate, layer.engram.table.data]
    tensors += [value for value in vars(layer.moe.routed).values() if torch.is_tensor(value)]
    assert len(tensors) > 7
    assert all(tensor.is_meta for tensor in tensors)


def test_unknown_weights_are_not_left_behind_on_the_host() -> None:
    with pytest.raises(TypeError, match="got object"):
        moved((torch.zeros(1), object()), "cpu")


def test_refusals_are_one_sentence(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main([f"--engine={engine}", "--task=arithmetic", "--replay-length=-1"]) == 2
    assert "replay_length of at least 0, got -1" in capsys.readouterr().err


def test_what_cannot_be_finished_is_not_begun(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused before the engine, which does not exist, is missed."""
    (tmp_path / "other.json").write_text(json.dumps(made([""] * 5)))
    asked = [f"--engine={tmp_path / 'no engine'}", "--task=arithmetic", "--limit=2"]
    for options, words in (
        ([f"--json={tmp_path}"], "expected a file in an existing folder"),
        ([f"--plot={tmp_path / 'none' / 'x.svg'}"], "expected a file in an existing folder"),
        ([f"--json={tmp_path / 'other.json' / 'x'}"], "expected a file in an existing folder"),
        ([f"--plot={tmp_path / 'x.foo'}"], "expected a picture that ends with one of"),
        ([f"--plot={tmp_path / 'x'}"], "expected a picture that ends with one of"),
        ([f"--compare={tmp_path / 'other.json'}"], "expected reports on the same questions"),
        (["--document-tokens", "256", "320"], "expected document tokens with the task retrieval"),
        ([], "expected an engine directory"),
    ):
        assert evaluate.main([*asked, *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    assert [path.name for path in tmp_path.iterdir()] == ["other.json"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [f"--engine={engine}", "--task=arithmetic", "--limit=2", "--device=cuda"]
    assert evaluate.main(asked) == 2
    assert capsys.readouterr().err == (
        "evaluate: expected a CUDA device, found none; use the device cpu\n"
    )


@pytest.mark.parametrize("field", ["accuracy", "stderr", "n"])
def test_reports_whose_numbers_are_none(tmp_path: Path, field: str) -> None:
    (tmp_path / "r.json").write_text(json.dumps(made([""] * 5) | {field: "much"}))
    with pytest.raises(ValueError, match=r"expected a report .*r\.json"):
        compare.read(tmp_path / "r.json")


@pytest.mark.parametrize("correct", ["0000", "00002", [0, 0, 0, 0, 0], 0, None])
def test_reports_without_a_digit_per_question(tmp_path: Path, correct: object) -> None:
    (tmp_path / "r.json").write_text(json.dumps(made([""] * 5) | {"correct": correct}))
    with pytest.raises(ValueError, match=r"expected a report .*r\.json"):
        compare.read(tmp_path / "r.json")


def test_reports_of_two_tasks_are_not_compared() -> None:
    with pytest.raises(ValueError, match="expected reports on the same questions"):
        compare.paired(made([""] * 5), made([""] * 5) | {"task": "retrieval"})
