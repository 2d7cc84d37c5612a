"""Starts the real Triton server of the nvidia-pytriton package on a model repository."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import sysconfig
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXTURE_REPOSITORY = Path(__file__).parent / "fixture_repository"
START_SECONDS = 60.0
STOP_SECONDS = 20.0


@dataclass(frozen=True)
class Server:
    http: str
    grpc: str
    metrics: str

    def metric(self, name: str) -> float:
        """The sum of one metric over its labels, read from the server's metrics page."""
        with urllib.request.urlopen(f"http://{self.metrics}/metrics", timeout=5) as page:
            lines = page.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line))

    def tokens_made(self) -> float:
        """The echo model's own count."""
        return self.metric("fixture_tokens_total")


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def assert_stops(server: Server) -> None:
    """No more tokens are made, within one second; the slow prompt makes one each 50 ms."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        before = server.tokens_made()
        time.sleep(0.2)
        if server.tokens_made() == before:
            return
    pytest.fail("the server still makes tokens one second after the cancellation")


def _backends(folder: Path) -> Path:
    """The server's Python backend with the stub of this Python, as links."""
    package = Path(sysconfig.get_path("purelib")) / "pytriton" / "tritonserver"
    stub = package / "python_backend_stubs" / f"{sys.version_info[0]}.{sys.version_info[1]}"
    backend = folder / "backends" / "python"
    backend.mkdir(parents=True)
    for file in [*(package / "backends" / "python").iterdir(), *stub.iterdir()]:
        (backend / file.name).symlink_to(file)
    return folder / "backends"


def _command(server: Server, repository: Path, backends: Path) -> list[str]:
    package = Path(sysconfig.get_path("purelib")) / "pytriton" / "tritonserver"
    command = [
        str(package / "bin" / "tritonserver"),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        "--allow-gpu-metrics=false",
        "--pinned-memory-pool-byte-size=0",
        "--exit-timeout-secs=10",
    ]
    for service in ("http", "grpc", "metrics"):
        host, port = getattr(server, service).split(":")
        command += [f"--{service}-address={host}", f"--{service}-port={port}"]
    return command


def _environment() -> dict[str, str]:
    """The stub finds its interpreter through PATH and loads that interpreter's libpython."""
    libraries = Path(sysconfig.get_path("purelib")) / "nvidia_pytriton.libs"
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "LD_LIBRARY_PATH": f"{libraries}:{sysconfig.get_config_var('LIBDIR')}",
    }


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended: {log.read_text()[-2000:]}"
        try:
            with urllib.request.urlopen(f"http://{server.http}/v2/health/ready", timeout=2):
                return
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"the server was not ready in {START_SECONDS} s: {log.read_text()[-2000:]}")


@contextlib.contextmanager
def running(folder: Path, repository: Path = FIXTURE_REPOSITORY) -> Iterator[Server]:
    """The server on free ports, ready; `folder` takes its links and log. Stops cleanly at exit."""
    log = folder / "log"
    # The server cannot take a path with spaces, which a checkout may have.
    link = folder / "served-repository"
    link.symlink_to(repository)
    server = Server(free_address(), free_address(), free_address())
    with log.open("wb") as output:
        process = subprocess.Popen(
            _command(server, link, _backends(folder)),
            env=_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        _wait_until_ready(server, process, log)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what a crash left behind
    assert process.wait() == 0, f"the server did not stop cleanly: {log.read_text()[-2000:]}"
