"""The child process in which a TensorRT library parses one ONNX file and builds its plan.

    python -m builder.plans.worker TASK RESULT

TASK is the JSON that `PlanBackend` writes. RESULT becomes a PlanInfo as JSON, or {"error": why}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from builder.plans.dialect import adapt
from builder.plans.ranges import Range, shapes
from engine.plans import Binding, PlanInfo
from plugins.tensorrt_library import LIBRARIES, TensorRtError, installed_version, load
from plugins.tensorrt_plugin import operators_digest, register_plugins, torch_dtype


def main(task_file: Path, result_file: Path) -> None:
    task = json.loads(task_file.read_text())
    try:
        answer = asdict(build(task))
    except TensorRtError as error:
        answer = {"error": str(error)}
    except OSError as error:
        answer = {"error": f"cannot use {error.filename or task['plan']}: {error.strerror}"}
    new = result_file.with_suffix(".new")
    new.write_text(json.dumps(answer))
    os.replace(new, result_file)


def build(task: Mapping[str, Any]) -> PlanInfo:
    """Parse, build, write. Raises TensorRtError and OSError."""
    library = LIBRARIES[task["library"]]
    trt = load(library)
    ranges = {name: Range(**given) for name, given in task["ranges"].items()}
    started = time.monotonic()
    log = _make_log(trt)
    builder = trt.Builder(log)
    register_plugins(trt)
    strongly_typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(strongly_typed)
    parser = trt.OnnxParser(network, log)
    model = _read(Path(task["onnx"]))
    aliased = adapt(model)
    # The path is where the parser looks for weights outside of the model.
    if not parser.parse(model.SerializeToString(), task["onnx"]):
        raise TensorRtError(_parser_error(parser, library.name, log))
    config = builder.create_builder_config()
    # Without it a plugin's output cannot be its input's memory, and caches would be copied.
    config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    inputs = [_input(network.get_input(i), ranges) for i in range(network.num_inputs)]
    profile = builder.create_optimization_profile()
    for tensor in inputs:
        profile.set_shape(tensor.name, tensor.minimum, tensor.optimum, tensor.maximum)
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise TensorRtError(f"{library.name} makes no plan of it: {log.error}")
    seconds = time.monotonic() - started
    with Path(task["plan"]).open("wb") as file:
        file.write(plan)
    outputs = [_output(network.get_output(i), aliased) for i in range(network.num_outputs)]
    return PlanInfo(
        library=library.name,
        version=str(installed_version(library)),
        compute_capabilities=library.compute_capabilities or (_this_gpu(),),
        num_bytes=int(plan.nbytes),
        seconds=round(seconds, 3),
        bindings=(*inputs, *outputs),
        operators=operators_digest(),
    )


def _read(path: Path) -> onnx.ModelProto:
    """The model without its external weights. Raises TensorRtError."""
    try:
        return onnx.load(path, load_external_data=False)
    except DecodeError as error:
        raise TensorRtError(f"expected an ONNX model, found something else ({error})") from None


def _make_log(trt: ModuleType) -> Any:
    """A logger that repeats warnings on stderr and keeps the last error."""

    class Log(trt.ILogger):  # type: ignore[misc, name-defined]
        error = "no reason was given"

        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.error = message
            if severity <= trt.ILogger.Severity.WARNING:
                print(message, file=sys.stderr)

    return Log()


def _parser_error(parser: Any, library: str, log: Any) -> str:
    """The first complaint, with the node that it is about."""
    if not parser.num_errors:
        return f"{library} cannot read it: {log.error}"
    error = parser.get_error(0)
    operator, name = error.node_operator(), error.node_name()
    node = f"node {error.node()} {name!r} ({operator})" if operator else "the graph"
    # Without a GPU the library complains about that beside every other complaint.
    reasons = [line for line in error.desc().splitlines() if "catchCudaError" not in line]
    return f"{library} refuses {node}: {' '.join(reasons)}"


def _input(tensor: Any, ranges: Mapping[str, Range]) -> Binding:
    shape = tuple(tensor.shape)
    dims = [
        tensor.get_dimension_name(axis) or "" if size < 0 else size
        for axis, size in enumerate(shape)
    ]
    smallest, tuned, largest = shapes(tensor.name, dims, ranges)
    return Binding(tensor.name, True, _dtype_name(tensor), shape, smallest, tuned, largest)


def _output(tensor: Any, aliased: Mapping[str, str]) -> Binding:
    shape, alias = tuple(tensor.shape), aliased.get(tensor.name)
    return Binding(tensor.name, False, _dtype_name(tensor), shape, alias=alias)


def _dtype_name(tensor: Any) -> str:
    return str(torch_dtype(tensor.dtype)).removeprefix("torch.")


def _this_gpu() -> str:
    return "{}.{}".format(*torch.cuda.get_device_capability(0))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
