"""The deployment over gRPC, for an event loop: as `client.grpc`, one streaming call per request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from client.grpc import CHANNEL_OPTIONS, call_error, infer_message, response_chunk
from client.protocol import (
    INVALID_ARGUMENT,
    PROTOCOL_ERROR,
    DeploymentError,
    GenerateChunk,
    GenerateRequest,
)
from client.stream import NO_REASON

_PROBE_SECONDS = 3.0
_LIMITS = ("max_batch_size", "max_queued_requests")


class Deployment:
    """Made and used inside one event loop.

    url: host:port of the server's gRPC endpoint. timeout: seconds for a whole request, None is no
    limit.
    """

    def __init__(self, url: str, model: str, timeout: float | None) -> None:
        self.url = url
        self.model = model
        self._timeout = timeout
        self._channel = grpc.aio.insecure_channel(url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._ending: set[asyncio.Task[None]] = set()

    async def chunks(
        self, request: GenerateRequest, *, stream: bool
    ) -> AsyncGenerator[GenerateChunk, None]:
        """The answer. Closing the generator before the last chunk cancels the request on the
        server. Raises DeploymentError, also for a value that its tensor cannot hold."""
        try:
            message = infer_message(self.model, request, stream=stream)
        except ValueError as error:
            raise DeploymentError(INVALID_ARGUMENT, str(error)) from None
        call = self._stub.ModelStreamInfer(iter((message,)), timeout=self._timeout)
        ended = False
        unfinished = request.num_return_sequences or 1
        try:
            async for response in call:
                answer = response.infer_response
                ended = bool(response.error_message) or (
                    answer.parameters["triton_final_response"].bool_param
                )
                if ended:
                    self._read_to_end(call)
                if response.error_message:
                    raise DeploymentError.from_server(response.error_message)
                if answer.outputs:
                    chunk = response_chunk(answer)
                    unfinished -= chunk.finish_reason is not None
                    yield chunk
                if ended:
                    break
            if unfinished:
                raise DeploymentError(PROTOCOL_ERROR, NO_REASON)
        except grpc.RpcError as error:
            raise call_error(error, self.url) from None
        finally:
            if not ended:
                call.cancel()

    async def trouble(self) -> str | None:
        """Why requests are not taken now; None when they are."""
        try:
            ready = await self._stub.ServerReady(
                service_pb2.ServerReadyRequest(), timeout=_PROBE_SECONDS
            )
            model = await self._stub.ModelReady(
                service_pb2.ModelReadyRequest(name=self.model), timeout=_PROBE_SECONDS
            )
        except grpc.RpcError as error:
            return call_error(error, self.url).message
        if not ready.ready:
            return "the server is not ready for requests"
        return None if model.ready else f"the model {self.model} is not ready"

    async def most_sequences(self) -> int | None:
        """That run and wait there at once; None where its configuration does not say. Raises
        DeploymentError."""
        try:
            answer = await self._stub.ModelConfig(
                service_pb2.ModelConfigRequest(name=self.model), timeout=_PROBE_SECONDS
            )
        except grpc.RpcError as error:
            raise call_error(error, self.url) from None
        given = answer.config.parameters
        if any(name not in given for name in _LIMITS):
            return None
        return sum(int(given[name].string_value) for name in _LIMITS)

    async def close(self) -> None:
        await asyncio.gather(*self._ending)
        await self._channel.close()

    def _read_to_end(self, call: Any) -> None:
        """Beside whoever has the answer now: dropping a call whose request has just finished keeps
        this server from unloading the model ever after."""

        async def read() -> None:
            with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
                async for _ in call:
                    pass

        task = asyncio.create_task(read())
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
