"""The host's side of a launch: small C modules that the Triton language compiles, one for each
signature and one for the driver. Made here on machines that need not have that driver.

    DIRECTORY/launchers/KEY.NAME.so      KEY and NAME.so as the Triton language names a module
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.nvidia import driver
from triton.runtime.build import compile_module_from_src

from plugins.device.store import LAUNCHERS

_FUNCTION = re.compile(r"\bcu[A-Z]\w+(?=\s*\()")


def keep_launcher(directory: Path, compiled: Any) -> None:
    """Put what launches a compiled kernel into `directory`. Raises OSError, RuntimeError or
    CalledProcessError where there is no C compiler, or one that fails."""
    places = compiled.src.constants, compiled.src.signature
    meta = getattr(compiled.metadata, "tensordesc_meta", None)
    _keep(directory, "__triton_launcher", driver.make_launcher(*places, meta))
    _keep(directory, "cuda_utils", _driver_source())


def _driver_source() -> str:
    return (Path(driver.dirname) / "driver.c").read_text()


def _keep(directory: Path, name: str, source: str) -> None:
    _driver_to_link_with()
    module = compile_module_from_src(
        source, name, driver.library_dirs(), driver.include_dirs, driver.libraries
    )
    built = Path(str(module.__file__))
    folder = directory / LAUNCHERS
    folder.mkdir(exist_ok=True)
    (folder / f"{built.parent.name}.{built.name}").write_bytes(built.read_bytes())


@functools.cache
def _driver_to_link_with() -> tempfile.TemporaryDirectory[str]:
    """A library by the driver's name that has its functions and does nothing, for as long as this
    process lives: modules are linked with it and loaded once."""
    folder = tempfile.TemporaryDirectory(prefix="dsv41-")
    library, source = Path(folder.name) / "libcuda.so.1", Path(folder.name) / "driver.c"
    names = sorted(set(_FUNCTION.findall(_driver_source() + driver.make_launcher({}, {}, None))))
    source.write_text("".join(f"void {name}(void) {{}}\n" for name in names))
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("expected a C compiler, found none; install gcc")
    command = [compiler, "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}"]
    subprocess.run([*command, "-o", str(library), str(source)], check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    knobs.nvidia.libcuda_path = folder.name
    return folder
