"""Errors in the API's form: {"error": {"message", "type", "param", "code"}} with a status."""

from __future__ import annotations

import math
from typing import Any

from client.protocol import (
    DEADLINE_EXCEEDED,
    INVALID_ARGUMENT,
    PROTOCOL_ERROR,
    SERVER_ERROR,
    UNAVAILABLE,
    DeploymentError,
)

RETRY_SECONDS = 1.0

_INVALID = "invalid_request_error"
# Status and type by the code of the deployment. What is not here is the deployment's own failure.
_BY_CODE = {
    INVALID_ARGUMENT: (400, _INVALID),
    "over_capacity": (400, _INVALID),
    "not_found": (404, _INVALID),
    UNAVAILABLE: (503, "unavailable_error"),
    DEADLINE_EXCEEDED: (504, "timeout_error"),
    PROTOCOL_ERROR: (502, "server_error"),
    SERVER_ERROR: (502, "server_error"),
}
# A Triton server that stops, or still loads, has no code of ours for it.
_NOT_SERVING = "no available versions"


class ApiError(Exception):
    """status: of HTTP. kind: what the API calls `type`. retry_seconds: goes into Retry-After."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = _INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_seconds: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_seconds = retry_seconds

    @staticmethod
    def of(error: DeploymentError) -> ApiError:
        code = UNAVAILABLE if _NOT_SERVING in error.message else error.code
        status, kind = _BY_CODE.get(code, (500, "server_error"))
        retry = RETRY_SECONDS if status == 503 else None
        return ApiError(status, error.message, kind=kind, code=code, retry_seconds=retry)

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        if self.retry_seconds is None:
            return {}
        return {"Retry-After": str(max(1, math.ceil(self.retry_seconds)))}


def refused(param: str, reason: str) -> ApiError:
    """Of a field that is right by itself, for a reason that says what to do."""
    return ApiError(400, f"expected no such {param}: {reason}", param=param, code=INVALID_ARGUMENT)
