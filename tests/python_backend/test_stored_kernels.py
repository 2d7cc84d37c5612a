"""Which engines' kernels a server on a GPU takes, and what it says."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.kernels import KernelsInfo, kernels_dir, write_kernels
from python_backend import service
from python_backend.service import CheckedEngine, stored_kernels
from python_backend.settings import ServeSettings, SettingsError

pytest.importorskip("triton")

from plugins.device import store
from plugins.device.store import KernelStore, MissingKernelError

INFO = KernelsInfo("bfloat16", "3.6.0", "3.11", count=2, num_bytes=9, seconds=1.0)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with kernels for sm_90, on a machine with such a GPU that nobody installs a cache on."""
    kernels_dir(tmp_path).mkdir()
    write_kernels(tmp_path, {"sm_90": INFO})
    monkeypatch.setattr(store, "device_target", lambda: "sm_90")
    monkeypatch.setattr(KernelStore, "serve", lambda self: None)
    return tmp_path


def checked(engine: Path, **settings: Any) -> CheckedEngine:
    given = replace(ServeSettings(device="cuda", dtype="bfloat16"), **settings)
    opened = cast(Any, SimpleNamespace(path=engine))
    return CheckedEngine(opened, given, None, frozenset(), service.NO_DEFAULTS)


def test_a_server_takes_the_kernels_of_its_gpu_and_dtype(
    engine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert stored_kernels(checked(engine)) is not None
    assert stored_kernels(checked(engine, device="cpu")) is None
    assert caplog.messages == []
    assert stored_kernels(checked(engine, dtype="float32")) is None
    (message,) = caplog.messages
    assert "the engine has no kernels for sm_90 and float32" in message
    assert "--kernels sm_90" in message


def test_without_a_compiler_the_kernels_must_be_there(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stored_kernels(checked(engine, compile_kernels=False)) is not None
    monkeypatch.setattr(store, "device_target", lambda: "sm_120")
    with pytest.raises(SettingsError, match="expected kernels for sm_120 and bfloat16"):
        stored_kernels(checked(engine, compile_kernels=False))


def test_what_was_found_and_what_was_not_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    (tmp_path / "sm_90").mkdir()
    (tmp_path / "sm_90" / "KEY.cubin").touch()
    kernels = KernelStore(tmp_path, "sm_90", only=False)
    assert kernels.files("KEY", "norm") == {
        "norm.json": str(tmp_path / "sm_90" / "KEY.json"),
        "norm.cubin": str(tmp_path / "sm_90" / "KEY.cubin"),
    }
    kernels.log()
    assert caplog.messages == ["all 1 kernels for sm_90 came with the engine"]
    caplog.clear()
    assert kernels.files("OTHER", "norm") is None
    assert caplog.records[0].levelname == "WARNING"  # now it stops a step
    assert caplog.messages[0].startswith("compiling ")
    kernels.log()
    assert caplog.messages[1].startswith("1 of 2 kernels for sm_90 came with the engine")
    caplog.clear()
    starting = KernelStore(tmp_path, "sm_90", only=False)
    assert starting.files("OTHER", "norm") is None
    assert [one.levelname for one in caplog.records] == ["INFO"]
    with pytest.raises(MissingKernelError, match="serve with compile_kernels"):
        KernelStore(tmp_path, "sm_90", only=True).files("OTHER", "norm")
