"""`dsv41-build engine --kernels`: an engine with kernels compiled for GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from builder import kernels
from builder.cli import main
from engine.directory import Engine
from engine.kernels import read_kernels
from engine.manifest import EngineError

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
TARGETS = ["sm_90", "sm_100", "sm_120"]


def one_variant_each() -> dict[str, str]:
    """Of each target the variant of the RMS norm, of which compiling takes a moment."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, str(ROOT / "tests/plugins/kernels_stored.py"), "name", *TARGETS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return dict(zip(TARGETS, done.stdout.splitlines(), strict=True))


def options(tiny_dir: Path, output: Path) -> list[str]:
    classes = f"--token_class={tiny_dir / 'golden_quant.safetensors'}"
    given = ["--checkpoint_dir", str(tiny_dir), "--output_dir", str(output), classes]
    return ["engine", *given, "--max_seq_len=100", "--max_num_tokens=32", "--max_batch_size=4"]


def test_kernels_of_each_gpu_are_part_of_the_engine(
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a server launches is cut down to one kernel that compiles and one that is not there."""
    variants = one_variant_each()
    broken = json.dumps(["plugins.norm.kernel", "_no_such_norm", "{}"])
    asked: list[tuple[Path, str]] = []

    def find(engine: Path, target: str) -> list[str]:
        asked.append((engine, target))
        assert (engine / "config.json").is_file()
        return [variants[target], broken]

    tiny_engine = tmp_path / "plain"
    assert main(options(tiny_dir, tiny_engine)) == 0
    assert read_kernels(tiny_engine) == {}
    monkeypatch.setattr(kernels, "_find", find)
    output = tmp_path / "engine"
    assert main([*options(tiny_dir, output), "--kernels", *TARGETS]) == 0
    assert [target for _, target in asked] == TARGETS
    warnings = capsys.readouterr().err
    for target in TARGETS:
        assert f"left out plugins.norm.kernel._no_such_norm for {target}, which does" in warnings

    engine = Engine.open(output, verify=True)
    modules = [path.name.split(".")[1] for path in (output / "kernels" / "launchers").iterdir()]
    assert sorted(modules) == ["__triton_launcher", "cuda_utils"]  # one signature, every target
    found = read_kernels(output)
    assert list(found) == TARGETS
    for target, info in found.items():
        (code,) = (output / "kernels" / target).glob("*.cubin")
        # ELF for a CUDA device, made for that architecture.
        assert code.read_bytes()[:4] == b"\x7fELF"
        assert info.count == 1
        assert info.dtype == "bfloat16"
        assert info.num_bytes == code.stat().st_size + code.with_suffix(".json").stat().st_size
        assert json.loads(code.with_suffix(".json").read_text())["arch"] == target.replace("_", "")
        assert code.relative_to(output).as_posix() in engine.manifest.files

    assert main(["inspect", "--engine", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "Compiled kernels" in shown
    assert all(target in shown for target in TARGETS)
    assert main(["inspect", "--engine", str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"]["sm_90"]["count"] == 1

    (output / "kernels" / "kernels.json").write_text('{"sm_90": 1}')
    with pytest.raises(EngineError, match="was altered: expected the kernels of an engine"):
        read_kernels(output)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--kernels", "sm_90", "sm_75"], "kernels: expected sm_80, "),
        (["--kernels", "sm_90", "--tp_size=2"], "kernels: expected an engine of one rank, got"),
    ],
)
def test_kernels_that_cannot_be_are_refused_before_anything_is_written(
    more: list[str],
    sentence: str,
    tiny_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "engine"
    assert main([*options(tiny_dir, output), *more]) == 1
    assert sentence in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_child_that_fails_ends_the_build_with_its_last_words(
    tiny_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(kernels, "_DTYPE", "float17")
    assert main([*options(tiny_dir, tmp_path / "engine"), "--kernels", "sm_90"]) == 1
    complaint = capsys.readouterr().err
    assert "kernels: cannot find out what a server launches: " in complaint
    assert "float17" in complaint
    assert list(tmp_path.iterdir()) == []
