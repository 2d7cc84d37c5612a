"""What an engine, a checkpoint or a configuration is: sizes, cache costs, and where it fits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from builder.checkpoint import Checkpoint
from builder.layout import Shard, WeightSpec, all_weights
from builder.pack import check_world_size, rank_bytes
from engine.cache_sizes import global_page_bytes, tail_bytes, window_page_bytes
from engine.config import ConfigError, ModelConfig
from engine.directory import Engine
from engine.kernels import KernelsInfo, read_kernels
from engine.plans import PlanInfo, read_plans
from engine.tensor_source import TensorSource

# Memory of one GPU in units of 10^9 bytes, as the data sheets give it.
GPUS = {"H100": 80, "H200": 141, "B200": 180, "GB200": 186, "B300": 288, "GB300": 288}
# The rest is for activations, graphs, libraries and what the driver keeps.
USABLE_SHARE = 0.9
_WORLD_SIZES = (1, 2, 4, 8, 16, 32, 64)
_UNITS = {
    "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """What is inspected: each weight's stored bytes, and the limits of a request.

    `tp_size` is None where the number of ranks is still open.
    """

    title: str
    config: ModelConfig
    sizes: Sequence[tuple[WeightSpec, int]]
    quantization: Mapping[str, str]
    max_seq_len: int
    tp_size: int | None
    plans: Mapping[str, PlanInfo] = field(default_factory=dict)
    kernels: Mapping[str, KernelsInfo] = field(default_factory=dict)


def subject_of_config(name: str, config: ModelConfig) -> Subject:
    """A model that exists only as a configuration, sized in the released layout."""
    sizes = [
        (weight, sum(info.num_bytes for info in weight.released().values()))
        for weight in all_weights(config)
    ]
    layout = {"linears": "fp8", "experts": "fp4", "engram_rows": "fp8"}
    return Subject(
        f"configuration {name}", config, sizes, layout, config.max_position_embeddings, None
    )


def subject_of_checkpoint(checkpoint: Checkpoint) -> Subject:
    config = checkpoint.config
    return Subject(
        f"checkpoint {checkpoint.directory.name}",
        config,
        list(_stored_sizes(config, checkpoint.source)),
        checkpoint.quantization,
        config.max_position_embeddings,
        None,
    )


def subject_of_engine(engine: Engine) -> Subject:
    """Bytes summed over the ranks, replicated weights counted once per rank."""
    totals: dict[WeightSpec, int] = {}
    for rank in range(engine.build.tp_size):
        for weight, num_bytes in _stored_sizes(engine.config, engine.source(rank)):
            if weight.shard is Shard.TABLE and rank:
                continue  # one file for all ranks
            totals[weight] = totals.get(weight, 0) + num_bytes
    return Subject(
        f"engine {engine.path.name}",
        engine.config,
        list(totals.items()),
        engine.quantization,
        engine.build.max_seq_len,
        engine.build.tp_size,
        read_plans(engine.path),
        read_kernels(engine.path),
    )


def describe(subject: Subject, memory: int | None) -> dict[str, Any]:
    """All figures, in bytes, as JSON-ready values. `memory` is what one rank may use."""
    config = subject.config
    groups: dict[str, int] = {}
    for weight, num_bytes in subject.sizes:
        groups[weight.group] = groups.get(weight.group, 0) + num_bytes
    tables = sum(size for weight, size in subject.sizes if weight.shard is Shard.TABLE)
    per_token = global_page_bytes(config, config.max_ratio) / config.max_ratio
    stages = config.num_nextn_predict_layers
    window = window_page_bytes(config, config.sliding_window)
    draft_window = window * stages // config.num_layers_total
    request = window + tail_bytes(config)
    longest = request + math.ceil(per_token * subject.max_seq_len)
    report: dict[str, Any] = {
        "subject": subject.title,
        "model": config.to_dict(),
        "quantization": dict(subject.quantization),
        "weight_bytes": dict(sorted(groups.items(), key=lambda item: -item[1])),
        "total_bytes": sum(groups.values()),
        "table_bytes": tables,
        "cache": {
            "global_bytes_per_token": per_token,
            "window_bytes_per_request": window - draft_window,
            "draft_window_bytes_per_request": draft_window,
            "compressor_bytes_per_request": tail_bytes(config),
            "max_seq_len": subject.max_seq_len,
            "longest_request_bytes": longest,
        },
        "gpus": [_gpu_fit(subject, name, gb, longest) for name, gb in GPUS.items()],
    }
    if subject.plans:
        report["plans"] = {segment: _plan(plan) for segment, plan in subject.plans.items()}
    if subject.kernels:
        report["kernels"] = {target: asdict(info) for target, info in subject.kernels.items()}
    if memory is not None:
        report["capacity"] = _capacity(subject, memory, per_token, request)
    return report


def parse_memory(text: str) -> int:
    """Bytes of "80GiB", "141 GB" or a plain number. Raises ConfigError."""
    digits = text.strip().rstrip("BbIiKkMmGgTt ")
    unit = text.strip()[len(digits) :].strip().upper()
    unit += "B" if unit in ("K", "M", "G", "T") else ""
    try:
        value = float(digits) * _UNITS[unit]
    except (ValueError, KeyError):
        value = math.nan
    if not value > 0 or math.isinf(value):
        raise ConfigError(f"memory: expected a size such as 80GiB or 141GB, got {text}")
    return int(value)


def _stored_sizes(config: ModelConfig, source: TensorSource) -> Iterator[tuple[WeightSpec, int]]:
    for weight in all_weights(config):
        companions = (".rows", ".weight_scale", ".weight_scale_2")
        names = [weight.name, weight.scale_name or "", *(weight.base + c for c in companions)]
        present = {name for name in names if name in source}
        if present:
            yield weight, sum(source.describe(name).num_bytes for name in present)


def _capacity(subject: Subject, memory: int, per_token: float, request: int) -> dict[str, Any]:
    """What is left for the caches when one rank may use `memory` bytes."""
    weights = _largest_rank(subject, subject.tp_size or 1)
    free = memory - weights
    return {
        "memory_bytes": memory,
        "weights_bytes": weights,
        "free_bytes": max(free, 0),
        "requests_at_max_seq_len": max(int(free // (request + per_token * subject.max_seq_len)), 0),
        "cached_tokens": max(int((free - request) // per_token), 0),
    }


def _gpu_fit(subject: Subject, name: str, gigabytes: int, request: int) -> dict[str, Any]:
    """The smallest number of such GPUs that hold the weights and one request of full length."""
    usable = int(gigabytes * 10**9 * USABLE_SHARE)
    sizes = _WORLD_SIZES if subject.tp_size is None else (subject.tp_size,)
    for world_size in sizes:
        if subject.tp_size is None and not _divides(subject.config, world_size):
            continue
        if _largest_rank(subject, world_size) + request <= usable:
            return {"name": name, "memory_bytes": gigabytes * 10**9, "gpus_needed": world_size}
    return {"name": name, "memory_bytes": gigabytes * 10**9, "gpus_needed": None}


def _largest_rank(subject: Subject, world_size: int) -> int:
    if subject.tp_size is None:
        return rank_bytes(subject.config, subject.sizes, world_size)
    in_ranks = sum(size for weight, size in subject.sizes if weight.shard is not Shard.TABLE)
    return -(-in_ranks // world_size)


def _plan(plan: PlanInfo) -> dict[str, Any]:
    return {
        "built_by": f"{plan.library} {plan.version}",
        "compute_capabilities": list(plan.compute_capabilities),
        "bytes": plan.num_bytes,
        "build_seconds": plan.seconds,
    }


def _divides(config: ModelConfig, world_size: int) -> bool:
    try:
        check_world_size(config, world_size)
    except ConfigError:
        return False
    return True


# -- for people ------------------------------------------------------------------------------------


def render(report: Mapping[str, Any]) -> str:
    """The report as text for a terminal."""
    return "\n".join(_lines(report))


def _lines(report: Mapping[str, Any]) -> Iterable[str]:
    model, cache = report["model"], report["cache"]
    yield report["subject"]
    yield ""
    stored = ", ".join(f"{part} {dtype}" for part, dtype in report["quantization"].items())
    yield (
        f"  layers {model['num_hidden_layers']} (+{model['num_nextn_predict_layers']} draft), "
        f"hidden {model['hidden_size']}, heads {model['num_attention_heads']} × "
        f"{model['head_dim']}, window {model['sliding_window']}, "
        f"experts {model['num_experts_per_tok']} of {model['n_routed_experts']}, "
        f"vocabulary {model['vocab_size']}"
    )
    yield f"  stored as: {stored}"
    yield ""
    yield "Weights"
    for group, size in report["weight_bytes"].items():
        yield f"  {group:<26}{_size(size):>14}"
    yield f"  {'total':<26}{_size(report['total_bytes']):>14}   {report['total_bytes']:,} bytes"
    yield f"  Engram tables are mapped from host memory: {_size(report['table_bytes'])}"
    yield ""
    yield "Cache"
    yield f"  global, per token         {cache['global_bytes_per_token']:>14,.1f} bytes"
    yield f"  window, per request       {cache['window_bytes_per_request']:>14,} bytes"
    yield f"  draft window, per request {cache['draft_window_bytes_per_request']:>14,} bytes"
    yield f"  compressor, per request   {cache['compressor_bytes_per_request']:>14,} bytes"
    yield (
        f"  one request of {cache['max_seq_len']:,} tokens: {_size(cache['longest_request_bytes'])}"
    )
    capacity = report.get("capacity")
    if capacity is not None:
        yield ""
        yield f"Capacity with {_size(capacity['memory_bytes'])} on a rank"
        yield f"  after weights             {_size(capacity['free_bytes']):>14}"
        yield f"  cached tokens             {capacity['cached_tokens']:>14,}"
        yield f"  requests of full length   {capacity['requests_at_max_seq_len']:>14,}"
    if "plans" in report:
        yield ""
        yield "TensorRT plans"
        for segment, plan in report["plans"].items():
            runs_on = " or ".join(plan["compute_capabilities"])
            yield (
                f"  {segment:<10}{_size(plan['bytes']):>14}   by {plan['built_by']}, "
                f"runs on compute capability {runs_on}"
            )
    if "kernels" in report:
        yield ""
        yield "Compiled kernels"
        for target, kernels in report["kernels"].items():
            yield (
                f"  {target:<10}{_size(kernels['num_bytes']):>14}   {kernels['count']} for "
                f"{kernels['dtype']}, by the Triton language {kernels['triton']} and Python "
                f"{kernels['python']}"
            )
    yield ""
    yield f"GPUs needed for weights and one request ({USABLE_SHARE:.0%} of the memory is used)"
    for gpu in report["gpus"]:
        needed = gpu["gpus_needed"]
        yield f"  {gpu['name']:<8}{'does not fit' if needed is None else needed}"


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.2f} {unit}" if unit != "B" else f"{num_bytes} B"
        size /= 1024
    return f"{size:,.2f} TiB"
