"""One interface to the TensorRT libraries that turn an exported segment into a plan.

The library works in a child process: it wants an environment that a running process cannot give
itself, and when it dies it takes that child along and not the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from builder.plans.ranges import Range
from engine.directory import PARTIAL_SUFFIX
from engine.plans import PlanInfo
from plugins.tensorrt_library import (
    LIBRARIES,
    Library,
    TensorRtError,
    installed_version,
    missing,
    parser_environment,
    untested,
)

_SOURCE_ROOT = Path(__file__).resolve().parents[2]
_LAST_WORDS = 400  # characters of a dead child's stderr that the message quotes


class PlanError(TensorRtError):
    """A plan that cannot be built; the message names the segment, the node and the reason."""


@dataclass(frozen=True)
class PlanRequest:
    """`ranges`: what each symbolic dimension of the inputs may be, by its name in the file."""

    onnx: Path
    plan: Path
    ranges: Mapping[str, Range]


@dataclass(frozen=True)
class PlanBackend:
    """Builds plans with one library. Raises PlanError; then no file of that name is left."""

    library: Library

    @property
    def name(self) -> str:
        return self.library.name

    def available(self) -> str | None:
        """Why no plan can be built on this machine, None where it can."""
        reason = missing(self.library)
        if reason is None and self.library.needs_gpu_to_build and not torch.cuda.is_available():
            return f"{self.name} builds plans on a GPU only, and this machine has none"
        return reason

    def describe(self) -> str:
        """Name and version of the library, with a warning where it is not the tested one."""
        warning = untested(self.library)
        text = f"{self.name} {installed_version(self.library)}"
        return text if warning is None else f"{text} ({warning})"

    def build(self, request: PlanRequest) -> PlanInfo:
        reason = self.available()
        if reason is not None:
            raise PlanError(reason)
        partial = request.plan.with_name(request.plan.name + PARTIAL_SUFFIX)
        try:
            info = self._run(request, partial)
            os.replace(partial, request.plan)
        finally:
            with contextlib.suppress(FileNotFoundError):
                partial.unlink()
        return info

    def _run(self, request: PlanRequest, partial: Path) -> PlanInfo:
        with (
            parser_environment(self.library) as environment,
            tempfile.TemporaryDirectory(prefix="dsv41-") as scratch,
        ):
            task, result, log = (Path(scratch) / name for name in ("task", "result", "log"))
            task.write_text(
                json.dumps(
                    {
                        "library": self.name,
                        "onnx": str(request.onnx.absolute()),
                        "plan": str(partial.absolute()),
                        "ranges": {name: asdict(r) for name, r in request.ranges.items()},
                    }
                )
            )
            paths = [str(_SOURCE_ROOT), environment.get("PYTHONPATH", "")]
            environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
            with log.open("wb") as stream:
                child = subprocess.run(
                    [sys.executable, "-P", "-m", "builder.plans.worker", str(task), str(result)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    check=False,
                )
            if not result.is_file():
                raise PlanError(self._death(request, child.returncode, log))
            answer = json.loads(result.read_text())
        if "error" in answer:
            raise PlanError(f"{request.onnx.name}: {answer['error']}")
        return PlanInfo.from_json(answer)

    def _death(self, request: PlanRequest, returncode: int, log: Path) -> str:
        how = f"status {returncode}"
        if returncode < 0:
            how = signal.Signals(-returncode).name
        words = " ".join(log.read_text(errors="replace").split())[-_LAST_WORDS:]
        return (
            f"{request.onnx.name}: {self.name} {installed_version(self.library)} ended with {how} "
            f"while building, last words: {words or 'none'}; the engine has no such plan"
        )


BACKENDS = {name: PlanBackend(library) for name, library in LIBRARIES.items()}


def usable_backend() -> PlanBackend:
    """The backend that builds plans on this machine, full TensorRT where there is a choice.

    Raises PlanError with what each of them lacks.
    """
    reasons = {name: backend.available() for name, backend in BACKENDS.items()}
    for name, reason in reasons.items():
        if reason is None:
            return BACKENDS[name]
    raise PlanError(
        "no library here builds TensorRT plans: " + "; or ".join(map(str, reasons.values()))
    )
