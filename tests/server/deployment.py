"""dsv41-serve as its users run it: a process with ports, two protocols, a log, and an end."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from safetensors.numpy import load_file
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from python_backend.tensors import INPUTS

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "vectors" / "tiny"
GOLDEN = load_file(TINY / "golden_quant.safetensors")
PROMPT: list[int] = GOLDEN["tokens"][:20].tolist()
MODEL = "deepseek_v41"
STUB = "triton_python_backend_stub"
START_SECONDS = 120.0
STOP_SECONDS = 45.0
DATATYPES = {t.name: "BYTES" if t.kind == "STRING" else t.kind for t in INPUTS}
DTYPES = {"BOOL": np.bool_, "UINT64": np.uint64, "FP32": np.float32, "INT32": np.int32}


class RefusedError(Exception):
    """What the server answered instead of a response."""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now: taken together, so that they differ."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def region_of(stub: psutil.Process) -> str:
    """The shared-memory region that a model process was started with."""
    (region,) = [word for word in stub.cmdline() if word.startswith("dsv41-")]
    return region


class Deployment:
    """One dsv41-serve process on free ports."""

    def __init__(
        self,
        engine: Path,
        *options: str,
        root: Path | None = None,
        environment: Mapping[str, str] | None = None,
        ports: Sequence[int] = (),
    ) -> None:
        """`root`: another project folder than this one, with an environment .venv in it. `ports`:
        for HTTP, gRPC and metrics."""
        python = str(root / ".venv" / "bin" / "python") if root else sys.executable
        self.http, self.grpc, self.metrics = ports = ports or free_ports(3)
        self.again = partial(
            Deployment, engine, *options, root=root, environment=environment, ports=ports
        )  # the same command once more, as a supervisor starts it
        listens = [f"--http-port={self.http}", f"--grpc_port={self.grpc}"]
        self.process = subprocess.Popen(
            [
                *(python, "-m", "python_backend.launcher"),
                *("--engine", str(engine), *listens, f"--metrics-port={self.metrics}", *options),
            ],
            cwd=root or ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.said: list[str] = []
        self.logged: list[dict[str, Any] | str] = []
        assert self.process.stdout
        assert self.process.stderr
        self._readers = [
            threading.Thread(target=self._read, args=(pipe, keep), daemon=True)
            for pipe, keep in (
                (self.process.stdout, self.said.append),
                (self.process.stderr, lambda line: self.logged.append(_parsed(line))),
            )
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def with_faults(
        engine: Path, root: Path, *options: str, fault_token: int, slow_token: int = -1
    ) -> Deployment:
        """This project, in `root`, with the model of benchmarks/load/faulty_model."""
        for name in ("plugins", "engine", "python_backend"):
            (root / name).symlink_to(ROOT / name)
        version = root / "model_repository" / MODEL / "1"
        version.mkdir(parents=True)
        faulty = ROOT / "benchmarks" / "load" / "faulty_model" / "model.py"
        (version / "model.py").symlink_to(faulty)
        config = ROOT / "model_repository" / MODEL / "config.pbtxt"
        (version.parent / "config.pbtxt").symlink_to(config)
        (root / ".venv").symlink_to(sys.prefix)
        orders = {"DSV41_FAULT_TOKEN": str(fault_token), "DSV41_SLOW_TOKEN": str(slow_token)}
        environment = orders | {"PYTHONPATH": str(root)}
        return Deployment(engine, *options, root=root, environment=environment)

    @staticmethod
    def _read(pipe: Any, keep: Any) -> None:
        for line in pipe:
            keep(line.rstrip("\n"))

    def wait_until_ready(self) -> Deployment:
        deadline = time.monotonic() + START_SECONDS
        while not any("ready after" in line for line in self.said):
            assert self.process.poll() is None, self.everything()
            assert time.monotonic() < deadline, self.everything()
            time.sleep(0.05)
        self.region = region_of(self.child(STUB))
        assert self.region in shared_memory()
        return self

    def wait(self) -> int:
        """The exit status, once everything that was written has been read."""
        status = self.process.wait(STOP_SECONDS)
        for reader in self._readers:
            reader.join(10)
        return status

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def end(self) -> None:
        """For a fixture: whatever state the process is in."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                for child in [*psutil.Process(self.process.pid).children(recursive=True)]:
                    child.kill()
                self.process.kill()
        self.wait()

    def everything(self) -> str:
        return "\n".join([*self.said, *map(str, self.logged[-30:])])

    def child(self, name: str) -> psutil.Process:
        """The one process below the launcher whose program has this name."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        (found,) = [child for child in children if Path(child.cmdline()[0]).name == name]
        return found

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.logged if isinstance(e, dict) and e["event"] == name]

    def families(self) -> dict[str, Metric]:
        """All metrics that the server shows, as Prometheus reads them, by name of the family."""
        body = get(self.metrics, "/metrics")[1].decode()
        return {family.name: family for family in text_string_to_metric_families(body)}

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples with these labels."""
        body = get(self.metrics, "/metrics")[1].decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(body)
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def is_empty(self) -> bool:
        held = ("num_requests_running", "num_requests_waiting", "kv_pages_used")
        return not any(self.metric(f"dsv41_{name}") for name in held)

    def wait_for_work(self) -> None:
        """Until the gauges, which are set ten times a second, show a request and its pages."""
        deadline = time.monotonic() + 10
        while not self.metric("dsv41_kv_pages_used", pool="window"):
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def seconds_until_empty(self, limit: float) -> float:
        """Until no page and no request is held; `limit` when that does not happen before."""
        started = time.monotonic()
        while not self.is_empty() and time.monotonic() - started < limit:
            time.sleep(0.02)
        return time.monotonic() - started

    def generate(self, **values: Any) -> dict[str, Any]:
        """HTTP generate: the one JSON object. Raises RefusedError with status and message."""
        status, body = post(self.http, f"/v2/models/{MODEL}/generate", values)
        answer: dict[str, Any] = json.loads(body)
        if "error" in answer:
            raise RefusedError(f"{status} {answer['error']}")
        return answer

    def sse(self, **values: Any) -> Iterator[dict[str, Any]]:
        """HTTP generate_stream: the JSON objects as they come."""
        with EventStream(self.http, values) as events:
            yield from events

    def stream(
        self,
        request_id: str = "",
        *,
        parameters: Mapping[str, int | str] | None = None,
        **values: Any,
    ) -> GrpcStream:
        return GrpcStream(self.grpc, request_id, values, parameters or {})


class EventStream:
    """One generate_stream connection; leaving the `with` block closes it."""

    def __init__(self, port: int, values: dict[str, Any]) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.request("POST", f"/v2/models/{MODEL}/generate_stream", json.dumps(values))
        self._response = self._connection.getresponse()
        self.status = self._response.status

    def __enter__(self) -> EventStream:
        return self

    def __exit__(self, *_: object) -> None:
        self._response.close()
        self._connection.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self._response:
            if line.strip():
                yield json.loads(line.removeprefix(b"data: "))


class GrpcStream:
    """One ModelStreamInfer call: outputs by name as they come, RefusedError for an error."""

    def __init__(
        self,
        port: int,
        request_id: str,
        values: dict[str, Any],
        parameters: Mapping[str, int | str],
    ) -> None:
        request = service_pb2.ModelInferRequest(model_name=MODEL, id=request_id)
        for name, value in parameters.items():
            if isinstance(value, int):
                request.parameters[name].int64_param = value
            else:
                request.parameters[name].string_param = value
        for name, value in values.items():
            add_tensor(request, name, value)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put(request)
        self._requests.put(None)
        self._call = stub.ModelStreamInfer(iter(self._requests.get, None), timeout=60)
        self.finals: list[bool] = []

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for answer in self._call:
            if answer.error_message:
                raise RefusedError(answer.error_message)
            response = answer.infer_response
            self.finals.append(response.parameters["triton_final_response"].bool_param)
            yield {
                tensor.name: (
                    deserialize_bytes_tensor(raw)[0].decode()
                    if tensor.datatype == "BYTES"
                    else np.frombuffer(raw, DTYPES[tensor.datatype]).tolist()
                )
                for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True)
            }

    def cancel(self) -> None:
        self._call.cancel()


def add_tensor(request: Any, name: str, value: Any) -> None:
    """`value` as a [1, n] tensor; an ndarray goes as it is."""
    datatype = DATATYPES.get(name, "INT32")
    if isinstance(value, np.ndarray):
        array, datatype = value, value.dtype.name.upper()
    elif datatype == "BYTES":
        array = np.atleast_1d(np.array(value, dtype=np.object_))[None]
    else:
        array = np.atleast_1d(np.array(value, dtype=DTYPES[datatype]))[None]
    request.inputs.add(name=name, datatype=datatype, shape=array.shape)
    raw = serialize_byte_tensor(array).item() if datatype == "BYTES" else array.tobytes()
    request.raw_input_contents.append(raw)


def joined(chunks: list[dict[str, Any]]) -> tuple[str, list[int]]:
    """Text and ids of streamed deltas; JSON shows a vector of one as a number."""
    ids = [id for chunk in chunks for id in np.atleast_1d(chunk["output_ids"]).tolist()]
    return "".join(chunk["text_output"] for chunk in chunks), ids


def get(port: int, path: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


def post(port: int, path: str, values: dict[str, Any]) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", path, json.dumps(values))
    response = connection.getresponse()
    try:
        return response.status, response.read()
    finally:
        connection.close()


def _parsed(line: str) -> dict[str, Any] | str:
    try:
        event = json.loads(line)
    except ValueError:
        return line
    return event if isinstance(event, dict) else line


def launch(*arguments: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    """dsv41-serve with arguments that it refuses: exit status and everything it wrote."""
    found = subprocess.run(
        [sys.executable, "-m", "python_backend.launcher", *arguments],
        cwd=ROOT,
        env=os.environ | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return found.returncode, found.stdout + found.stderr
