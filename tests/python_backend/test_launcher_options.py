"""Options of dsv41-serve: command line, YAML, precedence, and the sentence for each mistake."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from python_backend.host.errors import HostError
from python_backend.host.options import SETTING_HELP, read_options
from python_backend.host.process import Addresses
from python_backend.settings import ServeSettings
from tests.server.deployment import free_ports

OPERATIONS = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def yaml_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "my settings.yaml"
    path.write_text(text)
    return f"--config-file={path}"


def test_defaults() -> None:
    options = read_options(["--engine", "e"])
    assert options.addresses == Addresses()
    assert (options.engine, options.log_file, options.drain_seconds) == (Path("e"), None, 10.0)
    assert options.model_parameters() == {"engine_dir": str(Path("e").resolve())}


def test_both_spellings_and_switches() -> None:
    options = read_options(
        ["--engine_dir=e", "--http_port=81", "--grpc-address=0.0.0.0", "--max_num_tokens=64",
         "--max-batch-size", "3", "--no-swa-bounded-replay", "--prefix_cache"]
    )  # fmt: skip
    assert (options.addresses.http_port, options.addresses.grpc_address) == (81, "0.0.0.0")
    assert options.settings == {
        "max_num_tokens": "64",
        "max_batch_size": "3",
        "swa_bounded_replay": False,
        "prefix_cache": True,
    }
    settings = ServeSettings.from_options(options.settings)
    assert (settings.max_num_tokens, settings.swa_bounded_replay) == (64, False)


def test_what_the_model_reads_is_what_was_asked() -> None:
    """Parameters of config.pbtxt are text; the model reads them as the launcher did."""
    options = read_options(
        ["--engine=e", "--no-prefix-cache", "--kv-cache-memory-fraction=0.25", "--dtype=float64"]
    )
    parameters = options.model_parameters()
    assert parameters.pop("engine_dir") == str(Path("e").resolve())
    assert ServeSettings.from_options(parameters) == ServeSettings.from_options(options.settings)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = yaml_file(
        tmp_path, "engine: from file\nhttp-port: 81\ngrpc_port: 82\nmax_seq_len: 99\ndtype:\n"
    )
    options = read_options([file, "--http-port=91"])
    assert options.engine == Path("from file")
    assert (options.addresses.http_port, options.addresses.grpc_port) == (91, 82)
    assert options.settings == {"max_seq_len": 99}


@pytest.mark.parametrize(
    ("arguments", "text", "sentence"),
    [
        ([], None, "expected --engine DIR.*got none"),
        ([], "engine: 5", "expected --engine DIR"),
        (["--engine=e"], "http_prot: 8000", "expected options of dsv41-serve, got 'http_prot'"),
        (["--engine=e"], "- a\n- b", "expected lines of `name: value` in .*, got list"),
        (["--engine=e"], "a: [1\nb: 2", "expected YAML in .*yaml, got something else at line 2"),
        (["--engine=e"], "max_seq_len: 1\nmax-seq-len: 2", "expected max_seq_len once in"),
        (["--engine=e"], "http_port: true", "expected http_port from 1 to 65535, got True"),
        (["--engine=e", "--http-port=0"], None, "expected http_port from 1 to 65535, got 0"),
        (["--engine=e", "--grpc-port=65536"], None, "expected grpc_port from 1 to 65535"),
        (["--engine=e"], "http_address: 5", "expected http_address as an address, got 5"),
        (["--engine=e", "--drain-seconds=-1"], None, "expected drain_seconds as seconds.*-1"),
        (["--engine=e", "--drain-seconds=nan"], None, "expected drain_seconds as seconds.*nan"),
        (["--engine=e", "--config-file=/nowhere.yaml"], None, "expected settings in /nowhere.yaml"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], text: str | None, sentence: str) -> None:
    if text is not None:
        arguments = [*arguments, yaml_file(tmp_path, text)]
    with pytest.raises(HostError) as caught:
        read_options(arguments)
    assert re.search(sentence, str(caught.value))


def test_a_settings_file_in_another_encoding(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes("log_file: Gr\u00fc\u00dfe".encode("latin-1"))
    with pytest.raises(HostError, match=r"expected .*latin\.yaml as UTF-8, got byte 0xfc at 12"):
        read_options(["--engine=e", f"--config-file={path}"])


@pytest.mark.parametrize("package", ["psutil", "yaml", "torch", "tokenizers", "xxhash"])
def test_a_missing_package_is_named_in_one_sentence(package: str, tmp_path: Path) -> None:
    program = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from python_backend.launcher import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    http, grpc, metrics = map(str, free_ports(3))
    found = subprocess.run(
        [
            *(sys.executable, "-c", program, "--engine", str(tmp_path)),
            *("--http-port", http, "--grpc-port", grpc, "--metrics-port", metrics),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 1
    assert found.stderr == (
        f"dsv41-serve: expected the package {package}, found none in this environment; install "
        "what serving needs with pip install -e '.[server]' in the project's folder\n"
    )


def test_every_setting_has_help_and_is_documented() -> None:
    names = {field.name for field in fields(ServeSettings)}
    assert set(SETTING_HELP) == names
    documented = set(re.findall(r"^\| `(\w+)` \|", OPERATIONS.read_text(), flags=re.MULTILINE))
    assert names | {field.name for field in fields(Addresses)} <= documented
