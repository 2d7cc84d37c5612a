"""`dsv41-build inspect`: the figures that others published, and sums done by hand."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from builder.cli import main
from builder.inspection import describe, parse_memory, subject_of_config
from builder.presets import FULL
from builder.progress import Progress
from engine.config import ConfigError

PUBLISHED_BYTES = 510_286_023_000
GIB = 2**30


@pytest.fixture(scope="module")
def full() -> dict[str, Any]:
    return describe(subject_of_config("full", FULL), memory=None)


def test_published_cache_costs(full: dict[str, Any]) -> None:
    cache = full["cache"]
    assert cache["global_bytes_per_token"] == 890
    assert cache["window_bytes_per_request"] == 128 * 528 * 40 == 2_703_360
    assert cache["draft_window_bytes_per_request"] == 128 * 528 * 3
    assert cache["compressor_bytes_per_request"] == 3 * 8 * 4096
    assert cache["longest_request_bytes"] == 890 * 2**20 + 2_703_360 + 202_752 + 98_304


def test_published_sizes(full: dict[str, Any]) -> None:
    """On disk: routed experts 275.7 GiB, Engram 189.1 GiB, the rest about 10.4 GiB, 510.3 GB."""
    sizes = full["weight_bytes"]
    experts = sizes["routed experts"] + sizes["draft experts"]
    engram = sizes["Engram tables"] + sizes["Engram gates"]
    assert round(experts / GIB, 1) == 275.7
    assert round(engram / GIB, 1) == 189.1
    assert full["table_bytes"] == (384_006_168 + 384_016_682) * 264
    # The vision tower and aligner are not counted: about 485 million bfloat16 values.
    vision = PUBLISHED_BYTES - full["total_bytes"]
    block = 4 * 1024 * 1024 + 3 * 1024 * 2816
    patches, aligner = 14 * 14 * 3 * 1024, 9 * 1024 * 5120 + 5120 * 5120
    assert vision == pytest.approx(2 * (32 * block + patches + aligner), rel=0.001)


def test_released_model_does_not_fit_one_gpu(full: dict[str, Any]) -> None:
    needed = {gpu["name"]: gpu["gpus_needed"] for gpu in full["gpus"]}
    assert needed["H200"] > 1
    assert needed["H100"] >= 2 * needed["H200"]
    # By hand, four ranks: experts and shared parts divided, latent parts on every rank.
    assert 285.5 * GIB / 4 < 0.9 * 141e9 < 285.5 * GIB / 2


def test_capacity_by_hand() -> None:
    weights = 1_000_000_000
    subject = subject_of_config("full", FULL)
    subject = type(subject)("x", FULL, [(subject.sizes[0][0], weights)], {}, 100_000, 1)
    capacity = describe(subject, memory=weights + 2 * (3_004_416 + 89_000_000) + 17)["capacity"]
    assert capacity["free_bytes"] == 2 * 92_004_416 + 17
    assert capacity["requests_at_max_seq_len"] == 2
    assert capacity["cached_tokens"] == (2 * 92_004_416 + 17 - 3_004_416) // 890
    assert describe(subject, memory=5)["capacity"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("text", "expected"),
    [("80GiB", 80 * GIB), ("141 GB", 141 * 10**9), ("2g", 2 * 10**9), ("1.5MiB", 1572864),
     ("4096", 4096)],
)  # fmt: skip
def test_memory(text: str, expected: int) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "many", "-1GiB", "0", "3 parsecs", "nan", "infGB", "1e999"])
def test_bad_memory(text: str) -> None:
    with pytest.raises(ConfigError, match="80GiB"):
        parse_memory(text)


def test_engine_as_json(released_engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--engine", str(released_engine), "--memory", "1GiB", "--verify", "--json"]
    assert main(["inspect", *options]) == 0
    report = json.loads(capsys.readouterr().out)
    stored = (released_engine / "rank0.safetensors").stat().st_size
    tables = sum((released_engine / f"engram.{n}.bin").stat().st_size for n in (1, 4))
    assert report["table_bytes"] == tables == (660 + 864) * 33
    header = stored - (report["total_bytes"] - tables)
    assert 8 < header < 200_000
    assert report["cache"]["max_seq_len"] == 512
    assert report["cache"]["global_bytes_per_token"] == (1 / 2 + 1 / 2 + 1) * (36 + 17)
    assert report["capacity"]["memory_bytes"] == GIB
    assert report["quantization"]["experts"] == "fp4"


def test_engine_of_two_ranks(
    released_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Replicated weights count once per rank, tables once."""
    out = tmp_path / "two"
    assert main(["engine", "--checkpoint", str(released_dir), "--output_dir", str(out),
                 "--tp-size", "2"]) == 0  # fmt: skip
    capsys.readouterr()
    assert main(["inspect", "--engine", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    data = 0
    for rank in range(2):
        content = (out / f"rank{rank}.safetensors").read_bytes()
        data += len(content) - 8 - int.from_bytes(content[:8], "little")
    assert report["total_bytes"] == data + (660 + 864) * 33


def test_progress_tells_share_and_total(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 3.0, 3.5, 4.0, 4.0, 4.0])
    monkeypatch.setattr("builder.progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    progress = Progress(stream)
    progress.start("hashing", 4 << 20)
    progress.advance(1 << 20)  # at 1 s: too early for a line
    assert stream.getvalue() == ""
    progress.advance(1 << 20)
    assert "hashing:  50% of 4 MiB" in stream.getvalue()


def test_text_for_people(tiny_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--checkpoint_dir", str(tiny_dir), "--memory", "100MiB"]) == 0
    text = capsys.readouterr().out
    for mention in ("routed experts", "per token", "window, per request", "H200", "Capacity"):
        assert mention in text
    assert main(["inspect", "--config", "full"]) == 0
    assert "2,703,360 bytes" in capsys.readouterr().out


def test_subject_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["inspect"])
    assert len(capsys.readouterr().err.splitlines()) == 1
