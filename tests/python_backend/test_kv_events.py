"""Events of the prefix cache: who follows them knows exactly what a request would hit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Int32Array, Stream, finish, limits, tokens

from python_backend.core import EngineCore
from python_backend.executor.simulated import SimulatedExecutor
from python_backend.kv_events import KvEventPublisher

PAGE = 16


class Index:
    """What a router builds: the tokens up to the end of each block, by key."""

    def __init__(self) -> None:
        self.prefixes: dict[bytes, tuple[int, ...]] = {}

    def stored(self, keys: Sequence[bytes], parent: bytes | None, blocks: Int32Array) -> None:
        prefix = () if parent is None else self.prefixes[parent]
        for key, block in zip(keys, blocks.tolist(), strict=True):
            prefix = (*prefix, *block)
            assert key not in self.prefixes
            self.prefixes[key] = prefix

    def removed(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            del self.prefixes[key]

    def cleared(self) -> None:
        self.prefixes.clear()

    def hit(self, prompt: Int32Array) -> int:
        """The longest run of known prefixes from the first block on, but for the last token."""
        known, hit = set(self.prefixes.values()), 0
        while hit + PAGE < len(prompt) and tuple(prompt[: hit + PAGE].tolist()) in known:
            hit += PAGE
        return hit


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70), st.booleans()), max_size=12))
def test_events_tell_what_will_be_hit(steps: list[tuple[int, int, bool]]) -> None:
    """Nine pages, so that prefixes are evicted and displaced; sometimes all are forgotten. The
    window of 8 drops no hit, because a page has 16 tokens."""
    bounds, index = limits(num_global_pages=10), Index()
    core = EngineCore(SimulatedExecutor(bounds), bounds, listener=index)
    for number, (seed, length, resets) in enumerate(steps):
        if resets and number % 3 == 0:
            core.reset_prefix_cache(lambda: None)
            core.step()
            assert not index.prefixes
        stream = Stream(str(number), tokens(seed, length), 1 + number)
        expected = index.hit(stream.request.input_ids)
        core.add_request(stream.request)
        finish(core)
        assert stream.cached_tokens == expected
        assert len(index.prefixes) == core.statistics().num_published_pages


def test_the_format_on_the_socket(tmp_path: Path) -> None:
    """vLLM's: topic, number, MessagePack of [time, events, rank]. Read with plain MessagePack."""
    endpoint = f"ipc://{tmp_path}/events"
    publisher = KvEventPublisher(endpoint)
    context = zmq.Context()
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.setsockopt(zmq.RCVTIMEO, 100)
    subscriber.connect(endpoint)
    first = None
    while first is None:  # a subscriber misses what is sent before it is known
        publisher.cleared()
        try:
            first = subscriber.recv_multipart()
        except zmq.Again:
            continue
    subscriber.setsockopt(zmq.RCVTIMEO, 10_000)
    keys = [bytes(range(i, i + 16)) for i in range(3)]
    blocks = np.arange(8, dtype=np.int32).reshape(2, 4)
    publisher.stored(keys[:2], None, blocks)
    publisher.stored(keys[2:], keys[1], blocks[:1])
    publisher.removed(keys[1:])
    publisher.removed([])
    publisher.cleared()
    publisher.close()
    messages = [first]
    short = [int.from_bytes(key[8:], "big") for key in keys]
    expected: list[list[object]] = [
        ["BlockStored", short[:2], None, list(range(8)), 4, None, "GPU"],
        ["BlockStored", short[2:], short[1], [0, 1, 2, 3], 4, None, "GPU"],
        ["BlockRemoved", short[1:], "GPU"],
        ["AllBlocksCleared"],
    ]
    got: list[list[object]] = []
    while len(got) < 4:
        messages.append(subscriber.recv_multipart())
        sent, events, rank = msgspec.msgpack.decode(messages[-1][2])
        assert abs(sent - time.time()) < 60
        assert (len(events), rank) == (1, 0)
        if got or events != [["AllBlocksCleared"]]:
            got += events
    assert got == expected
    numbers = [int.from_bytes(message[1], "big") for message in messages]
    assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    assert {message[0] for message in messages} == {b""}
    context.destroy()


def test_an_endpoint_in_use_is_refused(tmp_path: Path) -> None:
    publisher = KvEventPublisher("tcp://127.0.0.1:*")
    bound = publisher._socket.getsockopt_string(zmq.LAST_ENDPOINT)
    with pytest.raises(OSError, match="Address already in use"):
        KvEventPublisher(bound)
    with pytest.raises(OSError, match="Invalid argument"):
        KvEventPublisher("no endpoint")
    publisher.close()
    KvEventPublisher(bound).close()  # at once, as the server does after a check
