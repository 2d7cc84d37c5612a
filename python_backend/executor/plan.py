"""Runs a step on the TensorRT plans of an engine.

A plan holds the network's weights; caches, page tables and Engram tables are its inputs, named and
sized as engine/segments.py says. Caches are written in place.

    reason = refusal(engine, dtype)         why this machine cannot run them, None where it can
    executor = open_plans(engine, dtype)(pools)

Never run on a device: no machine at hand has a GPU that TensorRT-RTX supports, or full TensorRT.
What a plan is given and gives was run with the exported graph in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from engine.directory import Engine
from engine.manifest import EngineError
from engine.network.block import Residual
from engine.network.decoder import DecoderOutput
from engine.network.draft import DraftOutput
from engine.paged_cache import CachePools
from engine.plans import Binding, PlanInfo, plan_file, read_plans
from engine.segments import CACHES, decoder_tensors, draft_tensors, encoder_tensors
from plugins.tensorrt_library import LIBRARIES, TensorRtError, installed_version, load, missing
from plugins.tensorrt_plugin import operators_digest, register_plugins
from python_backend.executor.inputs import HostDraft, HostStep
from python_backend.executor.torch_executor import PagedExecutor
from python_backend.settings import SettingsError

SEGMENTS = ("encoder", "decoder")  # that serving needs; a draft plan where the model drafts
DEVICE = "cuda"


class Session(Protocol):
    """One segment that can run. `tensors` may have more names than the segment reads; caches
    among them are written in place."""

    def run(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]: ...


class PlanExecutor(PagedExecutor):
    """`sessions` by segment. `engram`: the Engram tables on the pools' device, see
    `engram_tables`."""

    def __init__(
        self,
        sessions: Mapping[str, Session],
        engram: Mapping[str, torch.Tensor],
        pools: CachePools,
        *,
        device: str = DEVICE,
    ) -> None:
        super().__init__(pools, device=device)
        self._sessions = sessions
        self._engram = engram

    def _forward(self, step: HostStep) -> DecoderOutput:
        batch, tables = step.upload(self._device)
        inputs = encoder_tensors(batch, tables, self._pools, self._engram)
        encoded = self._sessions["encoder"].run(inputs)
        if batch.decoder_rows.shape[0] == 0:  # a chunk that ends below every decoder floor
            return DecoderOutput(torch.empty(0), torch.empty(0))
        residual = Residual(encoded["streams"], encoded["pre"])
        inputs = decoder_tensors(batch, tables, self._pools, residual)
        decoded = self._sessions["decoder"].run(inputs)
        return DecoderOutput(decoded["logits"], decoded["draft_features"])

    def _draft(self, draft: HostDraft, features: torch.Tensor) -> DraftOutput | None:
        """The graph wants at least one anchor; nobody reads what is drafted behind the padding."""
        if not len(draft.rows):  # nor an anchor: its own row would have to be stored
            return None
        num_anchors = draft.shape.anchors
        padded = draft.padded(draft.shape._replace(anchors=max(num_anchors, 1)))
        given = padded.upload(self._device)
        context = (features.index_select(0, given.rows), given.request, given.positions)
        tensors = draft_tensors(context, given.anchors, given.tables, self._pools)
        made = self._sessions["draft"].run(tensors)
        return DraftOutput(made["tokens"], made["confidence"]) if num_anchors else None


# -- what a machine can run ------------------------------------------------------------------------


def refusal(engine: Engine, dtype: torch.dtype) -> str | None:
    """Why the engine's plans cannot run on this machine in `dtype`, as a sentence; None where they
    can."""
    found = torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None
    return refusal_on(engine.path, read_plans(engine.path), dtype, found)


def refusal_on(
    path: Path,
    plans: Mapping[str, PlanInfo],
    dtype: torch.dtype,
    compute_capability: tuple[int, int] | None,
) -> str | None:
    """The same on a machine with such a GPU, None without one."""
    absent = [segment for segment in SEGMENTS if segment not in plans]
    if absent:
        return (
            f"expected the engine {path} to have plans, found none for {' and '.join(absent)}; "
            "build it with dsv41-build engine --plans, or leave --executor out"
        )
    built_for = next(b.dtype for b in plans["encoder"].bindings if b.name == "streams")
    if f"torch.{built_for}" != str(dtype):
        return (
            f"expected --dtype {built_for}, which the plans of {path} compute in, got "
            f"{str(dtype).removeprefix('torch.')}"
        )
    if compute_capability is None:
        return f"expected a GPU for the plans of {path}, found no CUDA device; leave --executor out"
    for segment, plan in plans.items():
        library = LIBRARIES[plan.library]
        built = f"the {segment} plan of {path}, built by {plan.library} {plan.version},"
        if plan.operators != operators_digest():
            return f"{built} calls operators that this software has changed; build the engine again"
        if not plan.runs_on(*compute_capability):
            wanted = " or ".join(plan.compute_capabilities)
            found = "{}.{}".format(*compute_capability)
            return (
                f"{built} runs on compute capability {wanted}, and this GPU has {found}; build the "
                "engine on this machine with full TensorRT, or leave --executor out"
            )
        reason = missing(library)
        if reason is not None:
            return f"{built} cannot be loaded: {reason}"
        if installed_version(library) != plan.version:
            return (
                f"{built} cannot be loaded by {installed_version(library)}: a plan needs the "
                "version that built it; install that, or build the engine again"
            )
    return None


def engram_tables(engine: Engine, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """The Engram tables in the device's memory, by the names that the encoder has for them."""
    source = engine.source()
    tables = {}
    for table in engine.tables:
        rows = source.read(table.tensor_name)
        kept = rows.to(dtype) if rows.is_floating_point() else rows
        tables[f"engram_table_{table.layer}"] = kept.to(device)
    return tables


# -- one plan --------------------------------------------------------------------------------------


def bind(info: PlanInfo, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors that the plan reads, as it wants them: contiguous, packed bytes as int8.

    Raises SettingsError for a tensor that is missing or of another dtype or size than the plan was
    built for.
    """
    return {binding.name: _bound(binding, tensors) for binding in info.bindings if binding.is_input}


def check_pools(info: PlanInfo, pools: CachePools) -> None:
    """Raise SettingsError for pools of another page size or dtype than the plan was built for."""
    given = {name: getattr(pools, name) for name in CACHES}
    for binding in info.bindings:
        if binding.is_input and binding.name in given:
            _bound(binding, given)


def _bound(binding: Binding, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    name = binding.name
    if name not in tensors:
        raise SettingsError(
            f"the plan reads {name}, which this software does not give; build the engine again"
        )
    tensor = tensors[name]
    if tensor.dtype == torch.uint8:
        tensor = tensor.view(torch.int8)
    shape, lowest, highest = tensor.shape, binding.minimum, binding.maximum
    fits = len(shape) == len(lowest) and all(
        low <= size <= high for size, low, high in zip(shape, lowest, highest, strict=True)
    )
    if not fits or str(tensor.dtype) != f"torch.{binding.dtype}":
        sizes = ", ".join(
            str(low) if low == high else f"{low} … {high}"
            for low, high in zip(lowest, highest, strict=True)
        )
        raise SettingsError(
            f"expected {name} as {binding.dtype} [{sizes}], what the plan was built for, got "
            f"{str(tensor.dtype).removeprefix('torch.')} {list(shape)}; serve with the settings "
            "that the plans were built with, or build the engine again"
        )
    return tensor.contiguous()


class PlanSession:
    """A plan on the current device, on torch's current stream."""

    def __init__(self, trt: ModuleType, path: Path, info: PlanInfo) -> None:
        """Raises EngineError when the library does not take the plan."""
        self._info = info
        self._runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
        self._engine: Any = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if self._engine is None:
            raise EngineError(
                f"{info.library} {info.version} does not load {path}; its messages say why. Build "
                "the engine again on this machine"
            )
        self._context: Any = self._engine.create_execution_context()
        # TensorRT wants an address for tensors without elements too.
        self._nothing = torch.empty(1, device=DEVICE)

    def run(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        bound = bind(self._info, tensors)
        for name, tensor in bound.items():
            self._context.set_input_shape(name, tuple(tensor.shape))
            self._set_address(name, tensor)
        outputs = {}
        for binding in self._info.bindings:
            if binding.is_input:
                continue
            if binding.alias is not None:
                tensor = bound[binding.alias]
            else:
                shape = tuple(self._context.get_tensor_shape(binding.name))
                tensor = torch.empty(shape, dtype=getattr(torch, binding.dtype), device=DEVICE)
            self._set_address(binding.name, tensor)
            outputs[binding.name] = tensor
        if not self._context.execute_async_v3(torch.cuda.current_stream().cuda_stream):
            raise RuntimeError(f"a plan of {self._info.library} did not run; its messages say why")
        return outputs

    def _set_address(self, name: str, tensor: torch.Tensor) -> None:
        self._context.set_tensor_address(
            name, (tensor if tensor.numel() else self._nothing).data_ptr()
        )


def open_plans(engine: Engine, dtype: torch.dtype) -> Callable[[CachePools], PlanExecutor]:
    """Load the plans; the executor then wants its pools.

    Raises EngineError with the sentence of `refusal`, or the library's own reason; the second step
    SettingsError for pools that the plans were not built for.
    """
    reason = refusal(engine, dtype)
    if reason is not None:
        raise EngineError(reason)
    plans = read_plans(engine.path)
    sessions = {}
    for segment, plan in plans.items():
        try:
            trt = load(LIBRARIES[plan.library])
        except TensorRtError as error:
            raise EngineError(str(error)) from error
        register_plugins(trt)
        sessions[segment] = PlanSession(trt, plan_file(engine.path, segment), plan)
    tables = engram_tables(engine, dtype, DEVICE)

    def executor(pools: CachePools) -> PlanExecutor:
        for plan in plans.values():
            check_pools(plan, pools)
        return PlanExecutor(sessions, tables, pools)

    return executor
