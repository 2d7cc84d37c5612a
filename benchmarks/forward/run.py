"""Times exact batches through the real executor, without a scheduler and without weights on disk.

    dsv41-build bench forward decode=32*1@8192 verify=16*6@131072:5 hit=2048@10240 \\
        --config full --experts-per-rank 48 --out forward.jsonl

benchmarks/forward/cases.py has the grammar. One JSON object a case: `gpu_ms` is the replay of the
whole step as one CUDA graph, `launched_ms` the same step launched one by one, `served_ms` as it is
served, with graphs of its sizes, and `host_ms` of it until the host has queued all; a CPU has
`served_ms` alone. `floor_ms` is `bytes` at the speed of a copy. Contexts of several requests that
decode are jittered by up to half, their mean kept, and rows choose the experts in turn, unless told
otherwise; caches are full of random rows. Kernels are profiled when all cases have been timed.

With --experts-per-rank the model is one of the ranks that share the experts: so many of them, of
which each row chooses as many as it does of all. Nothing is sent between ranks.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.forward.cases import Case, jittered, num_global_pages, parse, step_of
from benchmarks.forward.floor import draft_bytes, step_bytes
from benchmarks.forward.routing import balanced
from benchmarks.forward.steps import (
    Step,
    filled_pools,
    gpu_ms,
    launches,
    relative_rms,
)
from benchmarks.forward.weights import random_network
from builder.presets import PRESETS, slice_config
from engine.config import ConfigError, ModelConfig
from engine.network import Network
from engine.paged_cache import CachePools
from python_backend.executor.cuda_executor import CudaExecutor
from python_backend.executor.torch_executor import TorchExecutor
from python_backend.settings import CoreLimits, ServeSettings, SettingsError

COPY_BYTES_PER_MS = 4.27e9  # an elementwise copy on an H200, read and written; docs/kernels
DEFAULT_ENGRAM_ROWS = 4_000_000
MOST_SPREAD = 0.005
_SHOWN_KERNELS = 40
_MEMORY = 1 << 50  # pages are counted by the cases, not by what is free


def rank_config(
    name: str, *, experts: int | None = None, engram_rows: int | None = None
) -> ModelConfig:
    """A preset with the experts of one rank, and smaller Engram tables."""
    full = PRESETS[name]
    config = slice_config(full, num_experts=experts, engram_rows=engram_rows)
    if experts is None:
        return config
    share = experts / full.n_routed_experts
    return config.with_changes(
        dspark_n_routed_experts=max(
            full.dspark_num_experts_per_tok, round(full.dspark_n_routed_experts * share)
        )
    )


def limits_for(cases: list[Case], config: ModelConfig, *, replay: bool, draft: bool) -> CoreLimits:
    """Limits that hold every case. Raises SettingsError where none do, ValueError for a context
    beyond the model's positions."""
    most = max(case.most_drafts for case in cases) if draft else 0
    longest = max(case.longest for case in cases)
    if longest > config.max_position_embeddings:
        raise ValueError(
            f"expected contexts of at most {config.max_position_embeddings} tokens, got {longest}"
        )
    window = config.sliding_window
    settings = ServeSettings(
        dtype="bfloat16",
        max_batch_size=max(len(case.requests) for case in cases),
        max_num_tokens=max(
            2 * window, *(sum(r.rows + window for r in case.requests) for case in cases)
        ),
        # A power of two: sizes of contexts are quarters of it.
        max_seq_len=min(config.max_position_embeddings, 1 << (longest - 1).bit_length()),
        swa_bounded_replay=replay,
        num_global_pages=2,
        speculative=most > 0,
        num_speculative_tokens=most or None,
    )
    limits = settings.resolve(config, _MEMORY)
    pages = max(num_global_pages(case, limits.global_page_tokens) for case in cases)
    return replace(limits, num_global_pages=pages)


def spread_warning(case: Case, spread: float) -> str | None:
    """One sentence where the samples of a step differ more than a repeatable one's."""
    if spread <= MOST_SPREAD:
        return None
    return (
        f"{case.text}: samples spread by {spread:.1%}, more than {MOST_SPREAD:.1%}: measure it "
        "again with nothing else on the device"
    )


def measure(
    case: Case,
    network: Network,
    pools: CachePools,
    limits: CoreLimits,
    *,
    device: str,
    graphs: bool,
    in_turn: bool = False,
) -> dict[str, Any]:
    """The times of one row; in_turn: rows choose their experts so. Where `launched` has run before,
    in this process, they are those of a profiled program."""
    plan = step_of(case, limits)
    if device == "cpu":
        step = Step(TorchExecutor(network, pools), plan)
        timed: dict[str, Any] = {"served_ms": round(step.served_ms(samples=3), 3)}
    else:
        step = Step(CudaExecutor(network, pools, limits, graphs=False), plan)
        expected = step.forward().logits.clone()
        timed = {"launched_ms": round(step.served_ms(), 4)}
        if graphs:
            served = Step(CudaExecutor(network, pools, limits, capture_after=0), plan)
            timed["served_ms"] = round(served.served_ms(), 4)
            timed["host_ms"] = round(served.host_ms(), 4)
            equal = torch.equal(served.forward().logits, expected)
            timed["served_equals_launched"] = equal
        graph, output = step.captured()
        ms, spread = gpu_ms(graph)
        if warning := spread_warning(case, spread):
            print(warning, file=sys.stderr)
        timed |= {
            "gpu_ms": round(ms, 4),
            "spread": round(spread, 4),
            "error": float(f"{relative_rms(output.logits, expected):.3e}"),
            "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
        }
    rows, decoder_rows = len(step.host.rows.tokens), len(step.host.rows.decoder_rows)
    moved = step_bytes(case, network.config, network.weights, rows, decoder_rows, in_turn=in_turn)
    if plan.wants_drafts.any():
        moved += draft_bytes(case, network.config, network.weights, in_turn=in_turn)
    return {
        "case": case.text,
        "requests": len(case.requests),
        "rows": rows,
        "decoder_rows": decoder_rows,
        **timed,
        "bytes": moved,
        "floor_ms": round(moved / COPY_BYTES_PER_MS, 4),
    }


def launched(case: Case, network: Network, pools: CachePools, limits: CoreLimits) -> dict[str, Any]:
    """What a row's step launches on a GPU, and the microseconds of the longest kernels."""
    step = Step(CudaExecutor(network, pools, limits, graphs=False), step_of(case, limits))
    step.forward()
    found = launches(step.forward)
    shown = sorted(found.items(), key=lambda item: -item[1][1])[:_SHOWN_KERNELS]
    return {
        "launches": sum(count for count, _ in found.values()),
        "kernels": {name[:60]: [count, round(us, 1)] for name, (count, us) in shown},
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="dsv41-build bench forward")
    parser.add_argument("cases", nargs="+", metavar="CASE", help="such as decode=32*1@8192")
    parser.add_argument("--config", choices=tuple(PRESETS), default="full")
    parser.add_argument("--experts-per-rank", type=int, metavar="N", help="48 is one of eight")
    parser.add_argument("--engram-rows", type=int, default=None, metavar="N")
    parser.add_argument("--engram-on-host", action="store_true")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-replay", action="store_true", help="every row through the decoder")
    parser.add_argument("--no-graphs", action="store_true", help="leave served_ms out")
    parser.add_argument(
        "--no-jitter", action="store_true", help="contexts exactly as they are named"
    )
    parser.add_argument(
        "--real-routing", action="store_true", help="experts as random gates choose"
    )
    parser.add_argument("--no-drafter", action="store_true", help="leave the draft pass out")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also append the rows to FILE")
    args = parser.parse_args()
    try:
        cases = [parse(text) for text in args.cases]
        rows = args.engram_rows
        if rows is None and args.config == "full":
            rows = DEFAULT_ENGRAM_ROWS
        config = rank_config(args.config, experts=args.experts_per_rank, engram_rows=rows)
        if not args.no_jitter:
            cases = [jittered(case, config.max_position_embeddings) for case in cases]
        limits = limits_for(cases, config, replay=not args.no_replay, draft=not args.no_drafter)
        for case in cases:
            step_of(case, limits)  # a hit that is not whole pages is refused before weights exist
    except (ValueError, ConfigError, SettingsError) as error:
        parser.error(str(error))
    turns = not args.real_routing
    host = {"engram_on_host": True} if args.engram_on_host else {}
    network = random_network(config, getattr(torch, args.dtype), args.device, **host)
    pools = filled_pools(network, limits, args.device)
    common = {
        "config": args.config,
        "experts": config.n_routed_experts,
        "engram_rows": sum(config.engram_num_embeddings),
        "engram_on_host": args.engram_on_host,
        "dtype": args.dtype,
        "replay": not args.no_replay,
        "jitter": not args.no_jitter,
        "routing": "balanced" if turns else "real",
        "device": args.device if args.device == "cpu" else torch.cuda.get_device_name(),
    }

    def routing() -> AbstractContextManager[None]:
        # A graph's rows may be padded to twice the step's.
        return balanced(network, 2 * limits.max_num_tokens) if turns else nullcontext()

    timed = []
    for case in cases:
        with routing():
            timed.append(
                measure(
                    case,
                    network,
                    pools,
                    limits,
                    device=args.device,
                    graphs=not args.no_graphs,
                    in_turn=turns,
                )
            )
    for case, made in zip(cases, timed, strict=True):
        if args.device != "cpu":
            with routing():
                made |= launched(case, network, pools, limits)
        line = json.dumps(made | common)
        print(line, flush=True)
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
