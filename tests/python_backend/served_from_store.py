"""Serves random requests on a GPU from an engine's compiled kernels alone, and prints how many
there were. For a process of its own, in which nothing was compiled or launched before."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from triton import knobs

from engine.directory import Engine
from engine.kernels import kernels_dir
from engine.network import Network
from engine.network.device import moved
from plugins.device.store import KernelStore, device_target
from python_backend.core import EngineCore
from python_backend.executor.cuda_executor import CudaExecutor
from python_backend.executor.pools import pools_of
from python_backend.settings import ServeSettings
from tests.python_backend.launches_served import random_streams
from tests.python_backend.real_core import serve


def main(engine_dir: Path) -> None:
    compiled: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    knobs.compilation.listener = listen
    store = KernelStore(kernels_dir(engine_dir), device_target(), only=True)
    store.serve()
    engine = Engine.open(engine_dir)
    weights = engine.load_weights(torch.bfloat16, packed=True)
    network = Network(engine.config, moved(weights, "cuda"))
    random, tokens = np.random.default_rng(0), 0
    for speculative in (True, False):
        settings = ServeSettings(
            dtype="bfloat16",
            device="cuda",
            max_batch_size=engine.build.max_batch_size,
            max_num_tokens=engine.build.max_num_tokens,
            max_seq_len=engine.build.max_seq_len,
            num_global_pages=2000,
            speculative=speculative,
        )
        limits = settings.resolve(engine.config, 1 << 40)
        executor = CudaExecutor(
            network, pools_of(engine.config, limits, torch.bfloat16, "cuda"), limits
        )
        for shape in executor.shapes_at_start():
            executor.capture(shape)
        streams, arrivals = random_streams(random, limits)
        serve(EngineCore(executor, limits), streams, arrivals)
        tokens += sum(len(one.output) for one in streams)
    torch.cuda.synchronize()
    found = {"found": len(store.found), "missing": len(store.missing), "tokens": tokens}
    json.dump({**found, "compiled": compiled}, sys.stdout)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
