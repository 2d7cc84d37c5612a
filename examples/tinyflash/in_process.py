"""An engine served inside this process, on a CPU or a GPU: the serving core without a server.

On a GPU the engine's limits decide the speed: build it for as many requests and rows a step as fit
(`dsv41-build engine --max_batch_size 1536 --max_num_tokens 49152 --max_seq_len 9216`).
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.manifest import Manifest
from engine.network import Network
from engine.network.device import moved
from examples.tinyflash import device as device_operators
from examples.tinyflash.evaluation import Answer
from python_backend.core import EngineCore
from python_backend.executor.pools import pools_of
from python_backend.executor.torch_executor import TorchExecutor
from python_backend.grammar.grammars import Grammars
from python_backend.request import Delta, FinishReason, Request, SamplingParams
from python_backend.scheduler.statistics import Statistics
from python_backend.service import ServedModel, check
from python_backend.text.chat_input import ChatRequest
from python_backend.text.detokenizer import Detokenizer

Int32Array = npt.NDArray[np.int32]

# A window page's rows on a GPU: the page tables go there with every step, so few large pages.
_DEVICE_PAGE_ROWS = 64
# All questions are asked at once.
_QUEUED_REQUESTS = 1 << 20


class InProcess:
    """Answers prompts greedily, many at once. Leave with `close`."""

    def __init__(self, engine_dir: Path, options: Mapping[str, Any], device: str = "cpu") -> None:
        """`options` are serve settings. Raises ValueError with one sentence for an engine or
        settings that cannot be served, for an engine without a tokenizer, and for a GPU that is
        not there."""
        options = {"max_queued_requests": _QUEUED_REQUESTS, **options}
        if device != "cpu":
            device_operators.install()
            options = {"window_page_tokens": _DEVICE_PAGE_ROWS, **options}
        checked = check(engine_dir, options)
        if checked.text is None:
            raise ValueError(
                f"expected an engine with a tokenizer, got none in {engine_dir}; build it from a "
                "checkpoint that has tokenizer.json"
            )
        dtype = getattr(torch, checked.settings.dtype)
        config, limits = checked.engine.config, checked.limits()
        pools = pools_of(config, limits, dtype, device, quantize=checked.settings.cache_quant)
        network = Network(config, moved(checked.engine.load_weights(dtype), device))
        core = EngineCore(TorchExecutor(network, pools, device=device), limits)
        self.max_batch_size = limits.max_batch_size
        self._text = checked.text
        self._model = ServedModel(
            config, limits, core, checked.text, checked.end_ids, Grammars(config, checked.text)
        )
        self._model.start()
        self._num_asked = 0

    def close(self) -> None:
        self._model.stop()

    def statistics(self) -> Statistics:
        """The core's counters."""
        return self._model.core.statistics()

    def encode(self, prompt: str, *, thinking: bool = False) -> Int32Array:
        """The ids of a conversation that begins with `prompt` as the user's message."""
        chat = ChatRequest([{"role": "user", "content": prompt}], thinking=thinking)
        return self._text.encode_rendered(chat.render())

    def start(self, input_ids: Int32Array, *, max_tokens: int) -> Pending:
        """Begin to answer. Raises RequestError for a prompt that does not fit."""
        pending = Pending(len(input_ids), self._text.detokenizer())
        self._num_asked += 1
        self._model.core.add_request(
            Request(
                request_id=str(self._num_asked),
                input_ids=input_ids,
                max_tokens=max_tokens,
                sampling=SamplingParams(),
                end_ids=self._model.end_ids,
                on_delta=pending.take,
            )
        )
        return pending

    def answers(self, prompts: Sequence[Int32Array], *, max_tokens: int) -> Iterator[Answer]:
        """All prompts at once; their answers in the order of the prompts, each when it is there.

        Asked again, up to `max_batch_size` prompts of any length are found in the prefix cache.
        """
        running = [self.start(prompt, max_tokens=max_tokens) for prompt in prompts]
        return (pending.answer() for pending in running)


class Pending:
    """A question that is being answered."""

    def __init__(self, num_input_tokens: int, detokenizer: Detokenizer) -> None:
        self._num_input_tokens = num_input_tokens
        self._detokenizer = detokenizer
        self._text: list[str] = []
        self._num_output_tokens = 0
        self._ended = threading.Event()
        self._last: Delta | None = None

    def take(self, delta: Delta) -> None:
        """On the core's thread."""
        spoken = delta.output_ids
        self._num_output_tokens += len(spoken)
        if delta.finish_reason is FinishReason.STOP:
            spoken = spoken[:-1]
        self._text.append(self._detokenizer.feed(spoken, last=delta.finish_reason is not None))
        if delta.finish_reason is not None:
            self._last = delta
            self._ended.set()

    def answer(self) -> Answer:
        """Waits for the end. Raises RequestError when the request failed."""
        self._ended.wait()
        assert self._last is not None
        if self._last.error is not None:
            raise self._last.error
        assert self._last.finish_reason is not None
        return Answer(
            text="".join(self._text),
            finish_reason=str(self._last.finish_reason),
            num_input_tokens=self._num_input_tokens,
            cached_tokens=self._last.cached_tokens,
            num_output_tokens=self._num_output_tokens,
        )


def origin(engine_dir: Path, device: str) -> dict[str, Any]:
    """What made the answers: the engine, by the hashes of its files, and what ran it.

    The same checkpoint built with the same options gives the same id on any machine.
    """
    hashes = sorted((name, sha256) for name, (_, sha256) in Manifest.read(engine_dir).files.items())
    where = {"device": device, "threads": torch.get_num_threads()}  # float32's last bits depend
    if device != "cpu":
        where = {"device": torch.cuda.get_device_name(device)}
    return {
        "engine": hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:16],
        "torch": str(torch.__version__),
    } | where
