"""Log lines as one JSON object each, on stderr: time, level, event and the event's own fields.

    logger.info("request_finished", extra=fields(request_id="r1", num_output_tokens=5))

Prompts and outputs are never logged.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

_FIELDS = "json_fields"


def fields(**values: Any) -> Mapping[str, Any]:
    """The `extra` of a log call."""
    return {_FIELDS: values}


def configure(level: int = logging.INFO) -> None:
    """Send every logger of this process to stderr as JSON lines. Safe to call again."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC)
        line = {
            "time": moment.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, _FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
