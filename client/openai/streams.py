"""Several answers as one stream, and the end of all of them when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from client.openai.errors import RETRY_SECONDS, ApiError

Item = TypeVar("Item")

DONE = "data: [DONE]\n\n"
# Python's str.splitlines, with which some clients read events, ends a line at these too.
_LINE_ENDS = str.maketrans({c: f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"})


class ClientLeftError(Exception):
    """Nobody waits for the answer any more."""


def stopping() -> ApiError:
    """What a request is told that the server library cancels, which it does at a stop only."""
    return ApiError(
        503,
        "expected a running proxy, got one that stops: send it to another",
        kind="unavailable_error",
        code="unavailable",
        retry_seconds=RETRY_SECONDS,
    )


async def merged(
    streams: Sequence[AsyncGenerator[Item, None]],
) -> AsyncGenerator[tuple[int, Item], None]:
    """Items as they come, each with the index of its stream. Closing it, or an error in one of
    the streams, closes all."""

    async def following(stream: AsyncGenerator[Item, None]) -> Item | None:
        return await anext(stream, None)

    if len(streams) == 1:  # no task an item: a fifth of the time of each
        async with aclosing(streams[0]) as items:
            async for only in items:
                yield 0, only
        return
    waiting = {asyncio.ensure_future(following(s)): i for i, s in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index, item = waiting.pop(task), task.result()
                if item is not None:
                    yield index, item
                    waiting[asyncio.ensure_future(following(streams[index]))] = index
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def unless_left(request: Request, work: Awaitable[Item]) -> Item:
    """The result of `work`, which is cancelled when the client leaves: ClientLeftError then. At the
    end of a stop's patience ApiError 503.

    The request's body must have been read."""

    async def leaving() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(leaving())
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeftError
        return task.result()
    except asyncio.CancelledError:
        raise stopping() from None
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


class EventStream(StreamingResponse):
    """Server-sent events. `source` is what `events` reads from: it is closed whether the events
    came to their end, the client left in the middle, or not even the first one was sent."""

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        source: AsyncGenerator[Any, None],
        headers: dict[str, str],
    ) -> None:
        # Proxies in between shall pass each event on at once.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._events = events
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source), aclosing(self._events):
            try:
                await super().__call__(scope, receive, send)
            except asyncio.CancelledError:
                last = event(stopping().body).encode()
                await send({"type": "http.response.body", "body": last, "more_body": False})


def event(value: dict[str, Any]) -> str:
    """One event; `value` as JSON on one line, whatever the reader takes for a line's end."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text.translate(_LINE_ENDS)}\n\n"
