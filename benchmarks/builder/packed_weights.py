"""Resident bytes and step time of an engine with packed weights and with decoded ones.

    python benchmarks/builder/packed_weights.py --engine ENGINE

Each way loads in a process of its own (one way only with --packed 0 or 1) and runs 16 tokens one by
one, then 256 in one step. `resident_bytes` is the growth of the resident set from before loading to
after the steps, so it includes every mapped page that was read; `weight_bytes` counts the tensors
that are held. `ratio` is what of them is not embedding or head, in parts of the same with quantised
weights in bfloat16 (for packed weights).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections import Counter
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from builder.layout import all_weights
from engine.directory import Engine
from engine.network import Network
from engine.network.run import ForwardMode, run_forward
from plugins.linear import PackedLinearWeight, PackedMatrix
from plugins.moe import PackedExpertWeights


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--packed", type=int, choices=(0, 1))
    args = parser.parse_args()
    if args.packed is not None:
        print(json.dumps(measure(args.engine, packed=bool(args.packed))))
        return
    for packed in ("0", "1"):
        argv = [sys.executable, __file__, "--engine", str(args.engine), "--packed", packed]
        subprocess.run(argv, check=True)


def measure(path: Path, *, packed: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    engine = Engine.open(path)
    before = psutil.Process().memory_info().rss
    weights = engine.load_weights(torch.bfloat16, packed=packed)
    network = Network(engine.config, weights)
    tokens = np.random.default_rng(0).integers(3, engine.config.vocab_size, 256)
    start = time.perf_counter()
    run_forward(network, tokens[:16], ForwardMode.FULL, chunk_rows=1)
    one = (time.perf_counter() - start) / 16
    start = time.perf_counter()
    run_forward(network, tokens, ForwardMode.FULL)
    many = time.perf_counter() - start
    held, vocabulary = held_bytes(weights), weights.embed.nbytes + weights.head.value.nbytes
    return {
        "packed": packed,
        "weight_bytes": held,
        "vocabulary_bytes": vocabulary,
        "ratio": round((held - vocabulary) / bfloat16_bytes(held - vocabulary, engine), 4),
        "resident_bytes": psutil.Process().memory_info().rss - before,
        "ms_per_step_of_1": round(1e3 * one, 1),
        "ms_per_step_of_256": round(1e3 * many, 1),
    }


def bfloat16_bytes(held: int, engine: Engine) -> int:
    """What would be held with every quantised weight in bfloat16, tables included."""
    source = engine.source()
    stored: Counter[str] = Counter()
    for name in source.names():
        stored[name.rpartition(".")[0]] += source.describe(name).num_bytes
    quantised = [weight for weight in all_weights(engine.config) if weight.scale_name is not None]
    values = sum(math.prod(weight.shape) for weight in quantised)
    return held - sum(stored[weight.base] for weight in quantised) + 2 * values


def held_bytes(value: Any) -> int:
    """Bytes of all tensors below `value`, packed ones as they are held."""
    if isinstance(value, torch.Tensor | PackedMatrix):
        return value.nbytes
    if isinstance(value, PackedLinearWeight):
        return value.packed.nbytes
    if isinstance(value, PackedExpertWeights):
        return sum(one.nbytes for stack in value.matrices() for one in stack)  # type: ignore[attr-defined]
    if isinstance(value, tuple):
        return sum(map(held_bytes, value))
    if is_dataclass(value):
        return sum(held_bytes(getattr(value, field.name)) for field in fields(value))
    return sum(map(held_bytes, vars(value).values())) if hasattr(value, "__dict__") else 0


if __name__ == "__main__":
    main()
