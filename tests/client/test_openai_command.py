"""The command that serves the OpenAI API: its options, TLS, and its end."""

from __future__ import annotations

import os
import pty
import signal
import ssl
import subprocess
import sys
from pathlib import Path

import openai
import pytest

from client.cli import main
from client.commands.openai_proxy import _origin
from tests.client.openai_proxy import chat
from tests.client.real_server import ROOT, Server

pytestmark = pytest.mark.server


def command(*options: str) -> list[str]:
    return [sys.executable, "-m", "client.cli", "openai-proxy", "--port=0", *options]


def test_the_command_serves_tls_with_keys_and_drains(server: Server, tmp_path: Path) -> None:
    """SIGTERM lets a running answer end; the exit status is 0. On standard error is the cause of a
    500, and nothing else."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out",
         str(certificate), "-days", "1", "-subj", "/CN=localhost", "-addext",
         "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    (tmp_path / "keys").write_text("# for tests\n secret \n")
    tls = [f"--tls-certificate={certificate}", f"--tls-key={key}"]
    running = subprocess.Popen(
        command(*tls, f"--url={server.grpc}", f"--api-key-file={tmp_path / 'keys'}"),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout
    assert running.stderr
    base = running.stdout.readline().split()[-1].replace("127.0.0.1", "localhost")
    assert base.startswith("https://")
    trusting = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=certificate))
    with openai.OpenAI(base_url=base, api_key="secret", http_client=trusting, max_retries=0) as api:
        with pytest.raises(openai.InternalServerError):
            chat(api, "[error_after_three]abcd")
        stream = chat(api, "[slow]abcdefghij", stream=True)
        text = next(iter(stream)).choices[0].delta.content
        running.send_signal(signal.SIGTERM)
        text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == "abcdefghij"
    assert running.wait(15) == 0, running.stderr.read()
    (line,) = running.stderr.read().splitlines()
    assert line.endswith(" ERROR 500 internal: asked to fail after three tokens")


@pytest.mark.parametrize(
    ("options", "variable", "sentence"),
    [
        (["--api-key-file=/nowhere"], None, "expected a file of API keys at /nowhere, but"),
        (["--api-key-file=/dev/null"], None, "expected at least one API key in /dev/null"),
        ([], " ,", "expected at least one API key in DSV41_API_KEYS, got none"),
        (["--tls-key=/nowhere"], None, "expected --tls-certificate and --tls-key together"),
        (
            ["--tls-key=/dev/null", "--tls-certificate=/dev/null"], None,
            "expected a certificate and its key as PEM files",
        ),
        (["--host=192.0.2.1"], None, "expected an address to listen on, but"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work(
    options: list[str], variable: str | None, sentence: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    if variable is not None:
        monkeypatch.setenv("DSV41_API_KEYS", variable)
    assert main(["openai-proxy", "--port=0", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dsv41-client: {sentence}")
    assert error.count("\n") == 1


@pytest.mark.parametrize("form", [[], ["-traditional"]])
def test_an_encrypted_key_is_refused_and_nobody_is_asked(form: list[str], tmp_path: Path) -> None:
    """At a terminal, where the library would ask and wait."""
    certificate, key, hidden = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "hidden"))
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key]
    subprocess.run([*made, "-out", certificate, "-subj", "/CN=a"], check=True, capture_output=True)
    encrypt = ["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:word", *form]
    subprocess.run([*encrypt, "-out", hidden], check=True)
    assert "ENCRYPTED" in Path(hidden).read_text()
    terminal, its_end = pty.openpty()
    done = subprocess.run(
        ["setsid", "--ctty", "--wait",
         *command(f"--tls-certificate={certificate}", f"--tls-key={hidden}")],
        stdin=its_end, stdout=its_end, stderr=subprocess.PIPE, text=True, timeout=30, cwd=ROOT,
        check=False,
    )  # fmt: skip
    os.close(its_end)
    os.close(terminal)
    assert done.returncode == 2
    assert done.stderr.startswith("dsv41-client: expected a key without a password for --tls-key")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("seconds", ["0", "-1", "nan", "inf"])
def test_a_time_limit_that_no_answer_can_keep_is_refused(
    seconds: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["openai-proxy", "--port=0", f"--request-timeout={seconds}"])
    assert caught.value.code == 2
    assert "--request-timeout: expected a finite number above 0, got " in capsys.readouterr().err


@pytest.mark.parametrize(
    "origin", ["foo", "localhost:3000", "https://a.example/", "https://A.example", "https://", ""]
)
def test_a_cors_origin_that_no_browser_sends_is_refused(
    origin: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["openai-proxy", "--port=0", f"--cors-origin={origin}"])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "--cors-origin: expected an origin as browsers send it" in said
    assert f"got {origin!r}" in said


@pytest.mark.parametrize(
    "origin",
    ["https://a.example", "http://localhost:3000", "http://[::1]:80", "app://my-page", "*"],
)
def test_cors_origins_that_are_sent(origin: str) -> None:
    assert _origin(origin) == origin


def test_without_its_packages_the_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "fastapi").mkdir()
    (tmp_path / "fastapi" / "__init__.py").write_text("raise ImportError('not installed')")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        command(), env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    assert "pip install '.[openai-proxy]'" in done.stderr
    assert done.stderr.count("\n") == 1
