"""The life of a server: start-up refusals, exact replay, stops, deaths and what they leave."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from google.protobuf.text_format import Parse
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from tests.server.deployment import (
    GOLDEN,
    PROMPT,
    ROOT,
    STOP_SECONDS,
    STUB,
    Deployment,
    EventStream,
    RefusedError,
    free_ports,
    get,
    joined,
    launch,
    post,
    region_of,
    shared_memory,
)

pytestmark = pytest.mark.server


def test_exact_replay_then_sigterm_in_mid_stream(engine: Path) -> None:
    """The server with --no-swa-bounded-replay; running requests may end, or end with an error."""
    server = Deployment(
        engine, "--dtype=float64", "--no-swa-bounded-replay", "--drain-seconds=1"
    ).wait_until_ready()
    try:
        asked = {"input_ids": PROMPT, "end_id": -1, "stream": True}
        exact = GOLDEN["greedy_from_20"].tolist()
        assert exact != GOLDEN["greedy_from_20_replay"].tolist()
        both = server.stream(**asked, max_tokens=24), server.sse(**asked, max_tokens=24)
        assert [joined(list(chunks))[1] for chunks in both] == [exact, exact]

        idle = socket.create_connection(("127.0.0.1", server.http))  # clients keep connections
        idle.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert idle.recv(64).startswith(b"HTTP/1.1 200")
        by_grpc = server.stream("cut", **asked, max_tokens=900)
        chunks = iter(by_grpc)
        next(chunks)
        with EventStream(server.http, {**asked, "max_tokens": 900}) as by_http:
            events = iter(by_http)
            next(events)
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(RefusedError, match=r"^\[unavailable\] .*the server stopped"):
                list(chunks)
            assert list(events)[-1]["error"].startswith("[unavailable]")
        assert server.wait() == 0
        assert server.said[-1] == "dsv41-serve: stopped"
        assert server.region not in shared_memory()
        idle.close()
    finally:
        server.end()


def test_paths_with_spaces_a_yaml_file_and_a_model_process_that_dies(
    engine: Path, tmp_path: Path
) -> None:
    """Project, environment, TMPDIR, settings and log in folders with spaces."""
    root = tmp_path / "the project"
    root.mkdir()
    for name in ("plugins", "engine", "python_backend", "model_repository"):
        (root / name).symlink_to(ROOT / name)
    (root / ".venv").symlink_to(sys.prefix)
    (root / "a tmp").mkdir()
    config, log = root / "my settings.yaml", root / "the log.jsonl"
    config.write_text(
        f'dtype: float64\nmax_batch_size: 3\nmax-num-tokens: 32\nlog_file: "{log}"\n'
        "num_global_pages: 5\nmax_queued_requests: 3\n"
    )
    server = Deployment(
        engine,
        f"--config-file={config}",
        "--max-batch-size=2",
        root=root,
        environment={"TMPDIR": str(root / "a tmp"), "PYTHONPATH": str(root)},
    ).wait_until_ready()
    try:
        assert any("up to 2 requests at once" in line for line in server.said)
        assert any("caches of 64 tokens" in line for line in server.said)
        assert server.generate(input_ids=PROMPT, max_tokens=2)["num_output_tokens"] == 2
        # Larger than the whole pool: refused at once, and the next request is served.
        with pytest.raises(RefusedError, match=r"\[over_capacity\] expected a request of at most"):
            server.generate(input_ids=PROMPT, max_tokens=60)
        # Two places and a queue of three.
        (refusal,) = server.sse(input_ids=PROMPT, max_tokens=2, num_return_sequences=6)
        assert "[over_capacity] expected at most 5 sequences of one request" in refusal["error"]
        assert '"event": "request_finished"' in log.read_text()
        server.child(STUB).kill()
        assert server.wait() == 1
        assert "the model's process ended unexpectedly" in server.everything()
        assert server.region not in shared_memory()
    finally:
        server.end()


@pytest.fixture
def plain(engine: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """scripts/run_triton.sh on a repository written by hand: the model completes config.pbtxt."""
    repository = tmp_path / "model repository"
    model = repository / "deepseek_v41"
    (model / "1").mkdir(parents=True)
    source = ROOT / "model_repository" / "deepseek_v41"
    (model / "1" / "model.py").write_text((source / "1" / "model.py").read_text())
    (model / "config.pbtxt").write_text(
        'backend: "python" instance_group [ { kind: KIND_CPU } ] '
        f'parameters [ {{ key: "engine_dir" value: {{ string_value: "{engine}" }} }} ]'
    )
    http, grpc, metrics = free_ports(3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(ROOT / "scripts" / "run_triton.sh"), str(repository), *ports],
            # Instances of its own, or a server of another test would clean up first.
            env=os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path), "VENV": sys.prefix},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process, http
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.wait(STOP_SECONDS)


def test_the_plain_server_and_what_it_leaves_when_it_dies(
    plain: tuple[subprocess.Popen[bytes], int], tmp_path: Path
) -> None:
    """The next dsv41-serve removes the regions and the model process of the dead one only."""
    process, http = plain
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None
        try:
            if get(http, "/v2/health/ready")[0] == 200:
                break
        except OSError:
            time.sleep(0.1)
    status, body = post(
        http, "/v2/models/deepseek_v41/generate", {"input_ids": PROMPT, "max_tokens": 1}
    )
    assert (status, b'"num_output_tokens":1' in body) == (200, True)
    told = json.loads(get(http, "/v2/models/deepseek_v41/config")[1])
    whole = Parse((ROOT / "model_repository/deepseek_v41/config.pbtxt").read_text(), ModelConfig())
    assert [(i["name"], i["data_type"], i["optional"]) for i in told["input"]] == [
        (i.name, DataType.Name(i.data_type), i.optional) for i in whole.input
    ]
    assert [(o["name"], o["dims"]) for o in told["output"]] == [
        (o.name, list(o.dims)) for o in whole.output
    ]
    assert told["max_batch_size"] == whole.max_batch_size
    (stub,) = [c for c in psutil.Process(process.pid).children() if STUB in c.cmdline()[0]]
    region = region_of(stub)
    foreign = Path("/dev/shm/dsv41-not-a-servers-region")
    foreign.touch()
    stub.suspend()  # a stub that hangs would stay for ever
    try:
        process.kill()
        process.wait()
        assert region in shared_memory()
        services = zip(("http", "grpc", "metrics"), free_ports(3), strict=True)
        ports = [f"--{service}-port={port}" for service, port in services]
        status, said = launch(
            "--engine", "/nonexistent", *ports, environment={"TMPDIR": str(tmp_path)}
        )
        assert status == 1
        assert f"removed /dev/shm/{region}, left behind by a server that died" in said
        assert f"removed process {stub.pid}" in said
        assert "expected an engine directory at /nonexistent" in said
        assert region not in shared_memory()
        assert not stub.is_running() or stub.status() == psutil.STATUS_ZOMBIE
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_the_plain_server_asks_for_an_engine() -> None:
    http, grpc, metrics = free_ports(3)
    ports = [f"--http-port={http}", f"--grpc-port={grpc}", f"--metrics-port={metrics}"]
    found = subprocess.run(
        [str(ROOT / "scripts" / "run_triton.sh"), str(ROOT / "model_repository"), *ports],
        env=os.environ | {"VENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 1
    assert "expected parameters.engine_dir in config.pbtxt, got none" in found.stderr


def test_a_mistyped_repository_is_named_as_it_was_typed(tmp_path: Path) -> None:
    found = subprocess.run(
        [str(ROOT / "scripts" / "run_triton.sh"), "model_repositry"],
        cwd=tmp_path,
        env=os.environ | {"VENV": sys.prefix},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 1
    assert found.stderr.startswith("expected a model repository at model_repositry, with a config")


def test_a_port_in_use_is_named(engine: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        http, metrics = map(str, free_ports(2))
        status, said = launch(
            *("--engine", str(engine), "--grpc-port", str(port)),
            *("--http-port", http, "--metrics-port", metrics),
        )
    assert status == 1
    assert f"expected grpc port {port} on 127.0.0.1 to be free, but: Address already in use" in said


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("--max-num-tokens=15", "expected max_num_tokens of at least 16, two windows of 8"),
        ("--kv-events=foo", "a ZeroMQ endpoint that can be bound, .*, got 'foo': Invalid argument"),
        ("--log-file=/nowhere/x", "expected log_file to be .*, got /nowhere/x: No such file"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_start(
    engine: Path, option: str, sentence: str
) -> None:
    http, grpc, metrics = map(str, free_ports(3))
    ports = ["--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics]
    status, said = launch("--engine", str(engine), *ports, option)
    assert status == 1
    assert re.search(f"dsv41-serve: .*{sentence}", said)
    assert "Traceback" not in said
