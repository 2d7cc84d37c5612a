"""Serves random requests of TINY over meta tensors and prints which kernels that launches which
python_backend/executor/launches.py does not foresee. For a process that interprets no kernels."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from engine.config_reader import read_config_file
from engine.directory import BuildConfig
from engine.network import Network
from engine.paged_cache import CachePools
from engine.tensor_source import SafetensorsSource
from plugins.device.record import recording
from python_backend.core import EngineCore
from python_backend.executor.cuda_executor import CudaExecutor
from python_backend.executor.inputs import HostDraft
from python_backend.executor.launches import DEVICE, Answers, network_of_shapes, variants_of
from python_backend.executor.pools import pools_of
from python_backend.generation.rows import LogitRows
from python_backend.generation.sampler import Choice
from python_backend.settings import CoreLimits, ServeSettings
from python_backend.step_plan import DraftBlocks
from tests.python_backend.real_core import serve, stream
from tests.python_backend.serving import Stream

TINY = Path(__file__).parents[1] / "vectors" / "tiny"
TARGET = "sm_90"
# Steps of more rows than any size has, prompts of several contexts among them.
BUILD = BuildConfig(max_batch_size=64, max_num_tokens=4096, max_seq_len=1024)


class Served(CudaExecutor):
    """Launches what a step launches; tokens, which meta tensors have none of, are drawn."""

    def __init__(self, network: Network, pools: CachePools, limits: CoreLimits) -> None:
        super().__init__(network, pools, limits, graphs=False, device=DEVICE)
        self._numbers = np.random.default_rng(1)

    def _choose(self, logits: torch.Tensor, rows: LogitRows) -> Choice:
        self._sampler.draw(logits, rows)
        # Drafts are often right.
        drafts = np.take_along_axis(
            np.pad(rows.drafts, ((0, 0), (0, 1)), constant_values=7), rows.behind[:, None], axis=1
        )[:, 0]
        wrong = self._numbers.random(len(drafts)) < 0.3
        return Choice(np.where(wrong | (drafts < 0), 7, drafts).astype(np.int32), {}, {})

    def _propose(self, plan: Any, step: Any, output: Any, *rest: Any) -> DraftBlocks | None:
        draft = HostDraft.of(plan, step, *rest)
        made = self._draft(draft, output.draft_features)
        if made is None:
            return None
        shape = (plan.arrays.num_requests, made.tokens.shape[1])
        confidence = np.full(shape, np.nan, dtype=np.float32)
        confidence[draft.anchors[2]] = 0.9
        return DraftBlocks(self._numbers.integers(3, 9, shape, dtype=np.int32), confidence)


def random_streams(
    random: np.random.Generator, limits: CoreLimits
) -> tuple[list[Stream], list[int]]:
    """Requests and the steps before which they come: of very different lengths, some with a common
    beginning; then some of a few tokens at every step, until there are more than places."""
    longest = min(limits.max_seq_len - 60, 6000)
    shared = random.integers(3, 200, 64, dtype=np.int32)
    streams = []
    for i in range(8):
        own = random.integers(3, 200, int(random.integers(1, longest)), dtype=np.int32)
        prompt = np.concatenate([shared, own])[: int(random.integers(1, longest))]
        streams.append(stream(f"r{i}", prompt, int(random.integers(1, 24)), i % 3 > 0, seed=i))
    before = random.integers(0, 20, len(streams)).tolist()
    for i in range(2 * limits.max_batch_size):
        prompt = random.integers(3, 200, int(random.integers(40, 70)), dtype=np.int32)
        streams.append(stream(f"s{i}", prompt, int(random.integers(4, 40)), True, seed=i))
        before.append(60 + i // 8)
    return streams, before


def main() -> None:
    config, _ = read_config_file(TINY / "config.json")
    source = SafetensorsSource(TINY)
    classes = load_file(TINY / "golden_quant.safetensors")["token_class"].numpy()
    foreseen = variants_of(config, source, classes, BUILD, torch.bfloat16, TARGET)
    served = set()
    random = np.random.default_rng(0)
    for bounded, speculative in ((True, True), (True, False), (False, True)):
        settings = ServeSettings(
            dtype="bfloat16",
            device="cuda",
            max_batch_size=BUILD.max_batch_size,
            max_num_tokens=BUILD.max_num_tokens,
            max_seq_len=BUILD.max_seq_len,
            num_global_pages=300,
            swa_bounded_replay=bounded,
            speculative=speculative,
        )
        limits = settings.resolve(config, 1 << 40)
        network = network_of_shapes(config, source, classes, torch.bfloat16)
        with torch.no_grad(), recording(TARGET) as found, Answers():
            core = EngineCore(
                Served(network, pools_of(config, limits, torch.bfloat16, DEVICE), limits), limits
            )
            serve(core, *random_streams(random, limits))
        served |= found
    unforeseen = [variant._asdict() for variant in sorted(served - foreseen)]
    counts = {"foreseen": len(foreseen), "served": len(served)}
    json.dump({**counts, "unforeseen": unforeseen}, sys.stdout)


if __name__ == "__main__":
    main()
