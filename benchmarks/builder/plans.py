"""Size and build time of TensorRT plans, by weight format and compute type.

    python benchmarks/builder/plans.py --checkpoint_dir CKPT --formats nvfp4,mxfp8 --work_dir DIR

Makes an engine with plans of the checkpoint as it is and of each format that dsv41-build quantize
makes of it, in float32 and bfloat16. One JSON line per engine: bytes of the weights in the engine's
rank file and beside the graphs, bytes and seconds of each plan.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from builder.cli import main as build
from engine.directory import Engine, rank_file
from engine.plans import PLANS_DIR, read_plans


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint_dir", type=Path, required=True)
    parser.add_argument("--formats", default="", help="such as nvfp4,mxfp8")
    parser.add_argument("--work_dir", type=Path, required=True)
    args = parser.parse_args()
    checkpoints = {"as it is": args.checkpoint_dir}
    for name in filter(None, args.formats.split(",")):
        checkpoints[name] = args.work_dir / name
        run("quantize", "--checkpoint_dir", args.checkpoint_dir, "--format", name,
            "--output_dir", checkpoints[name])  # fmt: skip
    for name, checkpoint in checkpoints.items():
        for dtype in ("float32", "bfloat16"):
            path = args.work_dir / "engine"
            run("engine", "--checkpoint_dir", checkpoint, "--output_dir", path, "--plans", dtype)
            print(json.dumps({"weights": name, "dtype": dtype} | measure(path)), flush=True)
            shutil.rmtree(path)


def run(*options: object) -> None:
    if build([str(option) for option in options]):
        sys.exit(1)


def measure(path: Path) -> dict[str, object]:
    engine = Engine.open(path)
    return {
        "stored": dict(engine.quantization),
        "rank_bytes": (path / rank_file(0)).stat().st_size,
        "graph_weight_bytes": (path / PLANS_DIR / "weights.bin").stat().st_size,
        "plans": {
            segment: {"bytes": plan.num_bytes, "seconds": plan.seconds}
            for segment, plan in read_plans(path).items()
        },
    }


if __name__ == "__main__":
    main()
