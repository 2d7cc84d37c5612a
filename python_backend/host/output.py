"""What the server and the model write: JSON lines from the model, the server's own lines.

All of it becomes JSON lines in one log; load progress is also shown to people. The last errors are
kept, because they say why a server ended.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import IO, Any

_LEVELS = {"I": "info", "W": "warning", "E": "error", "F": "error"}
# I1129 20:06:30.901574 22229 http_server.cc:362] "Started Metrics Service at 127.0.0.1:18002"
_SERVER_LINE = re.compile(r"([IWEF])\d{4} [\d:.]+ \d+ ([\w.]+:\d+)\] +(.*)")
# What a model's own refusal looks like inside the server's message.
_REFUSAL = re.compile(r"TritonModelException: (.*?)(?:\\n\\nAt:|\"?$)")
# Said on every machine without a GPU; nothing is wrong.
_HARMLESS = ("CudaDriverHelper has not been initialized", "unable to create stream")
_KEPT_ERRORS = 5


class ServerOutput:
    """Reads `pipe` on a thread until it ends. `on_event` gets each of the model's events."""

    def __init__(self, pipe: IO[str], log: IO[str], on_event: Callable[[dict[str, Any]], None]):
        self._pipe = pipe
        self._log = log
        self._on_event = on_event
        self._errors: deque[str] = deque(maxlen=_KEPT_ERRORS)
        self._thread = threading.Thread(target=self._read, name="server output", daemon=True)
        self._thread.start()

    def last_error(self) -> str:
        """The model's own refusal, or else the last error. Once the process ended."""
        self._thread.join(1)  # a model process that outlives the server keeps the pipe open
        refusals = [match[1] for match in map(_REFUSAL.search, self._errors) if match]
        return (refusals or list(self._errors) or ["it left no message"])[-1]

    def _read(self) -> None:
        for line in self._pipe:
            line = line.rstrip("\n")
            if not line or line[0] in "+|":  # the server's tables of options
                continue
            event = _model_event(line)
            if event is None:
                event = self._server_event(line)
            else:
                self._on_event(event)
            if event is not None:
                # A full disk costs log lines; not reading on would stop the server.
                with contextlib.suppress(OSError):
                    self._log.write(json.dumps(event, ensure_ascii=False) + "\n")
                    self._log.flush()

    def _server_event(self, line: str) -> dict[str, Any] | None:
        match = _SERVER_LINE.match(line)
        level = _LEVELS[match[1]] if match else "info"
        message = (match[3] if match else line).strip('"')
        if not message or any(text in message for text in _HARMLESS):
            return None
        if level == "error" or message.startswith("error: "):
            self._errors.append(message)
        moment = datetime.now(UTC).isoformat(timespec="milliseconds")
        return {"time": moment, "level": level, "event": "triton_server", "message": message}


def _model_event(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None
