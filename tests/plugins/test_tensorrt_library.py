"""Finding the TensorRT libraries, and what is said when they are not as they should be."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from plugins import tensorrt_library
from plugins.tensorrt_library import (
    TENSORRT,
    TENSORRT_RTX,
    Library,
    TensorRtError,
    installed_version,
    load,
    missing,
    parser_environment,
    untested,
)

needs_rtx = pytest.mark.skipif(missing(TENSORRT_RTX) is not None, reason=str(missing(TENSORRT_RTX)))


@needs_rtx
def test_the_tested_version_is_here_and_loads() -> None:
    """The version that the lock file pins, asked of the library itself."""
    assert installed_version(TENSORRT_RTX) == "1.7.1.116"
    assert untested(TENSORRT_RTX) is None
    assert load(TENSORRT_RTX).__version__ == "1.7.1.116"


@needs_rtx
@pytest.mark.parametrize("before", [None, "/somewhere/lib"])
def test_a_child_process_finds_the_core_by_its_bare_name(
    before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if before is None:
        monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    else:
        monkeypatch.setenv("LD_LIBRARY_PATH", before)
    with parser_environment(TENSORRT_RTX) as environment:
        first, *others = environment["LD_LIBRARY_PATH"].split(":")
        assert others == ([] if before is None else [before])
        assert (Path(first) / "libtensorrt_rtx.so").resolve().name == "libtensorrt_rtx.so.1.7.1"
        assert environment["PATH"] == os.environ["PATH"]
    assert not Path(first).exists()


@pytest.mark.skipif("tensorrt" in sys.modules, reason="full TensorRT is here")
def test_full_tensorrt_is_named_as_missing_and_as_untested() -> None:
    if installed_version(TENSORRT) is None:
        assert str(missing(TENSORRT)).startswith("tensorrt is not installed; install TensorRT 10")
        with pytest.raises(TensorRtError, match="tensorrt is not installed"):
            load(TENSORRT)
    assert str(untested(TENSORRT)).endswith("was never tested")


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        (None, "tensorrt-rtx is not installed; pip install tensorrt-rtx-cu13-bindings==1.7.1.116 "),
        ("1.7.10.3", "one version, got 1.7.10.3; pip install tensorrt-rtx-cu13-bindings==1.7.1"),
        ("1.7.1.200", "None"),
    ],
)
@needs_rtx
def test_other_versions(found: str | None, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bindings without their library's version are refused; another build number is said."""

    def installed(library: Library) -> str | None:
        return found

    monkeypatch.setattr(tensorrt_library, "installed_version", installed)
    assert complaint in str(missing(TENSORRT_RTX))
    if found == "1.7.1.200":
        warning = "tensorrt-rtx 1.7.1.116 was tested, 1.7.1.200 is installed"
        assert untested(TENSORRT_RTX) == warning


@needs_rtx
def test_bindings_without_their_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tensorrt_library, "_LIBRARIES_MODULE", "no_such_package")
    assert "lacks its shared libraries, which come with onnx" in str(missing(TENSORRT_RTX))
    (tmp_path / "empty_package").mkdir()
    (tmp_path / "empty_package/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tensorrt_library, "_LIBRARIES_MODULE", "empty_package")
    assert "empty_package, found no such files; pip install" in str(missing(TENSORRT_RTX))
