"""Resident bytes and step time of an engine with packed weights and with decoded ones.

    python benchmarks/builder/packed_weights.py --engine ENGINE

Each way loads in a process of its own (one way only with --packed 0 or 1), reads every page of the
weights once, and then runs 16 tokens one by one and 256 in one step (not with --no-steps). Decoded
in bfloat16 is what the packed ways are compared with:

`resident_bytes`   growth of the resident set by the weights, mapped pages included
`vocabulary_bytes` what of it is embedding and head
`held_bytes`       tensors that are held
`held_ratio`       of packed weights: what of them is not embedding or head, in parts of the same
                   with every quantised weight, tables included, in bfloat16
"""

from __future__ import annotations

import argparse
import json
import math
import mmap
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
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
from engine.network.weights import NetworkWeights
from plugins.formats.rows import PackedRows, ValueRows
from plugins.linear import PackedLinearWeight
from plugins.moe import PackedExpertWeights


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--engine", type=Path, required=True)
    parser.add_argument("--packed", type=int, choices=(0, 1))
    parser.add_argument("--no-steps", action="store_true", help="measure the memory alone")
    args = parser.parse_args()
    if args.packed is not None:
        print(json.dumps(measure(args.engine, packed=bool(args.packed), steps=not args.no_steps)))
        return
    for packed in (False, True):
        print(json.dumps(in_a_process(args.engine, packed=packed, steps=not args.no_steps)))


def in_a_process(engine: Path, *, packed: bool, steps: bool) -> dict[str, Any]:
    """`measure` where nothing else was loaded before."""
    argv = [sys.executable, __file__, "--engine", str(engine), "--packed", str(int(packed))]
    done = subprocess.run(
        argv if steps else [*argv, "--no-steps"], check=True, stdout=subprocess.PIPE
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def measure(path: Path, *, packed: bool, steps: bool) -> dict[str, Any]:
    torch.set_num_threads(1)
    engine = Engine.open(path)
    before = psutil.Process().memory_info().rss
    weights = engine.load_weights(torch.bfloat16, packed=packed)
    for tensor in tensors(weights):
        tensor.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].sum()
    resident = psutil.Process().memory_info().rss - before
    held, vocabulary = held_bytes(weights), weights.embed.nbytes + weights.head.value.nbytes
    result = {
        "packed": packed,
        "resident_bytes": resident,
        "vocabulary_bytes": vocabulary,
        "held_bytes": held,
    }
    if packed:
        rest = held - vocabulary
        result["held_ratio"] = round(rest / bfloat16_bytes(rest, engine), 4)
    return result | _steps(Network(engine.config, weights)) if steps else result


def _steps(network: Network) -> dict[str, float]:
    tokens = np.random.default_rng(0).integers(3, network.config.vocab_size, 256)
    start = time.perf_counter()
    run_forward(network, tokens[:16], ForwardMode.FULL, chunk_rows=1)
    one = (time.perf_counter() - start) / 16
    start = time.perf_counter()
    run_forward(network, tokens, ForwardMode.FULL)
    many = time.perf_counter() - start
    return {"ms_per_step_of_1": round(1e3 * one, 1), "ms_per_step_of_256": round(1e3 * many, 1)}


def bfloat16_bytes(held: int, engine: Engine) -> int:
    """What would be held with every quantised weight in bfloat16, tables included."""
    source = engine.source()
    stored: Counter[str] = Counter()
    for name in source.names():
        stored[name.rpartition(".")[0]] += source.describe(name).num_bytes
    quantised = [weight for weight in all_weights(engine.config) if weight.scale_name is not None]
    values = sum(math.prod(weight.shape) for weight in quantised)
    return held - sum(stored[weight.base] for weight in quantised) + 2 * values


def held_bytes(weights: NetworkWeights) -> int:
    return sum(tensor.nbytes for tensor in tensors(weights))


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors below `value`, packed ones as they are held."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, PackedLinearWeight):
        yield from tensors(value.packed)
    elif isinstance(value, PackedExpertWeights):
        yield from tensors(value.matrices())
    elif isinstance(value, PackedRows | ValueRows):
        yield value.data if isinstance(value, PackedRows) else value.values
    elif isinstance(value, tuple):
        for member in value:
            yield from tensors(member)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name))


if __name__ == "__main__":
    main()
