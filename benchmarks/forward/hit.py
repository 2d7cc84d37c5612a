"""Prefill of new tokens behind a cached prefix: where its time goes, and what two measures save.

* Layer 20 on the prompt's last rows only: without it, the layer runs on every row and the rest of
  the decoder on the last ones, as an engine does that cuts behind it.
* Candidates: without them, the index sources above the candidate source score every entry that a
  row sees, and what lies outside its candidate blocks is masked.
"""

from __future__ import annotations

import contextlib
import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

import engine.network.select as selection
from benchmarks.forward.cases import parse, prompt_steps
from benchmarks.forward.run import limits_for
from benchmarks.forward.steps import Step, Steps, filled_pools
from engine.batch import RaggedBatch
from engine.cache_view import CacheView
from engine.network import Network
from engine.network.attention import attention
from engine.network.block import Residual, after_attention, attention_input
from engine.network.encoder import Encoder
from engine.network.rows import SegmentRows
from plugins.registry import OPERATORS
from python_backend.executor.cuda_executor import CudaExecutor

NEW, CACHED, CHUNK = 32_768, 131_072, 8192

Row = dict[str, Any]


def hit_rows(network: Network, device: str) -> Iterator[Row]:
    """One row: milliseconds as it is served, with either measure off, and by operator."""
    tokens = NEW + CACHED
    case = parse(f"hit={CHUNK}@{tokens}")
    limits = limits_for([case], network.config, replay=True, draft=False)
    pools = filled_pools(network, limits, device)
    executor = CudaExecutor(network, pools, limits, graphs=False, device=device)
    plans = prompt_steps(tokens, limits, chunk=CHUNK, hit=CACHED)
    steps = Steps([Step(executor, plan) for plan in plans])
    row: Row = {"row": "hit", "new": NEW, "cached": CACHED, "chunk": CHUNK}
    row["ms"] = round(steps.served_ms(samples=3), 2)
    with timed_operators() as times:
        steps.forward()
        torch.cuda.synchronize()
    row["operators_ms"] = {name: round(ms, 2) for name, ms in times().items()}
    with swapped(selection, "candidate_topk", OPERATORS["candidate_topk"].reference):
        row["without_candidates_ms"] = round(steps.served_ms(samples=3), 2)
    with swapped(network, "_encoder", whole_layer(network._encoder)):
        row["without_trimming_ms"] = round(steps.served_ms(samples=3), 2)
    for name in ("candidates", "trimming"):
        row[f"{name}_gain"] = round(row[f"without_{name}_ms"] / row["ms"] - 1, 4)
    del executor, steps, pools
    gc.collect()
    torch.cuda.empty_cache()
    yield row


@contextlib.contextmanager
def swapped(owner: object, name: str, value: Any) -> Iterator[None]:
    """`value` in the place of what `owner` itself has under this name."""
    own = vars(owner)
    before, own[name] = own[name], value
    try:
        yield
    finally:
        own[name] = before


@contextlib.contextmanager
def timed_operators() -> Iterator[Callable[[], dict[str, float]]]:
    """Milliseconds of the device between the first and the last launch of each operator's calls,
    most first. Launches are so long here that the device never waits for the next one."""
    spans: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)

    def timed(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            result = run(*args, **kwargs)
            last.record()
            spans[name].append((first, last))
            return result

        return call

    def times() -> dict[str, float]:
        sums = {name: sum(a.elapsed_time(b) for a, b in all_) for name, all_ in spans.items()}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    with contextlib.ExitStack() as stack:
        for name, entry in OPERATORS.items():
            if entry.kernel is not None:
                stack.enter_context(swapped(entry, "kernel", timed(name, entry.kernel)))
        yield times


def whole_layer(encoder: Encoder) -> Encoder:
    """An encoder that runs the first decoder layer on every row too, whose result nobody reads."""

    class WholeLayer(Encoder):
        def run(self, batch: RaggedBatch, cache: CacheView) -> Residual:
            config = self._config
            every = torch.arange(batch.num_rows, device=batch.positions.device)
            whole = replace(batch, decoder_rows=every)
            residual = super().run(whole, cache)
            rows = SegmentRows.of_decoder(whole, cache, config)
            layer = config.decoder_start
            weights = self._weights.layers[layer]
            x = attention_input(residual, weights, config)
            inv_freq = self._rope.of(layer)
            y, _ = attention(x.u, layer, weights.attention, config, rows, cache, inv_freq, None)
            top_k = config.num_experts_per_tok
            after_attention(x, y, weights, config, top_k=top_k, is_image=rows.is_image)
            return residual.rows(batch.decoder_rows)

    whole = WholeLayer.__new__(WholeLayer)
    whole.__dict__.update(encoder.__dict__)
    return whole
