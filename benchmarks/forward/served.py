"""TinyFlash served in this process, by the serving core on its own thread: everything but the
Triton server around it."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.forward.agreement import CHECKPOINT, SEED, prompt_of, right
from builder.cli import main as build
from examples.tinyflash.evaluation import ANSWER_TOKENS, questions
from python_backend.request import Delta, Request, SamplingParams
from python_backend.service import ServedModel

SETTINGS: tuple[dict[str, Any], ...] = (
    {"cuda_graphs": False},
    {"cuda_graphs": True},
    {"cuda_graphs": True, "speculative": True, "speculative_schedule": False},
    {"cuda_graphs": True, "speculative": True},
)


def served_rows(device: str, *, count: int = 64) -> Iterator[dict[str, Any]]:
    """All questions at once, then one alone, with each of the settings."""
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "engine"
        command = ["engine", "--checkpoint_dir", str(CHECKPOINT), "--output_dir", str(engine)]
        limits = ["--max_batch_size", str(count), "--max_num_tokens=4096", "--max_seq_len=2048"]
        if build([*command, *limits]):
            raise RuntimeError("the engine was not built; its message says why")
        for settings in SETTINGS:
            yield {"row": "served", **settings, **_served(engine, settings, device, count)}


def _served(engine: Path, settings: dict[str, Any], device: str, count: int) -> dict[str, Any]:
    started = time.monotonic()
    options = {"device": device, "dtype": "bfloat16", "num_global_pages": 4096, **settings}
    model = ServedModel.open(engine, options)
    opened = time.monotonic()
    assert model.text is not None
    text, some = model.text, questions("arithmetic", count, SEED)
    prompts = [prompt_of(one, text) for one in some]
    model.start()
    try:
        model.warm_up()
        _ask(model, prompts)  # makes the graphs that come by use
        together = _ask(model, prompts)
        alone = _ask(model, prompts[:1])
    finally:
        model.stop()
    return {
        "questions": count,
        "open_s": round(opened - started, 2),
        "right": sum(right(some, together.answers, text)),
        "tokens_per_s": round(together.num_tokens / together.seconds, 1),
        "first_token_ms": round(together.median_first_ms, 2),
        "alone_tokens_per_s": round(alone.num_tokens / alone.seconds, 1),
        "alone_first_token_ms": round(alone.median_first_ms, 2),
    }


class _Run:
    """What came of some prompts that were asked together."""

    def __init__(self, count: int) -> None:
        self.started = time.monotonic()
        self.answers: dict[int, list[int]] = {i: [] for i in range(count)}
        self.first: dict[int, float] = {}
        self.seconds = 0.0
        self._open = count
        self._done = threading.Event()

    def receiver(self, question: int) -> Callable[[Delta], None]:
        """On the core's thread."""

        def take(delta: Delta) -> None:
            self.first.setdefault(question, time.monotonic() - self.started)
            self.answers[question] += delta.output_ids.tolist()
            if delta.finish_reason is not None:
                self._open -= 1
                self.seconds = time.monotonic() - self.started
                if not self._open:
                    self._done.set()

        return take

    def wait(self) -> None:
        self._done.wait()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.answers.values()))

    @property
    def median_first_ms(self) -> float:
        return float(np.median(list(self.first.values()))) * 1e3


def _ask(model: ServedModel, prompts: list[Any]) -> _Run:
    run = _Run(len(prompts))
    for question, prompt in enumerate(prompts):
        model.core.add_request(
            Request(
                request_id=f"{id(run)} {question}",
                input_ids=prompt,
                max_tokens=ANSWER_TOKENS,
                sampling=SamplingParams(),
                end_ids=model.end_ids,
                on_delta=run.receiver(question),
                use_prefix_cache=False,
            )
        )
    run.wait()
    return run
