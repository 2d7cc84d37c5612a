"""The TensorRT libraries: which of them is here, what is missing, and how one is loaded.

Two are known. Full TensorRT comes from the vendor's index or container and needs a GPU to build.
TensorRT-RTX parses ONNX and builds plans without a GPU; its Python bindings and its shared
libraries come in two packages, which nothing but `load` brings together.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType

_BINDINGS = "tensorrt-rtx-cu13-bindings"
_LIBRARIES = "onnxruntime-ep-nv-tensorrt-rtx-cu13"
_LIBRARIES_MODULE = "onnxruntime_ep_nv_tensorrt_rtx"
# In this order: the parser needs the core.
_CORE, _PARSER = "libtensorrt_rtx.so", "libtensorrt_onnxparser_rtx.so"


class TensorRtError(RuntimeError):
    """A TensorRT library that cannot be used; the message says what is missing and what to do."""


@dataclass(frozen=True)
class Library:
    """One TensorRT library. `tested` is the version that this software was run with, None if it
    never was; `compute_capabilities` is where its plans run, () for the GPU that built them."""

    name: str
    module: str
    tested: str | None
    needs_gpu_to_build: bool
    install: str
    compute_capabilities: tuple[str, ...]


TENSORRT = Library(
    name="tensorrt",
    module="tensorrt",
    tested=None,
    needs_gpu_to_build=True,
    install="install TensorRT 10.14 or newer from NVIDIA, or use NVIDIA's container",
    compute_capabilities=(),
)
TENSORRT_RTX = Library(
    name="tensorrt-rtx",
    module="tensorrt_rtx_bindings",
    tested="1.7.1.116",
    needs_gpu_to_build=False,
    install=f"pip install {_BINDINGS}==1.7.1.116 {_LIBRARIES}==0.5.0",
    compute_capabilities=("8.x", "12.x"),
)
LIBRARIES = {library.name: library for library in (TENSORRT, TENSORRT_RTX)}


@functools.cache
def installed_version(library: Library) -> str | None:
    """The version of the Python package, None where there is none. Imports nothing."""
    if importlib.util.find_spec(library.module) is None:
        return None
    packages = packages_distributions().get(library.module)
    return version(packages[0]) if packages else "of unknown version"


def missing(library: Library) -> str | None:
    """Why `load` cannot work on this machine, as a sentence; None where it can."""
    found = installed_version(library)
    if found is None:
        return f"{library.name} is not installed; {library.install}"
    if library is not TENSORRT_RTX:
        return None
    try:
        core, _ = _shared_libraries()
    except TensorRtError as error:
        return str(error)
    # A binding of another version than its library ends the process, not the call.
    if not f"{found}.".startswith(f"{core.name.removeprefix(f'{_CORE}.')}."):
        return (
            f"expected {_BINDINGS} and the library {core.name} to have one version, got {found}; "
            f"{library.install}"
        )
    return None


def untested(library: Library) -> str | None:
    """A warning when another version than the tested one is installed, None otherwise."""
    found = installed_version(library)
    if library.tested is None:
        return f"{library.name} {found} is used as its documentation says, and was never tested"
    if found != library.tested:
        return f"{library.name} {library.tested} was tested, {found} is installed"
    return None


@functools.cache
def load(library: Library) -> ModuleType:
    """The Python module of `library`. Raises TensorRtError.

    A process that parses ONNX with TensorRT-RTX must run in `parser_environment`.
    """
    reason = missing(library)
    if reason is not None:
        raise TensorRtError(reason)
    try:
        if library is TENSORRT_RTX:
            for path in _shared_libraries():
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        return importlib.import_module(library.module)
    except (OSError, ImportError) as error:
        raise TensorRtError(
            f"{library.name} cannot be loaded ({error}); {library.install}"
        ) from error


@contextmanager
def parser_environment(library: Library) -> Iterator[dict[str, str]]:
    """Environment variables for a child process that parses ONNX with `library`.

    The parser of TensorRT-RTX opens its core by the bare name, which the loader looks up only where
    LD_LIBRARY_PATH pointed when the process started; not finding it, it ends the process.
    """
    environment = dict(os.environ)
    if library is not TENSORRT_RTX:
        yield environment
        return
    core, _ = _shared_libraries()
    with tempfile.TemporaryDirectory(prefix="dsv41-") as directory:
        (Path(directory) / _CORE).symlink_to(core)
        paths = [directory, environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
        yield environment


def _shared_libraries() -> tuple[Path, Path]:
    """Core and ONNX parser of TensorRT-RTX."""
    spec = importlib.util.find_spec(_LIBRARIES_MODULE)
    if spec is None or spec.origin is None:
        raise TensorRtError(
            f"tensorrt-rtx lacks its shared libraries, which come with {_LIBRARIES}; "
            f"{TENSORRT_RTX.install}"
        )
    directory = Path(spec.origin).parent
    found = [sorted(directory.glob(f"{name}.*")) for name in (_CORE, _PARSER)]
    if not all(found):
        raise TensorRtError(
            f"expected {_CORE} and {_PARSER} in {directory}, found no such files; "
            f"{TENSORRT_RTX.install}"
        )
    return found[0][-1], found[1][-1]
