"""What the runtime must show on a GPU, in one run of a few minutes:

    python -m benchmarks.forward.show --out runtime.jsonl

* `replay`: prefill of one prompt at the real dimensions, one of eight ranks: bounded replay off, on
  one launch at a time, and on with graphs;
* `decode`: 32 requests at contexts from 64K to 855K, and a single user with and without drafts;
* `agreement`: TinyFlash on the GPU's executor against the float64 reference, on word problems;
* `documents`: the same on documents of thousands of tokens;
* `engram`: a decode step with the Engram tables in the device's memory and in the host's;
* `served`: TinyFlash behind the serving core, in this process: tokens a second with and without
  graphs and drafts;
* `hit`: 32K new tokens behind a cached prefix of 128K (benchmarks/forward/hit.py).

One JSON object a row, as benchmarks/forward/run.py and agreement.py make them. What `--minutes`
leave no time for is named as skipped.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.forward.agreement import agreement
from benchmarks.forward.cases import Case, parse, prompt_steps
from benchmarks.forward.hit import hit_rows
from benchmarks.forward.run import (
    DEFAULT_ENGRAM_ROWS,
    launched,
    limits_for,
    measure,
    rank_config,
)
from benchmarks.forward.served import served_rows
from benchmarks.forward.steps import Step, Steps, filled_pools
from benchmarks.forward.weights import random_network
from engine.network import Network
from engine.network.device import moved
from engine.paged_cache import CachePools
from python_backend.executor.cuda_executor import CudaExecutor
from python_backend.settings import CoreLimits

PROMPTS = (1024, 4096, 16384, 65536)
CHUNK = 16384
DECODE = tuple(f"{name}=32*1@{context}" for name, context in (
    ("64K", 65_536), ("128K", 131_072), ("256K", 262_144), ("512K", 524_288), ("855K", 855_040),
))  # fmt: skip
SINGLE = ("one=1*1@8192",)
DRAFTING = ("drafts=1*6@8192:5", "verify=16*6@131072:5")

ENGRAM = "engram=64*1@8192"
PARTS = ("agreement", "documents", "served", "replay", "hit", "engram", "decode")

Row = dict[str, Any]


def replay_rows(network: Network, device: str) -> Iterator[Row]:
    """Milliseconds from a prompt's rows to the end of the device's work."""
    for tokens in PROMPTS:
        case = parse(f"cold={tokens}")
        row: Row = {"row": "replay", "tokens": tokens, "chunk": min(tokens, CHUNK)}
        for name, replay, graphs in (
            ("off", False, False),
            ("off_graphs", False, True),
            ("on", True, False),
            ("on_graphs", True, True),
        ):
            limits = limits_for([case], network.config, replay=replay, draft=False)
            pools = filled_pools(network, limits, device)
            executor = CudaExecutor(
                network, pools, limits, graphs=graphs, capture_after=0, device=device
            )
            plans = prompt_steps(tokens, limits, chunk=CHUNK)
            steps = Steps([Step(executor, plan) for plan in plans])
            row[f"{name}_ms"] = round(steps.served_ms(samples=5), 3)
            del executor, steps, pools
            _free()
        off = min(row["off_ms"], row["off_graphs_ms"])
        row["graphs_to_off"] = round(row["on_graphs_ms"] / off, 4)
        row["eager_to_off"] = round(row["on_ms"] / off, 4)
        yield row


def decode_rows(network: Network, device: str) -> Iterator[Row]:
    """All are timed before the first is profiled: see steps.launches. A step's launches are a row
    of their own, so that a run that is cut off keeps the times."""
    for cases, limits, pools in _decode_sets(network, device):
        first: Row = {}
        for case in cases:
            made = measure(case, network, pools, limits, device=device, graphs=True)
            if case.text in DECODE:
                first = first or made
                for name, ms in (("growth", "gpu_ms"), ("served_growth", "served_ms")):
                    made[name] = round(made[ms] / first[ms] - 1, 4)
            yield {"row": "decode", **made}
        del pools
    for cases, limits, pools in _decode_sets(network, device):
        for case in cases:
            made = launched(case, network, pools, limits)
            per_layer = round(made["launches"] / network.config.num_hidden_layers, 1)
            yield {"row": "launches", "case": case.text, **made, "launches_per_layer": per_layer}
        del pools


def _decode_sets(
    network: Network, device: str
) -> Iterator[tuple[list[Case], CoreLimits, CachePools]]:
    """Cases, with limits and caches of their own; one set lives at a time."""
    for texts, draft in ((DECODE, False), (SINGLE, False), (DRAFTING, True)):
        cases = [parse(text) for text in texts]
        limits = limits_for(cases, network.config, replay=True, draft=draft)
        _free()
        yield cases, limits, filled_pools(network, limits, device)


def engram_rows(network: Network, device: str) -> Iterator[Row]:
    """The same step with the tables in the device's memory, and pinned in the host's."""
    case = parse(ENGRAM)
    limits = limits_for([case], network.config, replay=True, draft=False)
    pools = filled_pools(network, limits, device)
    for on_host in (False, True):
        weights = moved(network.weights, device, engram_on_host=on_host)
        placed = Network(network.config, weights)
        made = measure(case, placed, pools, limits, device=device, graphs=True)
        yield {"row": "engram", "on_host": on_host, **made}


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.forward.show")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--minutes", type=float, default=4.0, help="start no row after these")
    parser.add_argument("--experts-per-rank", type=int, default=48)
    parser.add_argument("--questions", type=int, default=128, help="word problems to agree on")
    parser.add_argument("--documents", type=int, default=32, help="documents to agree on")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none")
    started = time.monotonic()

    def emit(row: Row) -> None:
        line = json.dumps(row | {"at_s": round(time.monotonic() - started, 1)})
        print(line, flush=True)
        with args.out.open("a") as file:
            file.write(line + "\n")

    def run(part: str, rows: Callable[[], Iterator[Row]]) -> None:
        """A part that fails does not take the others with it."""
        if part not in args.parts:
            return
        try:
            for row in rows():
                emit(row)
                if time.monotonic() - started > 60 * args.minutes:
                    emit({"row": part, "skipped": "the rest, for want of time"})
                    return
        except Exception:
            traceback.print_exc()
            emit({"row": part, "failed": traceback.format_exc().splitlines()[-1]})

    @functools.cache
    def network() -> Network:
        """One of eight ranks at the real dimensions."""
        config = rank_config("full", experts=args.experts_per_rank, engram_rows=DEFAULT_ENGRAM_ROWS)
        return random_network(config, torch.bfloat16, "cuda")

    emit({"device": torch.cuda.get_device_name(), "torch": str(torch.__version__)})
    run("agreement", lambda: iter(agreement("cuda", "arithmetic", args.questions)))
    run("documents", lambda: iter(agreement("cuda", "retrieval", args.documents)))
    run("served", lambda: served_rows("cuda"))
    at_real_dims = {
        "replay": replay_rows,
        "hit": hit_rows,
        "engram": engram_rows,
        "decode": decode_rows,  # the last, because it profiles
    }
    for part, rows in at_real_dims.items():
        _free()
        run(part, lambda rows=rows: rows(network(), "cuda"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
