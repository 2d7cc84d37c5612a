"""Events of the prefix cache on a ZeroMQ socket, in vLLM's format, for routers that send a request
where its prefix is.

A PUB socket sends messages of three frames: an empty topic, a number (8 bytes, big endian, from 0
on) and a batch in MessagePack, [time, [event …], rank 0]. The events:

    ["BlockStored", [key …], parent key or nil, [token id …], tokens of a block, nil, "GPU"]
    ["BlockRemoved", [key …], "GPU"]
    ["AllBlocksCleared"]

A key is the low 64 bits of a block's hash, which is chained and seeded at random in each process. A
subscriber that comes late, or sees a number missing, does not know what is there.
(vLLM: `vllm.distributed.kv_events`, its subscriber example.)
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

logger = logging.getLogger(__name__)

# What one subscriber may lag behind; then it loses messages.
MAX_UNSENT = 100_000
_MEDIUM = "GPU"  # vLLM's word for the cache that steps read

_Stored = tuple[Sequence[bytes], bytes | None, npt.NDArray[np.int32]]
_Event = _Stored | Sequence[bytes]


class KvEventPublisher:
    """A `CacheListener` with a thread that encodes and sends, so that the core does neither.

    Raises OSError for an endpoint that cannot be bound.
    """

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUB)
        self._socket.set(zmq.SNDHWM, MAX_UNSENT)
        self._socket.set(zmq.LINGER, 0)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy()
            raise OSError(error.errno, str(error)) from None
        # An empty sequence of keys is a clearing; None ends the thread.
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def stored(
        self, keys: Sequence[bytes], parent: bytes | None, blocks: npt.NDArray[np.int32]
    ) -> None:
        self._events.put((keys, parent, blocks))

    def removed(self, keys: Sequence[bytes]) -> None:
        if keys:
            self._events.put(list(keys))

    def cleared(self) -> None:
        self._events.put([])

    def close(self) -> None:
        """Send what is left, and stop."""
        self._events.put(None)
        self._thread.join()
        self._context.destroy()

    def _run(self) -> None:
        number = 0
        while (event := self._events.get()) is not None:
            batch = msgspec.msgpack.encode((time.time(), [_encodable(event)], 0))
            try:
                self._socket.send_multipart((b"", number.to_bytes(8, "big"), batch))
            except zmq.ZMQError:  # the number goes on, so that subscribers see the gap
                logger.exception("kv_event_not_sent")
            number += 1


def _encodable(event: _Event) -> tuple[object, ...]:
    if isinstance(event, tuple):
        keys, parent, blocks = event
        last = None if parent is None else _short(parent)
        return (
            "BlockStored",
            [_short(key) for key in keys],
            last,
            blocks.ravel().tolist(),
            blocks.shape[1],
            None,
            _MEDIUM,
        )
    if not event:
        return ("AllBlocksCleared",)
    return ("BlockRemoved", [_short(key) for key in event], _MEDIUM)


def _short(key: bytes) -> int:
    return int.from_bytes(key[-8:], "big")
