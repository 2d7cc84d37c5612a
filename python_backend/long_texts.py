"""A thread of its own for requests with much text: reading a megabyte of it takes a second, in
which the server's thread would take in nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from python_backend.request import RequestError

LONG_TEXT_BYTES = 64 * 1024  # some ten milliseconds of reading
MOST_WAITING = 64
_TEXTS = ("text_input", "messages", "tools")


class LongTexts:
    """Takes requests in, one after the other. `num_waiting` of them are not taken in yet."""

    def __init__(self) -> None:
        self.num_waiting = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="long texts")

    def submit(self, take: Callable[[], None]) -> None:
        """`take` raises nothing. Raises RequestError when too many wait."""
        with self._lock:
            if self.num_waiting >= MOST_WAITING:
                raise RequestError(
                    "queue_full",
                    f"expected fewer than {MOST_WAITING} requests of more than {LONG_TEXT_BYTES} "
                    "bytes of text that wait to be read, got more; try again later",
                )
            self.num_waiting += 1
        self._pool.submit(self._take, take)

    def close(self) -> None:
        """Return when all that waited were taken in, or refused."""
        self._pool.shutdown()

    def _take(self, take: Callable[[], None]) -> None:
        try:
            take()
        finally:
            with self._lock:
                self.num_waiting -= 1


def are_long(inputs: Mapping[str, npt.NDArray[Any]]) -> bool:
    """Whether the texts among a request's tensors take long to read."""
    texts = (inputs[name].ravel().tolist() for name in _TEXTS if name in inputs)
    return sum(len(text) for some in texts for text in some if isinstance(text, bytes)) > (
        LONG_TEXT_BYTES
    )


def copied(inputs: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """The tensors in memory of their own: the server's is free after its call."""
    return {name: np.array(array) for name, array in inputs.items()}
