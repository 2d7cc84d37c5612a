"""What surrounds the server's process: its leftovers, its output, its addresses, its limits."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from python_backend.host import files, instances
from python_backend.host.errors import HostError
from python_backend.host.files import ServerFiles
from python_backend.host.instances import Instance, remove_dead_instances, state_folder
from python_backend.host.output import ServerOutput
from python_backend.host.process import Addresses
from python_backend.host.repository import write_repository


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Instances of this test only, and /dev/shm elsewhere."""
    monkeypatch.setattr(instances.tempfile, "tempdir", str(tmp_path))
    shared = tmp_path / "shm"
    shared.mkdir()
    monkeypatch.setattr(instances, "SHARED_MEMORY", shared)
    assert state_folder().parent == tmp_path
    return shared


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def test_an_instance_lives_as_long_as_one_of_its_owners(
    state: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    instance = Instance.create()
    region = state / f"{instance.region_prefix}1"
    region.touch()
    (state / "dsv41-somebody-elses").touch()
    assert remove_dead_instances() == []  # owned by this process
    instance.own(sleeper.pid)
    assert remove_dead_instances() == []
    sleeper.kill()  # not waited for: a zombie counts as gone
    psutil.wait_procs([psutil.Process(sleeper.pid)], timeout=0.5)
    assert remove_dead_instances() == [str(region)]
    assert [path.name for path in state.iterdir()] == ["dsv41-somebody-elses"]
    assert not instance.folder.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"boot": "another boot"},
        {"process_namespace": "pid:[1]"},
        {"processes": "nonsense"},
    ],
)
def test_what_cannot_be_judged_is_left_alone(state: Path, change: dict[str, Any]) -> None:
    instance = Instance.create()
    record = instance.folder / "owner.json"
    dead = json.loads(record.read_text()) | {"processes": [[os.getpid(), 1]]}  # another start
    record.write_text(json.dumps(dead | change))
    (state / f"{instance.region_prefix}1").touch()
    assert remove_dead_instances() == []
    record.write_text(json.dumps(dead))
    assert len(remove_dead_instances()) == 1


def test_a_folder_without_a_record_is_left_alone(state: Path) -> None:
    folder = state_folder() / "dsv41-0123456789ab"
    folder.mkdir()
    assert remove_dead_instances() == []
    assert folder.is_dir()


def test_state_never_lies_in_a_path_with_spaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instances.tempfile, "tempdir", str(tmp_path / "a b"))
    assert state_folder() == Path("/tmp") / f"dsv41-serve-{os.getuid()}"


def test_a_taken_port_and_a_doubled_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(HostError, match=rf"expected metrics port {port} on 127\.0\.0\.1"):
            Addresses(http_port=port - 1, grpc_port=port + 1, metrics_port=port).check_free()
        with pytest.raises(HostError, match=rf"different ports, got {port} for http and metrics"):
            Addresses(http_port=port, metrics_port=port).check_free()
    with pytest.raises(HostError, match=r"expected http port 8000 on no\.such\.host"):
        Addresses(http_address="no.such.host").check_free()


def test_urls_reach_a_server_that_listens_everywhere() -> None:
    addresses = Addresses(http_address="0.0.0.0", grpc_address="::", metrics_address="10.0.0.1")
    assert addresses.url("http") == "127.0.0.1:8000"
    assert addresses.url("grpc") == "[::1]:8001"
    assert addresses.url("metrics") == "10.0.0.1:8002"


def test_output_becomes_json_lines_and_the_models_refusal_is_the_reason() -> None:
    lines = [
        '{"time": "t", "level": "info", "event": "load_progress", "share": 0.5}',
        'I1129 20:06:30.901574 22229 http_server.cc:362] "Started HTTPService at 127.0.0.1:80"',
        "+-----+",
        "| a table |",
        "",
        'E1129 20:06:30.9 2 server.cc:241] "CudaDriverHelper has not been initialized."',
        "E1129 20:06:31.9 2 model_lifecycle.cc:642] \"failed to load 'deepseek_v41' version 1: "
        'Internal: TritonModelException: expected more memory, got less\\n\\nAt:\\n  /a/b.py(36)"',
        "error: creating server: Internal - failed to load all models",
        "plain words",
    ]
    log, events = io.StringIO(), []
    output = ServerOutput(io.StringIO("\n".join(lines) + "\n"), log, events.append)
    assert output.last_error() == "expected more memory, got less"
    assert [event["share"] for event in events] == [0.5]
    logged = [json.loads(line) for line in log.getvalue().splitlines()]
    assert [entry.get("message", "")[:14] for entry in logged] == [
        "", "Started HTTPSe", "failed to load", "error: creatin", "plain words",
    ]  # fmt: skip
    assert [entry["level"] for entry in logged] == ["info", "info", "error", "info", "info"]


def test_the_repository_quotes_any_path(tmp_path: Path) -> None:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    path = 'a "quoted" path \\ with ünïcode'
    write_repository(tmp_path / "models", {"engine_dir": path})
    model = tmp_path / "models" / "deepseek_v41"
    text = (model / "config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert config.parameters["engine_dir"].string_value == path
    assert "TritonPythonModel" in (model / "1" / "model.py").read_text()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(HostError, match=r"pip install --no-deps nvidia-pytriton==0\.7\.0"):
        ServerFiles.find()


def test_a_numpy_that_crashes_the_stub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked of a child without PYTHONPATH, as the stub is."""
    asks = files._PRINT_VERSIONS
    assert 'importlib.metadata.version("numpy")' in asks
    monkeypatch.setattr(
        files, "_PRINT_VERSIONS", asks.replace('importlib.metadata.version("numpy")', "'2.1.3'")
    )
    with pytest.raises(HostError, match=r"expected NumPy below 2 .*, got 2\.1\.3"):
        ServerFiles.find()


def test_the_stub_runs_the_code_on_the_search_path(tmp_path: Path) -> None:
    """In a Python that leaves PYTHONPATH out, as the stub's does, and has the project installed."""
    package = tmp_path / "python_backend"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "triton_model.py").write_text("TritonPythonModel = 'of the search path'\n")
    model = Path(__file__).resolve().parents[2] / "model_repository/deepseek_v41/1/model.py"
    shown = "import runpy, sys; print(runpy.run_path(sys.argv[1])['TritonPythonModel'])"
    done = subprocess.run(
        [sys.executable, "-I", "-c", shown, str(model)],
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "of the search path\n", done.stderr


def test_search_paths_of_the_operator_come_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", "/an/operators")
    monkeypatch.setenv("PYTHONPATH", "")
    environment = ServerFiles.find().environment()
    assert environment["LD_LIBRARY_PATH"].endswith(":/an/operators")
    assert environment["PYTHONPATH"] == str(Path(__file__).resolve().parents[2])
    assert environment["PATH"].startswith(f"{Path(sys.executable).parent}:")


def test_the_allocators_limits_are_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes; any of glibc's variables ends the raising. An operator's own win."""
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "1000000")
    environment = ServerFiles.find().environment()
    assert environment["MALLOC_ARENA_MAX"] == "1"
    assert environment["MALLOC_MMAP_THRESHOLD_"] == "1048576"
    assert environment["MALLOC_TRIM_THRESHOLD_"] == "1000000"
