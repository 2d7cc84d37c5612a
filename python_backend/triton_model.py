"""The model that the Triton server's Python backend loads: requests in, responses out.

Only this module speaks the server's Python module. Threads: the server calls `execute` on its own;
long texts are read on one; the core runs steps on one; the responder sends and watches on one;
metrics have one.

Parameters of config.pbtxt: `engine_dir`, every setting of `ServeSettings`, and from dsv41-serve
`drain_file`, `drained_file` and `drain_seconds`: when the first file appears, new requests are
refused and what still runs after these seconds is ended; the second one appears when every request
has had its last response. So the server can stop.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from python_backend import logs, wire
from python_backend.intake import Intake, unexpected
from python_backend.logs import fields
from python_backend.long_texts import LongTexts, are_long, copied
from python_backend.metrics.catalogue import Snapshot, catalogue
from python_backend.metrics.publisher import Publisher
from python_backend.request import STOPPED, RequestError
from python_backend.responses import Responder
from python_backend.sequence import Outputs
from python_backend.service import ServedModel
from python_backend.tensors import INPUTS, OUTPUTS, Tensor

logger = logging.getLogger(__name__)

DEFAULT_DRAIN_SECONDS = 10.0
MAX_ID_LENGTH = 256  # of a client's request id in the log
MAX_BATCH_SIZE = 64  # above one only so that a batched call gets a sentence of ours
# Names, because the stub fills its Python module only after this file is imported.
_ERROR_CODES = {
    wire.INVALID_ARGUMENT: "INVALID_ARG",
    wire.OVER_CAPACITY: "UNAVAILABLE",
    wire.UNAVAILABLE: "UNAVAILABLE",
    wire.DEADLINE_EXCEEDED: "UNAVAILABLE",
    wire.CANCELLED: "CANCELLED",
    wire.INTERNAL: "INTERNAL",
}
_LATER = {wire.CANCELLED}  # than at the door, where nobody is rejected so


class TritonPythonModel:
    """The server makes one instance and calls `initialize`, `execute` … and `finalize`."""

    _drain_until: float | None  # from then on new requests are refused

    @staticmethod
    def auto_complete_config(config: Any) -> Any:
        """What a config.pbtxt may leave out: inputs, outputs and that responses are decoupled."""
        for tensor in INPUTS:
            config.add_input(_described(tensor) | {"optional": True})
        for tensor in OUTPUTS:
            config.add_output(_described(tensor))
        config.set_max_batch_size(MAX_BATCH_SIZE)
        config.set_model_transaction_policy({"decoupled": True})
        return config

    def initialize(self, args: dict[str, str]) -> None:
        """Load, and make one token: the server says ready only after this returns."""
        logs.configure()
        parameters = {
            name: value["string_value"]
            for name, value in json.loads(args["model_config"])["parameters"].items()
        }
        try:
            self._open(parameters)
        except ValueError as error:  # every refusal of ours is one, with a sentence
            raise pb_utils.TritonModelException(str(error)) from None

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            reply = _TritonReply(request.get_response_sender())
            request_id = request.request_id()[:MAX_ID_LENGTH]
            with self._refusing(request_id, reply):
                self._take(request, request_id, reply)

    def finalize(self) -> None:
        """End what runs; every client gets its final response."""
        self._model.stop()
        self._drain_until = self._drain_until or time.monotonic()
        self._long_texts.close()
        self._responder.close()
        self._model.grammars.close()
        self._publisher.stop()
        logger.info("stopped")

    def _open(self, parameters: dict[str, str]) -> None:
        for name, value in parameters.items():
            if "${" in value:
                raise ValueError(f"expected parameter {name} to be filled in, got {value!r}")
        engine_dir = parameters.pop("engine_dir", "")
        if not engine_dir:
            raise ValueError(
                "expected parameters.engine_dir in config.pbtxt, got none; set it to an engine "
                "directory made by dsv41-build engine"
            )
        drain_file = parameters.pop("drain_file", None)
        self._drain_file = None if drain_file is None else Path(drain_file)
        self._drained_file = Path(parameters.pop("drained_file", ""))
        self._drain_seconds = float(parameters.pop("drain_seconds", DEFAULT_DRAIN_SECONDS))
        self._drain_until = None
        self._model = ServedModel.open(Path(engine_dir), parameters, _log_progress)
        self._counting = threading.Lock()
        self._num_rejected = Counter(dict.fromkeys(_ERROR_CODES.keys() - _LATER, 0))
        self._publisher = Publisher(
            pb_utils.MetricFamily,
            catalogue(speculative=self._model.limits.draft is not None),
            self._snapshot,
        )
        self._responder = Responder(self._model.core.cancel, self._tick)
        self._intake = Intake(self._model, self._responder, self._count)
        self._long_texts = LongTexts()
        self._model.start()
        try:
            self._model.warm_up()
        except RequestError:
            self._model.stop()
            raise
        self._responder.start()
        self._publisher.start()
        logger.info("model_ready", extra=fields(engine_dir=engine_dir))

    def _take(self, request: Any, request_id: str, reply: _TritonReply) -> None:
        """Hand one request to the core. Its buffers are copied before this returns."""
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if wire.read_control(inputs) is not None:
            self._check_open()
            self._intake.reset_prefix_cache(request_id, reply)
            return
        parameters = json.loads(request.parameters() or "{}")
        if request.timeout() and "timeout" not in inputs:  # the protocol's own, microseconds too
            parameters.setdefault("timeout", request.timeout())
        if are_long(inputs):
            inputs = copied(inputs)
            self._long_texts.submit(lambda: self._take_long(inputs, parameters, request_id, reply))
        else:
            self._read(inputs, parameters, request_id, reply)

    def _take_long(self, *request: Any) -> None:
        """On the thread of long texts."""
        *_, request_id, reply = request
        with self._refusing(request_id, reply):
            self._read(*request)

    def _read(
        self,
        inputs: dict[str, Any],
        parameters: dict[str, Any],
        request_id: str,
        reply: _TritonReply,
    ) -> None:
        self._check_open()
        asked = wire.read_request(inputs, parameters, self._model.defaults)
        self._intake.take(asked, request_id, reply, reply.arrived_at)

    def _check_open(self) -> None:
        if self._drain_until is not None:
            raise RequestError("shutting_down", "expected a running server, got one that stops")

    @contextlib.contextmanager
    def _refusing(self, request_id: str, reply: _TritonReply) -> Iterator[None]:
        """An error of what is inside is the request's one response."""
        try:
            yield
        except RequestError as error:
            logger.info("request_refused", extra=fields(request_id=request_id, error=str(error)))
            self._reject(reply, error)
        except Exception as error:
            logger.exception("execute_failed", extra=fields(request_id=request_id))
            self._reject(reply, unexpected(error))

    def _reject(self, reply: _TritonReply, error: RequestError) -> None:
        self._count(error)
        reply.fail(error)

    def _count(self, error: RequestError) -> None:
        with self._counting:
            self._num_rejected[wire.to_wire(error).code] += 1

    def _snapshot(self) -> Snapshot:
        config = self._model.config
        return Snapshot(
            self._model.core.statistics(),
            dict(self._num_rejected),
            len(config.engram_layer_ids) * config.engram_columns,
        )

    def _tick(self) -> None:
        if self._drain_file is None:
            return
        if self._drain_until is None:
            if self._drain_file.exists():
                self._drain_until = time.monotonic() + self._drain_seconds
                logger.info("draining", extra=fields(seconds=self._drain_seconds))
        elif not self._responder.num_open and not self._long_texts.num_waiting:
            logger.info("drained")
            self._drained_file.touch()
            self._drain_file = None
        elif time.monotonic() >= self._drain_until:
            self._model.core.stop()
            self._responder.end_all(RequestError(*STOPPED))  # a step may run for long


class _TritonReply:
    """One request's response sender. Exactly one call is final."""

    def __init__(self, sender: Any) -> None:
        self.arrived_at = time.monotonic()
        self._sender = sender

    def send(self, outputs: Outputs, *, final: bool) -> None:
        tensors = [pb_utils.Tensor(name, array) for name, array in outputs.items()]
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
        self._sender.send(pb_utils.InferenceResponse(tensors), flags=flags)

    def fail(self, error: RequestError) -> None:
        error = wire.to_wire(error)
        code = getattr(pb_utils.TritonError, _ERROR_CODES[error.code])
        self._sender.send(
            pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), code)),
            flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )

    def is_cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())


def _described(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": f"TYPE_{tensor.kind}", "dims": [tensor.size]}


def _log_progress(stage: str, share: float) -> None:
    logger.info("load_progress", extra=fields(stage=stage, share=round(share, 3)))
