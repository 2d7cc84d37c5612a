"""The server library's HTTP protocol, which waits for the head of a request for ever, with an end
to that: whoever opens many connections and sends nothing would take all that the process can have.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0


class ImpatientProtocol(H11Protocol):
    """Closes a connection that has no request, or half a head, for HEAD_SECONDS to twice as long.

    Idle connections behind an answer are the library's to close (`timeout_keep_alive`).
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._last: Any = self  # the request at the last look, None for none yet
        self._timer = self.loop.call_later(HEAD_SECONDS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def _look(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is self._last:
            self.transport.close()
            return
        self._last = self.cycle if is_idle else self
        self._timer = self.loop.call_later(HEAD_SECONDS, self._look)
