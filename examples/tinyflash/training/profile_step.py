"""Where a training step's time goes: python -m examples.tinyflash.training.profile_step"""

from __future__ import annotations

import sys
import time

import torch

from examples.tinyflash.training.compiled import compile_operators
from examples.tinyflash.training.initial import model_config
from examples.tinyflash.training.loop import Plan, Trainer, _draw

torch.set_float32_matmul_precision("high")
if "compile" in sys.argv:
    compile_operators()
tokens = int(sys.argv[1])
trainer = Trainer(model_config(), Plan(1000, tokens), "cuda")
for start in (0, 500, 900):
    trainer.step = start
    if start == 900:
        trainer.parameters.refresh_rounding()
    times = []
    for _ in range(5):
        batch = _draw(trainer.plan, trainer.step)
        torch.cuda.synchronize()
        t = time.time()
        trainer.train_step(batch)
        torch.cuda.synchronize()
        times.append(round(time.time() - t, 3))
    print(tokens, start, times, f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    with torch.profiler.profile() as p:
        trainer.train_step(batch)
        torch.cuda.synchronize()
    print(
        p.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=14, max_name_column_width=45
        )[:6000]
    )
