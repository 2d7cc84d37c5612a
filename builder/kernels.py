"""The kernels of an engine, compiled for GPUs that this machine need not have.

What there is to compile is found in a process of its own (python_backend/executor/launches.py: only
the server knows its steps); several others compile it.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path

from builder.progress import Progress
from engine.config import ConfigError
from engine.kernels import KernelsInfo, kernels_dir, write_kernels

_SOURCE_ROOT = Path(__file__).resolve().parents[1]
_DTYPE = "bfloat16"  # that GPUs serve in
_MOST_PROCESSES = 16  # of a compiler that takes some 300 MiB
_LAST_WORDS = 400  # characters of a dead child's stderr that a message quotes


class KernelError(ConfigError):
    """Kernels that cannot be found or compiled."""


def check_kernels(targets: Sequence[str], tp_size: int) -> None:
    """Raises ConfigError where kernels cannot be compiled for `targets`, before anything is."""
    if tp_size != 1:
        raise ConfigError(
            f"kernels: expected an engine of one rank, got tp_size {tp_size}; leave one out"
        )
    if find_spec("triton") is None:
        raise ConfigError(
            "kernels: expected the package triton, found none; in a checkout, "
            "pip install '.[kernels]'"
        )
    from plugins.device.record import TARGETS

    unknown = [target for target in targets if target not in TARGETS]
    if unknown:
        raise ConfigError(f"kernels: expected {', '.join(TARGETS)}, got {', '.join(unknown)}")


def build_kernels(
    engine: Path,
    targets: Sequence[str],
    progress: Progress,
    report: Callable[[str], None],
) -> list[str]:
    """Write kernels/ of an engine that is complete but for its manifest; `report` gets lines for
    people. Returns warnings: a kernel that a target cannot take is left out. Raises KernelError."""
    directory = kernels_dir(engine)
    directory.mkdir()
    kernels, warnings = {}, []
    for target in dict.fromkeys(targets):
        started = time.monotonic()
        report(f"kernels for {target}: finding out which ones a server launches")
        variants = _find(engine, target)
        progress.start(f"kernels for {target}", len(variants), "kernels")
        sizes, failures = _compile(directory, target, variants, progress)
        progress.finish()
        warnings += failures
        info = KernelsInfo(
            dtype=_DTYPE,
            triton=version("triton"),
            python=".".join(platform.python_version_tuple()[:2]),
            count=len(sizes),
            num_bytes=sum(sizes),
            seconds=round(time.monotonic() - started, 1),
        )
        kernels[target] = info
        report(
            f"kernels for {target}: {info.count}, {info.num_bytes / 2**20:,.1f} MiB, "
            f"in {info.seconds:.0f} s"
        )
    write_kernels(engine, kernels)
    return list(dict.fromkeys(warnings))


def _environment() -> dict[str, str]:
    """Of a child, whose kernels are not interpreted."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(_SOURCE_ROOT), kept.get("PYTHONPATH", "")]
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}


def _find(engine: Path, target: str) -> list[str]:
    command = [sys.executable, "-P", "-m", "python_backend.executor.launches"]
    done = subprocess.run(
        [*command, str(engine), _DTYPE, target],
        env=_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        words = " ".join(done.stderr.split())[-_LAST_WORDS:]
        raise KernelError(f"kernels: cannot find out what a server launches: {words}")
    return done.stdout.splitlines()


def _compile(
    directory: Path, target: str, variants: Sequence[str], progress: Progress
) -> tuple[list[int], list[str]]:
    """Bytes of what was stored, and why the rest was not."""
    sizes: list[int] = []
    failures: list[str] = []
    compile_one = functools.partial(_compile_one, directory, target)
    try:
        with ProcessPoolExecutor(
            min(_MOST_PROCESSES, os.cpu_count() or 1), get_context("spawn"), _forget_interpreter
        ) as processes:
            for size, failure in processes.map(compile_one, variants):
                sizes += [size] if size else []
                failures += [failure] if failure else []
                progress.advance(1)
    except BrokenProcessPool:
        raise KernelError(
            "kernels: a compiler was killed, for want of memory perhaps; free some and build again"
        ) from None
    return sizes, failures


def _forget_interpreter() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _compile_one(directory: Path, target: str, variant: str) -> tuple[int, str]:
    """Bytes, and what went wrong."""
    from plugins.device.launchers import keep_launcher
    from plugins.device.record import TARGETS, Variant, compile_variant
    from plugins.device.store import keep

    one = Variant(*json.loads(variant))
    name = f"{one.module}.{one.kernel} for {target}"
    try:
        compiled = compile_variant(one, target)
    except Exception as error:  # a compiler's are of many kinds
        reason = (str(error).splitlines() or [""])[0]
        return 0, f"left out {name}, which does not compile: {reason or type(error).__name__}"
    shared, room = compiled.metadata.shared, TARGETS[target].shared_memory
    if shared > room:
        return 0, f"left out {name}, which needs {shared} bytes of shared memory and has {room}"
    size = keep(directory, target, compiled)
    try:
        keep_launcher(directory, compiled)
    except (OSError, RuntimeError, subprocess.CalledProcessError):
        return size, (
            "left out what launches the kernels, for want of a C compiler or of Python's headers; "
            "a server then needs both"
        )
    return size, ""
