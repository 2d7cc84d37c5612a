"""The deployment over gRPC: one streaming call per request.

A decoupled model answers no unary call, so an unstreamed generation is a stream of one response.
Each request has a call of its own: calls of one client run side by side, and cancelling the call
cancels exactly that request on the server.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from client.health import probe
from client.protocol import (
    DEADLINE_EXCEEDED,
    DEFAULT_MODEL,
    UNAVAILABLE,
    DeploymentError,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    Health,
)
from client.stream import GenerateStream
from client.tensors import chunk_from_outputs, input_tensors

# A prompt of the longest kind, or its log probabilities, are more than the library's 4 MB.
CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # A server that was restarted is found within about a second, not after up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class GrpcClient:
    """Generates over gRPC. May be used from many threads at once.

    url: host:port of the server's gRPC endpoint. model: the model's name on the server.
    """

    def __init__(self, url: str = "localhost:8001", model: str = DEFAULT_MODEL) -> None:
        self.url = url
        self.model = model
        self._channel = grpc.insecure_channel(url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def generate(self, request: GenerateRequest, *, timeout: float | None = None) -> GenerateResult:
        """The whole answer in one response. `timeout` in seconds, for everything.

        Raises DeploymentError; ValueError for a value that its tensor cannot hold. When it times
        out or is interrupted, the request is cancelled on the server.
        """
        with self._open(request, stream=False, timeout=timeout) as answer:
            return answer.result()

    def stream(self, request: GenerateRequest, *, timeout: float | None = None) -> GenerateStream:
        """The answer as it is generated. Errors as for `generate`, raised while iterating."""
        return self._open(request, stream=True, timeout=timeout)

    def health(self, *, deep: bool = False, timeout: float = 10.0) -> Health:
        """Asks for the three states; `deep` also generates one token. Raises nothing."""

        def ask(what: str) -> bool:
            try:
                if what == "live":
                    request = service_pb2.ServerLiveRequest()
                    return bool(self._stub.ServerLive(request, timeout=timeout).live)
                if what == "ready":
                    request = service_pb2.ServerReadyRequest()
                    return bool(self._stub.ServerReady(request, timeout=timeout).ready)
                request = service_pb2.ModelReadyRequest(name=self.model)
                return bool(self._stub.ModelReady(request, timeout=timeout).ready)
            except grpc.RpcError as error:
                raise call_error(error, self.url) from None

        return probe(ask, self.generate if deep else None, self.model, timeout)

    def taken_requests(self) -> int:
        """How many requests the model has taken since it was loaded, by the server's count."""
        request = service_pb2.ModelStatisticsRequest(name=self.model)
        try:
            statistics = self._stub.ModelStatistics(request, timeout=10.0).model_stats
        except grpc.RpcError as error:
            raise call_error(error, self.url) from None
        return sum(int(s.inference_stats.success.count) for s in statistics)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open(
        self, request: GenerateRequest, *, stream: bool, timeout: float | None
    ) -> GenerateStream:
        message = infer_message(self.model, request, stream=stream)
        call = self._stub.ModelStreamInfer(iter((message,)), timeout=timeout)
        return GenerateStream(self._chunks(call), call.cancel, request.num_return_sequences or 1)

    def _chunks(self, call: Any) -> Iterator[GenerateChunk]:
        # Reads past the final response, and past an error, to the end of the call: dropping a call
        # whose request has just finished keeps this server from unloading the model ever after.
        failure: DeploymentError | None = None
        try:
            for response in call:
                if response.error_message:
                    failure = failure or DeploymentError.from_server(response.error_message)
                elif response.infer_response.outputs:
                    yield response_chunk(response.infer_response)
        except grpc.RpcError as error:
            raise failure or call_error(error, self.url) from None
        if failure:
            raise failure


def infer_message(model: str, request: GenerateRequest, *, stream: bool) -> Any:
    """The request as the server's protobuf message. Errors as `input_tensors`."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request.request_id)
    # Without this the server marks no end when the model closes with an empty response.
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for spec, array in input_tensors(request, stream=stream):
        message.inputs.add(name=spec.name, datatype=spec.datatype, shape=array.shape)
        data = serialize_byte_tensor(array) if spec.datatype == "BYTES" else array
        message.raw_input_contents.append(
            data.item() if spec.datatype == "BYTES" else data.tobytes()
        )
    return message


def call_error(error: Any, url: str) -> DeploymentError:
    """What a failed call to the server at `url` means."""
    code, details = error.code(), error.details() or ""
    if code == grpc.StatusCode.UNAVAILABLE:
        return DeploymentError(
            UNAVAILABLE,
            f"expected a server at {url} (gRPC), got no connection: check the address "
            f"and that the server runs ({details})",
        )
    if code == grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeploymentError(DEADLINE_EXCEEDED, "the time limit passed before the answer")
    return DeploymentError.from_server(details, code.name.lower())


def response_chunk(answer: Any) -> GenerateChunk:
    """One ModelInferResponse that has outputs. Errors as `chunk_from_outputs`."""
    outputs: dict[str, Any] = {}
    for tensor, raw in zip(answer.outputs, answer.raw_output_contents, strict=True):
        if tensor.datatype == "BYTES":
            outputs[tensor.name] = deserialize_bytes_tensor(raw).tolist()
        elif tensor.datatype == "INT32":
            outputs[tensor.name] = np.frombuffer(raw, dtype="<i4")
        elif tensor.datatype == "FP32":
            outputs[tensor.name] = np.frombuffer(raw, dtype="<f4")
    return chunk_from_outputs(outputs)
