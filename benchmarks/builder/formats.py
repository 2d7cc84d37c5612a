"""Sizes, errors, times and memory of every weight format, of one checkpoint.

    python benchmarks/builder/formats.py --model tiny --work_dir DIR \\
        --baseline benchmarks/baselines/formats.jsonl

The checkpoint is made by `init` with the options of MODELS, or is the one committed. Each format is
quantised, built into an engine, compared with the checkpoint by `verify`, and loaded packed.
Commands run in processes of their own on one thread; their seconds are processor time, which other
work on the machine adds little to. One JSON line per format, which takes the place of the same line
in the baseline. `python benchmarks/builder/tables.py` then writes the documented tables.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from baseline import keep
from packed_weights import in_a_process

from builder.checkpoint import Checkpoint
from engine.directory import rank_file

FORMATS = ("as-released", "mxfp8", "nvfp4-experts", "nvfp4")
TINYFLASH = Path("examples/tinyflash/checkpoint")


class Model(NamedTuple):
    """Options of `init`, none for a committed checkpoint; random ids that `verify` compares."""

    options: tuple[str, ...]
    positions: int = 0


MODELS = {
    "tiny": Model(("--config", "tiny"), 99),
    "tinyflash": Model(()),
    "slice": Model(
        ("--config", "full", "--layer_ids", "0,1,2,14,20,24", "--experts", "16",
         "--engram_rows", "100000"),
        48,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=tuple(MODELS), required=True)
    add("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    add("--work_dir", type=Path, required=True, help="a made checkpoint stays, the rest goes")
    add("--baseline", type=Path, help="JSON lines to keep the results in")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    checkpoint = prepared(args.model, args.work_dir)
    for name in args.formats:
        line = json.dumps(measure(args.model, checkpoint, name, args.work_dir))
        print(line, flush=True)
        if args.baseline:
            keep(args.baseline, line, ("model", "format"))


def prepared(model: str, work_dir: Path) -> Path:
    options, path = MODELS[model].options, work_dir / model
    if not options:
        return TINYFLASH
    if not path.is_dir():
        command("init", *options, "--output_dir", path)
    return path


def measure(model: str, checkpoint: Path, name: str, work_dir: Path) -> dict[str, Any]:
    quantised, engine = work_dir / f"{model}-{name}", work_dir / f"{model}-{name}-engine"
    tokens = work_dir / f"{model}.npy"
    write_tokens(model, checkpoint, tokens)
    for left in (quantised, engine):
        shutil.rmtree(left, ignore_errors=True)
    _, quantising = command(
        "quantize", "--checkpoint_dir", checkpoint, "--format", name, "--output_dir", quantised
    )
    report = json.loads((quantised / "report.json").read_text())
    _, building = command("engine", "--checkpoint_dir", quantised, "--output_dir", engine)
    shutil.rmtree(quantised)
    compared, verifying = command(
        "verify", "--engine", engine, "--checkpoint_dir", checkpoint, "--tokens", tokens, "--json"
    )
    result = {
        "benchmark": "formats",
        "machine": f"one thread of a shared {platform.machine()} CPU, Python "
        f"{platform.python_version()}, torch {version('torch')}, ModelOpt "
        f"{version('nvidia-modelopt')}",
        "model": model,
        "init": " ".join(MODELS[model].options) or str(checkpoint),
        "format": name,
        "quantize": quantising,
        **report,
        "engine": building | {"bytes": size(engine), "rank_bytes": size(engine / rank_file(0))},
        "verify": verifying
        | {key: value for key, value in json.loads(compared).items() if key != "kl"},
        "packed": in_a_process(engine, packed=True, steps=False),
    }
    shutil.rmtree(engine)
    return result


def write_tokens(model: str, checkpoint: Path, path: Path) -> None:
    """Random ids; for TinyFlash a conversation of its training mixture, about a document."""
    if model == "tinyflash":
        from examples.tinyflash.mixture import draw, tokenise

        ids = tokenise(draw("retrieval", Random(0), 512)).tokens
    else:
        vocabulary = Checkpoint.open(checkpoint).config.vocab_size
        ids = np.random.default_rng(0).integers(3, vocabulary, MODELS[model].positions)
    np.save(path, ids)


def size(path: Path) -> int:
    files = [path] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in files if file.is_file())


def command(name: str, *options: object) -> tuple[str, dict[str, float]]:
    """Run dsv41-build; what it printed, its processor time and its peak resident set."""
    argv = [sys.executable, "-m", "builder.cli", name, *map(str, options)]
    child = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    printed = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(argv)} failed")
    seconds = round(usage.ru_utime + usage.ru_stime, 1)
    return printed, {"cpu_seconds": seconds, "peak_rss_bytes": usage.ru_maxrss * 1024}


if __name__ == "__main__":
    main()
