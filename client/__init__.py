"""Speaks to a deployment over gRPC or HTTP. Needs numpy and tritonclient, nothing of the server.

from client import GenerateRequest, GrpcClient

with GrpcClient("localhost:8001") as client:
    for chunk in client.stream(GenerateRequest(text_input="Once", max_tokens=32)):
        print(chunk.text_output, end="", flush=True)
"""

from client.chat import Chat, ChatAnswer
from client.grpc import GrpcClient
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
