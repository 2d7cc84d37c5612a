"""Speaks to a deployment over gRPC or HTTP. Needs numpy and tritonclient, nothing of the server.

from client import GenerateRequest, GrpcClient

with GrpcClient("localhost:8001") as client:
    for chunk in client.stream(GenerateRequest(text_input="Once", max_tokens=32)):
        print(chunk.text_output, end="", flush=True)
"""

from typing import TYPE_CHECKING, Any

from client.chat import Chat, ChatAnswer
from client.http import HttpClient
from client.protocol import (
    DeploymentError,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    Health,
)
from client.stream import GenerateStream

if TYPE_CHECKING:
    from client.grpc import GrpcClient

__all__ = [
    "Chat",
    "ChatAnswer",
    "DeploymentError",
    "FinishReason",
    "GenerateChunk",
    "GenerateRequest",
    "GenerateResult",
    "GenerateStream",
    "GrpcClient",
    "Health",
    "HttpClient",
]


def __getattr__(name: str) -> Any:
    """HTTP needs no tritonclient, so what speaks gRPC is imported when it is first named."""
    if name == "GrpcClient":
        from client.grpc import GrpcClient

        return GrpcClient
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
