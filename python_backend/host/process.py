"""The server's process: start it, know that it works, stop it so that nothing is lost or left."""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import grpc
import numpy as np
import psutil
from tritonclient.grpc import service_pb2, service_pb2_grpc

from python_backend.host.errors import HostError
from python_backend.host.files import ServerFiles, server_command
from python_backend.host.instances import Instance
from python_backend.host.output import ServerOutput
from python_backend.host.repository import MODEL_NAME, write_repository
from python_backend.host.slow_readers import cut_slow_readers

EXIT_SECONDS = 2  # the server's wait for connections that clients keep open without a request
_KILL_SECONDS = 15.0
# A gRPC client that hangs up while its last response, an error, is on the way can leave a request
# behind in this server (2.51), which then never unloads the model. When the model says that every
# request has its last response, unloading gets so long; a step that still runs gets no longer.
_LEFT_BEHIND_SECONDS = 3.0
_POLL_SECONDS = 0.1
_MOST_PING_SECONDS = 20.0  # that a gRPC client may take to answer one
_UNLOAD_HEADER = "dsv41-serve"
# Nobody's business but this launcher's: a client that registers shared memory reaches the model
# process's own region, too, and one that changes logging or tracing fills a disk.
_RESTRICTED = "model-repository,shared-memory,logging,trace"
_SET_PARENT_DEATH_SIGNAL = 1  # prctl
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Addresses:
    """Where the three services listen. Ports count from 1."""

    http_address: str = "127.0.0.1"
    http_port: int = 8000
    grpc_address: str = "127.0.0.1"
    grpc_port: int = 8001
    metrics_address: str = "127.0.0.1"
    metrics_port: int = 8002

    def check_free(self) -> None:
        """Raises HostError naming the first port that cannot be listened on."""
        taken: dict[int, str] = {}
        for service in ("http", "grpc", "metrics"):
            port = getattr(self, f"{service}_port")
            if port in taken:
                raise HostError(
                    f"expected three different ports, got {port} for {taken[port]} and {service}; "
                    f"change {service}_port"
                )
            taken[port] = service
        for port, service in taken.items():
            address = getattr(self, f"{service}_address")
            try:
                family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
                with socket.socket(family) as probe:
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    probe.bind((address, port))
            except OSError as error:
                raise HostError(
                    f"expected {service} port {port} on {address} to be free, but: "
                    f"{error.strerror}; stop what uses it or set {service}_port and "
                    f"{service}_address"
                ) from None

    def options(self) -> list[str]:
        return [
            f"--{service}-{what}={getattr(self, f'{service}_{what}')}"
            for service in ("http", "grpc", "metrics")
            for what in ("address", "port")
        ]

    def url(self, service: str) -> str:
        """host:port to reach a service from this machine."""
        address = getattr(self, f"{service}_address")
        address = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
        port = getattr(self, f"{service}_port")
        return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


class ServerProcess:
    """One running server. `start`, `wait_until_ready`, then poll `failure` until `stop`."""

    def __init__(
        self,
        *,
        instance: Instance,
        process: subprocess.Popen[str],
        output: ServerOutput,
        addresses: Addresses,
        unload_key: str,
        drain_seconds: float,
    ) -> None:
        self._instance = instance
        self._process = process
        self._output = output
        self._addresses = addresses
        self._unload_key = unload_key
        self._drain_seconds = drain_seconds
        self._stub: psutil.Process | None = None

    @staticmethod
    def start(
        files: ServerFiles,
        addresses: Addresses,
        parameters: Mapping[str, str],
        *,
        drain_seconds: float,
        slow_reader_seconds: float,
        log: IO[str],
        on_event: Callable[[dict[str, Any]], None],
    ) -> ServerProcess:
        """Start the server on a repository of its own. gRPC clients that answer no ping for
        `slow_reader_seconds`, 0 is never, lose their connection. Raises HostError or OSError, and
        then leaves nothing."""
        instance = Instance.create()
        try:
            files.link(instance.folder)
            repository = instance.folder / "models"
            more = {
                "drain_file": str(_drain_file(instance)),
                "drained_file": str(_drained_file(instance)),
                "drain_seconds": str(drain_seconds),
            }
            write_repository(repository, {**parameters, **more})
            # Unloading ends the model cleanly whatever connections clients keep open.
            unload_key = secrets.token_hex(16)
            restricted = f"{_RESTRICTED}:{_UNLOAD_HEADER}={unload_key}"
            process = subprocess.Popen(
                [
                    *server_command(files, instance, repository),
                    *addresses.options(),
                    "--disable-auto-complete-config",  # or the model would be imported twice
                    "--model-control-mode=explicit",
                    f"--load-model={MODEL_NAME}",
                    f"--http-restricted-api={restricted}",
                    f"--grpc-restricted-protocol={restricted}",
                    f"--exit-timeout-secs={EXIT_SECONDS}",
                    *_pings(slow_reader_seconds),
                ],
                env=files.environment(),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )
            instance.own(os.getpid(), process.pid)
        except BaseException:
            instance.remove()
            raise
        assert process.stdout is not None
        return ServerProcess(
            instance=instance,
            process=process,
            output=ServerOutput(process.stdout, log, on_event),
            addresses=addresses,
            unload_key=unload_key,
            drain_seconds=drain_seconds,
        )

    def wait_until_ready(self, interrupted: Callable[[], bool]) -> bool:
        """True when one token was made through the server, False when interrupted before.

        Loading takes what it takes, so there is no time limit. Raises HostError when the server
        ends or cannot make the token.
        """
        while not self._is_ready():
            if interrupted():
                return False
            self._raise_failure()
            time.sleep(_POLL_SECONDS)
        stubs = self._instance.stub_processes()
        self._stub = stubs[0] if stubs else None
        _make_one_token(self._addresses.url("grpc"))
        return True

    def cut_slow_readers(self, seconds: float) -> None:
        """Of HTTP, see `host.slow_readers`. Raises OSError where the system forbids it."""
        port = self._addresses.http_port
        cut_slow_readers(psutil.Process(self._process.pid), port, seconds)

    def failure(self) -> str | None:
        """Why the server no longer serves, None while it does."""
        status = self._process.poll()
        if status is not None:
            how = f"signal {-status}" if status < 0 else f"exit status {status}"
            return f"the Triton server ended with {how}: {self._output.last_error()}"
        # The server never restarts a model process, and stays "ready" without one.
        if self._stub is not None and not _runs(self._stub):
            return "the model's process ended unexpectedly; the system's log may say why"
        return None

    def stop(self) -> None:
        """Let requests end for `drain_seconds`, unload the model, end the process.

        Raises HostError when the server does not end although requests may be unanswered; `kill` is
        called in any case afterwards.
        """
        if self._stub is None or not _runs(self._stub):
            return  # still loading, or gone: there is nobody to wait for
        _drain_file(self._instance).touch()
        self._unload()
        patience = self._drain_seconds + _KILL_SECONDS
        unloaded = self._wait(lambda: self._is_unloaded() or self._is_drained(), patience)
        if unloaded and not self._wait(self._is_unloaded, _LEFT_BEHIND_SECONDS):
            return  # everybody is answered, and nobody else knows what the server waits for
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        patience = EXIT_SECONDS + _KILL_SECONDS
        ended = self._wait(lambda: self._process.poll() is not None, patience)
        if not (unloaded and ended and self._process.returncode == 0):
            raise HostError(
                "expected the Triton server to stop cleanly, but it had to be ended by force: "
                f"{self._output.last_error()}"
            )

    def kill(self) -> None:
        """End whatever is left of the server at once, and remove what it leaves."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._instance.remove()

    def _is_unloaded(self) -> bool:
        return self._stub is None or not _runs(self._stub)

    def _is_drained(self) -> bool:
        """Every request that the model took has had its last response."""
        return _drained_file(self._instance).exists()

    def _is_ready(self) -> bool:
        try:
            return self._ask("GET", "/v2/health/ready") == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def _unload(self) -> None:
        with contextlib.suppress(OSError, http.client.HTTPException):
            self._ask("POST", f"/v2/repository/models/{MODEL_NAME}/unload")

    def _ask(self, method: str, path: str) -> int:
        connection = http.client.HTTPConnection(self._addresses.url("http"), timeout=5)
        try:
            body = "{}" if method == "POST" else None
            connection.request(method, path, body, {_UNLOAD_HEADER: self._unload_key})
            return connection.getresponse().status
        finally:
            connection.close()

    def _raise_failure(self) -> None:
        reason = self.failure()
        if reason is not None:
            raise HostError(reason)

    def _wait(self, done: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not done():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_SECONDS)
        return True


def _drain_file(instance: Instance) -> Path:
    return instance.folder / "drain"


def _drained_file(instance: Instance) -> Path:
    return instance.folder / "drained"


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _pings(seconds: float) -> list[str]:
    """How often a gRPC client must answer; a process that is stopped or gone does not."""
    if not seconds:
        return []
    patience = min(seconds, _MOST_PING_SECONDS)
    milliseconds = {"time": round(seconds * 1e3), "timeout": round(patience * 1e3)}
    return [f"--grpc-keepalive-{name}={value}" for name, value in milliseconds.items()]


def _die_with_parent() -> None:
    """In the child: a launcher that is killed takes its server with it."""
    _LIBC.prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)


def _make_one_token(url: str) -> None:
    """Generate through the server's front door. Raises HostError with what came instead."""
    request = service_pb2.ModelInferRequest(model_name=MODEL_NAME, id="readiness")
    values = {"input_ids": np.zeros((1, 1), np.int32), "max_tokens": np.ones((1, 1), np.int32)}
    for name, array in values.items():
        request.inputs.add(name=name, datatype="INT32", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    with grpc.insecure_channel(url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            answers = list(stub.ModelStreamInfer(iter((request,)), timeout=600))
        except grpc.RpcError as error:
            raise HostError(f"expected one token from {url}, got: {error.details()}") from None
    names = {tensor.name for answer in answers for tensor in answer.infer_response.outputs}
    if "output_ids" not in names:
        problem = answers[0].error_message if answers else "no response"
        raise HostError(f"expected one token from {url}, got: {problem}")
