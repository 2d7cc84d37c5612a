"""Resident bytes of the weights in every format beside bfloat16, measured by loading.

    dsv41-build init --config full --layer-ids 0,1,2,14,20,24 --experts 16 --engram_rows 100000 \\
        --output_dir SLICE
    python benchmarks/builder/resident.py --checkpoint_dir SLICE --work_dir DIR \\
        --baseline benchmarks/baselines/resident.jsonl

Bytes do not depend on values: instead of quantising, which takes an hour, each format's checkpoint
gets codes of one random pattern in ModelOpt's layout. The engine of each is built and loaded in a
process of its own (packed_weights.py). The bfloat16 engine is the checkpoint's own, decoded at
load; its Engram tables stay FP8 and mapped. Ratios are of resident bytes, embedding and head aside.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import torch
from baseline import keep
from packed_weights import in_a_process

from builder.checkpoint import Checkpoint
from builder.cli import main as build
from builder.layout import Requantized, WeightSpec
from engine.safetensors_file import STORED_AS, SafetensorsWriter, TensorInfo

# What stays free while bfloat16 is loaded.
_SPARE_BYTES = 1 << 30
_PATTERN_BYTES = 1 << 22
# A code or a scale of every kind that is a number.
_SCALES = {"F8_E8M0": 127, "F8_E4M3": 0x38, "U8": 127}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--checkpoint_dir", type=Path, required=True)
    parser.add_argument("--work_dir", type=Path, required=True)
    parser.add_argument("--baseline", type=Path, help="JSON lines to keep the result in")
    args = parser.parse_args()
    checkpoint = Checkpoint.open(args.checkpoint_dir)
    result: dict[str, Any] = {
        "benchmark": "resident",
        "machine": f"{psutil.virtual_memory().total / 1e9:.0f} GB of memory, Python "
        f"{platform.python_version()}, torch {version('torch')}",
        "layers": checkpoint.config.num_hidden_layers,
        "experts": checkpoint.config.n_routed_experts,
        "values": sum(math.prod(weight.shape) for weight in checkpoint.weights),
    }
    engine = args.work_dir / "engine"
    for name in ("nvfp4", "mxfp8", "nvfp4-experts"):
        made = args.work_dir / "checkpoint"
        write_pattern(checkpoint, name, made)
        made_engine(made, engine)
        shutil.rmtree(made)
        result[name] = in_a_process(engine, packed=True, steps=False)
    made_engine(args.checkpoint_dir, engine)
    result["as-released"] = in_a_process(engine, packed=True, steps=False)
    needed = bfloat16_bytes(checkpoint) + _SPARE_BYTES
    free = psutil.virtual_memory().available
    if free > needed:
        result["bfloat16"] = in_a_process(engine, packed=False, steps=False)
        whole = aside(result["bfloat16"])
        for name in ("as-released", "nvfp4", "mxfp8", "nvfp4-experts"):
            result[name]["resident_ratio"] = round(aside(result[name]) / whole, 4)
    else:
        print(f"bfloat16 needs {needed / 1e9:.0f} GB, {free / 1e9:.0f} are free: not measured")
    shutil.rmtree(engine)
    line = json.dumps(result)
    print(line)
    if args.baseline:
        keep(args.baseline, line, ("layers", "experts"))


def aside(measured: dict[str, Any]) -> int:
    """Resident bytes without embedding and head."""
    return int(measured["resident_bytes"] - measured["vocabulary_bytes"])


def bfloat16_bytes(checkpoint: Checkpoint) -> int:
    """Two bytes a value, and two more for the head, which is kept in float32; the stored bytes of
    one weight beside it."""
    values = sum(math.prod(weight.shape) for weight in checkpoint.weights)
    head = checkpoint.config.vocab_size * checkpoint.config.hidden_size
    return 2 * values + 2 * head


def made_engine(checkpoint: Path, engine: Path) -> None:
    shutil.rmtree(engine, ignore_errors=True)
    options = ["--checkpoint_dir", str(checkpoint), "--output_dir", str(engine)]
    if build(["engine", *options]):
        sys.exit(1)


def write_pattern(checkpoint: Checkpoint, name: str, output: Path) -> None:
    """The checkpoint in another format, every weight with codes that mean nothing."""
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    for file in checkpoint.directory.iterdir():
        if file.suffix not in (".safetensors",) and "index" not in file.name:
            shutil.copyfile(file, output / file.name)
    stored = dict(
        one for weight in checkpoint.weights for one in stored_tensors(weight, name).items()
    )
    pattern = torch.randint(0, 0x70, (_PATTERN_BYTES,), dtype=torch.uint8)
    with SafetensorsWriter(output / "model.safetensors", stored) as writer:
        for tensor, info in stored.items():
            for piece in pieces(tensor, info, pattern):
                writer.write(tensor, piece)


def stored_tensors(weight: WeightSpec, name: str) -> dict[str, TensorInfo]:
    stays = weight.scale_name is None
    of_experts = weight.storage == "fp4" and not weight.name.startswith("mtp.")
    if stays or (name == "nvfp4-experts" and not of_experts):
        return weight.released()
    target: Requantized = "mxfp8" if name == "mxfp8" else "nvfp4"
    return weight.requantized(target)


def pieces(name: str, info: TensorInfo, pattern: torch.Tensor) -> Iterator[torch.Tensor]:
    """Rows of a tensor: codes of the pattern, scales of 1, ones."""
    dtype = STORED_AS[info.dtype]
    is_scale = not name.endswith(".weight") and info.dtype in _SCALES
    if info.dtype in ("F32", "BF16"):
        yield torch.ones(info.shape, dtype=dtype)
        return
    row_bytes = info.num_bytes // info.shape[0]
    step = max(1, _PATTERN_BYTES // row_bytes)
    for start in range(0, info.shape[0], step):
        rows = min(step, info.shape[0] - start)
        codes = pattern[: rows * row_bytes]
        if is_scale:
            codes = torch.full_like(codes, _SCALES[info.dtype])
        yield codes.view(dtype).view(rows, *info.shape[1:])


if __name__ == "__main__":
    main()
