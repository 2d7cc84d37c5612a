"""Peak memory and speed of `dsv41-build quantize` on a checkpoint of real dimensions.

    python benchmarks/builder/quantize_memory.py --directory DIR --format mxfp8

Writes a random float32 slice of the released model (layers of every role, few experts) into DIR
when it is not there, runs the command in a process of its own, and prints one JSON object with
the process's peak resident set. The default slice has 23 GB in shards of up to 5 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

SLICE = ["--config", "full", "--layer_ids", "0,1,2,14,20,24", "--engram_rows", "100000"]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--format", default="mxfp8")
    parser.add_argument("--layout", choices=("float32", "released"), default="float32")
    parser.add_argument("--experts", default="8")
    args = parser.parse_args()
    source, output = args.directory / f"slice-{args.layout}", args.directory / "quantised"
    if not source.is_dir():
        init = ["--experts", args.experts, "--format", args.layout, "--output_dir", str(source)]
        command("init", *SLICE, *init)
    if output.is_dir():
        shutil.rmtree(output)
    start = time.monotonic()
    peak = command(
        "quantize", "--checkpoint_dir", str(source), "--format", args.format,
        "--output_dir", str(output),
    )  # fmt: skip
    seconds = time.monotonic() - start
    report = json.loads((output / "report.json").read_text())
    shards = [path.stat().st_size for path in source.glob("*.safetensors")]
    values = sum(row["values"] for row in report["classes"].values())
    figures = {
        "format": args.format,
        "source_bytes": sum(shards),
        "shards": len(shards),
        "largest_shard_bytes": max(shards),
        "output_bytes": report["output_bytes"],
        "peak_rss_bytes": peak,
        "seconds": round(seconds, 1),
        "quantised_values": values,
        "ns_per_value": round(seconds / values * 1e9, 1),
    }
    print(json.dumps(figures | {"classes": report["classes"]}, indent=1))


def command(name: str, *options: str) -> int:
    """Run dsv41-build in a process of its own; its peak resident set in bytes."""
    argv = [sys.executable, "-m", "builder.cli", name, *options]
    to_stderr = [(os.POSIX_SPAWN_DUP2, 2, 1)]
    child = os.posix_spawn(sys.executable, argv, os.environ, file_actions=to_stderr)
    _, status, usage = os.wait4(child, 0)
    if status:
        raise SystemExit(f"{' '.join(argv)} failed")
    return usage.ru_maxrss * 1024


if __name__ == "__main__":
    main()
