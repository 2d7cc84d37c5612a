"""A dsv41-serve process under load, and requests to it that say how they ended."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import serialize_byte_tensor

ROOT = Path(__file__).resolve().parents[2]
MODEL = "deepseek_v41"
START_SECONDS = 120
STUB = "triton_python_backend_stub"
_DTYPES = {"BOOL": np.bool_, "UINT64": np.uint64, "FP32": np.float32, "INT32": np.int32}
_KINDS = {
    **dict.fromkeys(("text_input", "messages", "stop_words", "logit_bias"), "BYTES"),
    **dict.fromkeys(("guided_decoding_guide_type", "guided_decoding_guide"), "BYTES"),
    **dict.fromkeys(("temperature", "top_p", "min_p", "repetition_penalty"), "FP32"),
    **dict.fromkeys(("stream", "speculative", "thinking"), "BOOL"),
    **dict.fromkeys(("seed", "timeout"), "UINT64"),
}  # every other input is INT32


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Server:
    """One dsv41-serve on free ports. `fault_token` serves the model with a fault to order."""

    def __init__(
        self, engine: Path, folder: Path, *options: str, fault_token: int | None = None
    ) -> None:
        self.log = folder / "server.jsonl"
        self.http, self.grpc, self.metrics = free_ports(3)
        root, environment = ROOT, dict(os.environ)
        if fault_token is not None:
            root = _faulty_project(folder)
            environment["DSV41_FAULT_TOKEN"] = str(fault_token)
        self._output = (folder / "server.txt").open("w+")
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "python_backend.launcher", "--engine", str(engine)),
                *("--http-port", str(self.http), "--grpc-port", str(self.grpc)),
                *("--metrics-port", str(self.metrics), "--log-file", str(self.log), *options),
            ],
            cwd=root,
            env=environment | {"PYTHONPATH": str(root)},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while "ready after" not in self.said():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server did not start: {self.said()}")
            time.sleep(0.1)

    def said(self) -> str:
        self._output.flush()
        return Path(self._output.name).read_text()

    def stop(self) -> int:
        """The exit status after SIGTERM."""
        self.process.terminate()
        return self.process.wait(60)

    def values(self) -> dict[str, float]:
        """Every dsv41 sample by name and label values, buckets aside."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=10) as page:
            families = text_string_to_metric_families(page.read().decode())
            return {
                " ".join([sample.name, *sample.labels.values()]): sample.value
                for family in families
                for sample in family.samples
                if sample.name.startswith("dsv41_") and "le" not in sample.labels
            }

    def memory(self) -> dict[str, int]:
        """Resident bytes, those of them that are no pages of files, and open files, of the server's
        process and of the model's. How much of a library the kernel maps around a page that is
        touched depends on how its file lies in the page cache: 80 or 150 MB of torch's."""
        found: dict[str, int] = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            name = Path(process.name()).name
            kind = "model" if name.startswith(STUB[:10]) else "server"
            if name.startswith((STUB[:10], "tritonserver")):
                memory = process.memory_info()
                found[f"{kind}_rss"] = memory.rss
                found[f"{kind}_allocated"] = memory.rss - memory.shared
                found[f"{kind}_files"] = process.num_fds()
        return found

    def ends(self) -> dict[str, list[dict[str, Any]]]:
        """The log's events that end a request, by the client's request id."""
        found: dict[str, list[dict[str, Any]]] = {}
        for line in self.log.read_text().splitlines():
            event = json.loads(line)
            if event["event"] in ("request_finished", "request_refused"):
                found.setdefault(event["request_id"], []).append(event)
        return found


def _faulty_project(folder: Path) -> Path:
    """This project with another model.py, made of links."""
    project = folder / "project"
    project.mkdir()
    for name in ("plugins", "engine", "python_backend"):
        (project / name).symlink_to(ROOT / name)
    version = project / "model_repository" / MODEL / "1"
    version.mkdir(parents=True)
    (version / "model.py").symlink_to(Path(__file__).parent / "faulty_model" / "model.py")
    config = ROOT / "model_repository" / MODEL / "config.pbtxt"
    (version.parent / "config.pbtxt").symlink_to(config)
    return project


@dataclass
class Outcome:
    """How a request ended for its client: "answer", "cancelled" (by the client), or the code of
    its error. Times are seconds since the request was sent."""

    request_id: str
    kind: str
    end: str = ""
    message: str = ""
    num_tokens: int = 0
    first: float | None = None
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0


def infer_request(request_id: str, values: Mapping[str, Any]) -> Any:
    request = service_pb2.ModelInferRequest(model_name=MODEL, id=request_id)
    for name, value in values.items():
        kind = _KINDS.get(name, "INT32")
        if kind == "BYTES":
            array = np.atleast_1d(np.array(value, dtype=np.object_))[None]
            raw = serialize_byte_tensor(array).item()
        else:
            array = np.atleast_1d(np.array(value, dtype=_DTYPES[kind]))[None]
            raw = array.tobytes()
        request.inputs.add(name=name, datatype=kind, shape=array.shape)
        request.raw_input_contents.append(raw)
    return request


async def stream(
    channel: grpc.aio.Channel,
    outcome: Outcome,
    values: Mapping[str, Any],
    *,
    leave_after: int | None = None,
    pause: float = 0.0,
) -> Outcome:
    """Send one request and read its answer, `pause` seconds between responses. The client cancels
    after `leave_after` responses."""

    async def requests() -> AsyncIterator[Any]:
        yield infer_request(outcome.request_id, values)

    call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(requests())
    started = last = time.monotonic()
    num_responses = 0
    try:
        if leave_after == 0:
            await asyncio.sleep(0.02)
            call.cancel()
        async for answer in call:
            now = time.monotonic()
            if answer.error_message:
                outcome.message = answer.error_message
                outcome.end = outcome.message.partition("]")[0].removeprefix("[")
                continue  # who hangs up here leaves a request and a socket behind in the server
            num_responses += 1
            outcome.num_tokens += _num_tokens(answer.infer_response)
            if outcome.first is None:
                outcome.first = now - started
            else:
                outcome.gaps.append(now - last)
            last = now
            if answer.infer_response.parameters["triton_final_response"].bool_param:
                outcome.end = "answer"
            elif num_responses == leave_after:
                call.cancel()
            if pause:
                await asyncio.sleep(pause)
    except asyncio.CancelledError:
        if leave_after is None:
            raise
        outcome.end = outcome.end or "cancelled"
    except grpc.aio.AioRpcError as error:
        outcome.end, outcome.message = f"grpc {error.code().name}", error.details() or ""
    outcome.end = outcome.end or "nothing"
    outcome.seconds = time.monotonic() - started
    return outcome


async def http_stream(
    port: int, outcome: Outcome, values: Mapping[str, Any], *, leave_after: int
) -> Outcome:
    """generate_stream whose connection is closed after so many events."""
    body = json.dumps({**values, "id": outcome.request_id}).encode()
    started = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        f"POST /v2/models/{MODEL}/generate_stream HTTP/1.1\r\nHost: x\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    outcome.end = "answer"
    while line := await reader.readline():
        if line.startswith(b"data: "):
            outcome.num_tokens += 1
            if b'"error"' in line:
                outcome.message = json.loads(line[6:])["error"]
                outcome.end = outcome.message.partition("]")[0].removeprefix("[")
                break
            if b'"finish_reason"' in line:
                break
            if outcome.num_tokens == leave_after:
                outcome.end = "cancelled"
                break
    writer.close()
    outcome.seconds = time.monotonic() - started
    return outcome


def _num_tokens(response: Any) -> int:
    for tensor in response.outputs:
        if tensor.name == "output_ids":
            return int(tensor.shape[1])
    return 0


def measured_on() -> dict[str, Any]:
    """The commit, None outside of a checkout, and the cores that this process may use."""
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return {"commit": asked.stdout.strip() or None, "cores": len(os.sched_getaffinity(0))}


def percentiles(values: list[float]) -> dict[str, float] | None:
    """Milliseconds."""
    if not values:
        return None
    found = np.percentile(np.array(values) * 1e3, [50, 90, 99, 100])
    return dict(zip(("p50", "p90", "p99", "max"), (round(float(v), 1) for v in found), strict=True))
