"""Size, build time and memory of TensorRT plans, by weight format and compute type.

    python benchmarks/builder/plans.py --model tiny --work_dir DIR \\
        --baseline benchmarks/baselines/plans.jsonl
    python benchmarks/builder/tables.py

Makes an engine with plans of the model's checkpoint in each weight format and compute type of
MODELS. One JSON line per engine, which takes the place of the same line in the baseline: bytes of
the weights in the engine's rank file and beside the graphs, bytes and seconds of each plan, and
the largest resident set of the processes that built them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from baseline import keep

from builder.cli import main as build
from engine.directory import Engine, rank_file
from engine.plans import PLANS_DIR, read_plans

SLICE = "--config full --layer_ids 0,1,2,14,20,24 --experts 2 --engram_rows 20000"


class Model(NamedTuple):
    """Options of `init`, none for a committed checkpoint. A weight format is one of `quantize`,
    "" for the checkpoint as it is."""

    options: str
    formats: tuple[str, ...]
    dtypes: tuple[str, ...]


MODELS = {
    "tiny": Model(
        "--config tiny --format float32 --seed 5",
        ("", "as-released", "nvfp4", "nvfp4-w4a4", "mxfp8"),
        ("float32", "bfloat16"),
    ),
    "tinyflash": Model("", ("",), ("bfloat16",)),
    "slice": Model(SLICE, ("",), ("bfloat16",)),
}
TINYFLASH = Path("examples/tinyflash/checkpoint")
_KEY = ("model", "weights", "dtype")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=tuple(MODELS), required=True)
    parser.add_argument("--work_dir", type=Path, required=True)
    parser.add_argument("--baseline", type=Path, help="JSON lines to keep the results in")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    args.work_dir.mkdir(parents=True, exist_ok=True)
    model = MODELS[args.model]
    source = args.work_dir / args.model if model.options else TINYFLASH
    if model.options and not source.is_dir():
        run("init", *model.options.split(), "--output_dir", source)
    for name in model.formats:
        checkpoint = quantised(source, name, args.work_dir) if name else source
        for dtype in model.dtypes:
            path = args.work_dir / "engine"
            shutil.rmtree(path, ignore_errors=True)
            run("engine", "--checkpoint_dir", checkpoint, "--output_dir", path, "--plans", dtype)
            known = {"model": args.model, "init": model.options, "weights": name, "dtype": dtype}
            line = json.dumps({"benchmark": "plans", **known, **measure(path)})
            print(line, flush=True)
            if args.baseline:
                keep(args.baseline, line, _KEY)
            shutil.rmtree(path)


def quantised(source: Path, name: str, work_dir: Path) -> Path:
    made = work_dir / name
    if not made.is_dir():
        options = ["--checkpoint_dir", source, "--format", name, "--output_dir", made]
        if name == "nvfp4-w4a4":
            tokens = work_dir / "tokens.npy"
            np.save(tokens, np.random.default_rng(0).integers(3, 500, 512))
            options += ["--calib_dataset", tokens]
        run("quantize", *options)
    return made


def run(*options: object) -> None:
    if build([str(option) for option in options]):
        sys.exit(1)


def measure(path: Path) -> dict[str, object]:
    engine, plans = Engine.open(path), read_plans(path)
    first = next(iter(plans.values()))
    return {
        "machine": f"shared {platform.machine()} CPU, Python {platform.python_version()}",
        "library": f"{first.library} {first.version}",
        "stored": dict(engine.quantization),
        "rank_bytes": (path / rank_file(0)).stat().st_size,
        "graph_weight_bytes": (path / PLANS_DIR / "weights.bin").stat().st_size,
        "plans": {
            segment: {"bytes": plan.num_bytes, "seconds": round(plan.seconds, 1)}
            for segment, plan in plans.items()
        },
        # Of all plans that this process had built so far: only a larger one can raise it.
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


if __name__ == "__main__":
    main()
