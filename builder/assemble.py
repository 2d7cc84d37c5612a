"""From a checked checkpoint to an engine directory, complete or not there at all."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from builder.checkpoint import Checkpoint, check_weight
from builder.kernels import build_kernels, check_kernels
from builder.layout import Shard, WeightSpec
from builder.pack import check_world_size, rank_tensors, write_rank
from builder.plans import PlanBackend, usable_backend
from builder.progress import Progress
from builder.token_class import Int32Array
from builder.values import check_values, huge_warning
from engine.chat_sections import CHAT_SECTIONS_NAME
from engine.config import ConfigError, ModelConfig
from engine.directory import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    PARTIAL_SUFFIX,
    TOKEN_CLASS_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    BuildConfig,
    Engine,
    EngramTableFile,
    rank_file,
)
from engine.manifest import Manifest, files_below
from engine.plans import PLANS_DIR
from engine.tensor_source import FLOAT_DTYPES, TensorSource

_CHUNK_ROWS = 1 << 18


def build_engine(
    checkpoint: Checkpoint,
    output: Path,
    build: BuildConfig,
    token_class: Int32Array,
    *,
    options: Mapping[str, Any],
    progress: Progress,
    plans: str | None = None,
    kernels: Sequence[str] = (),
) -> tuple[Engine, list[str]]:
    """Write the engine under a temporary name, rename it when complete, and open it; also returns
    warnings.

    `options` go into the manifest. `plans`: the compute dtype of the graphs to export, None for
    none. `kernels`: the GPUs, such as sm_90, to compile kernels for. Raises ConfigError before
    anything is written when the limits, the rank count or the output directory do not fit,
    CheckpointError for a NaN or an infinity, PlanError when plans cannot be built.
    """
    config, source = checkpoint.config, checkpoint.source
    build.check(config)
    check_world_size(config, build.tp_size)
    if plans is not None:
        backend = _plan_backend(build)
    if kernels:
        check_kernels(kernels, build.tp_size)
    check_output(output)
    with complete_directory(output) as partial:
        tables, huge = _write_tables(checkpoint.weights, config, source, partial, progress)
        for rank in range(build.tp_size):
            tensors = list(rank_tensors(checkpoint.weights, config, source, rank, build.tp_size))
            progress.start(f"rank {rank}", sum(tensor.info.num_bytes for tensor in tensors))
            huge += write_rank(partial / rank_file(rank), tensors, source, progress)
            progress.finish()
        np.save(partial / TOKEN_CLASS_NAME, token_class)
        for name in (
            *(TOKENIZER_NAME, TOKENIZER_CONFIG_NAME, CHAT_SECTIONS_NAME),
            GENERATION_CONFIG_NAME,
        ):
            if (checkpoint.directory / name).is_file():
                shutil.copyfile(checkpoint.directory / name, partial / name)
        built = {"versions": _versions(), "options": dict(options)}
        engine = Engine(
            partial, config, build, checkpoint.quantization, tables, Manifest({}, built)
        )
        (partial / CONFIG_NAME).write_text(engine.config_json())
        if plans is not None:
            from builder.graph.export import default_options, export_engine
            from builder.plans.segments import build_plans

            export_engine(engine, default_options(config, getattr(torch, plans)), progress)
            build_plans(partial / PLANS_DIR, config, build, backend, print)
        left_out = build_kernels(partial, kernels, progress, print) if kernels else []
        progress.start("hashing", sum(path.stat().st_size for path in files_below(partial)))
        Manifest.write(partial, built, progress.advance)
        progress.finish()
    return Engine.open(output), [*map(huge_warning, dict.fromkeys(huge)), *left_out]


def _plan_backend(build: BuildConfig) -> PlanBackend:
    """What will build the plans; found out before anything is written."""
    if build.tp_size != 1:
        raise ConfigError(
            f"plans: expected an engine of one rank, got tp_size {build.tp_size}; leave one out"
        )
    if importlib.util.find_spec("onnx") is None:
        raise ConfigError(
            "plans: expected the package onnx, found none; in a checkout, pip install '.[plans]'"
        )
    return usable_backend()


def check_output(output: Path) -> None:
    """Raise ConfigError unless `output` is free: absent, or an empty directory that the whole one
    can be renamed to."""
    if not output.exists():
        return
    if not output.is_dir() or any(output.iterdir()):
        raise ConfigError(
            f"output_dir: {output} already exists and is not empty; remove it or choose another"
        )
    if output.is_mount() or output.samefile(Path.cwd()):
        raise ConfigError(
            f"output_dir: {output} is the current directory or a mount point, which no directory "
            "can be renamed to; name a new one in it"
        )


@contextmanager
def complete_directory(output: Path) -> Iterator[Path]:
    """An empty directory that becomes `output` when the block ends well, and is removed when it
    does not, so that it does not fill a disk. Clears what a killed run left."""
    whole = output.absolute()
    partial = whole.with_name(whole.name + PARTIAL_SUFFIX)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.rename(partial, output)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_tables(
    weights: tuple[WeightSpec, ...],
    config: ModelConfig,
    source: TensorSource,
    directory: Path,
    progress: Progress,
) -> tuple[tuple[EngramTableFile, ...], list[str]]:
    """The tables' files, and the names of tensors with huge values."""
    specs = [weight for weight in weights if weight.shard is Shard.TABLE]
    tables, huge = [], []
    for layer, weight in zip(config.engram_layer_ids, specs, strict=True):
        stored = source.describe(weight.name)
        packed = stored.dtype not in FLOAT_DTYPES
        rows, width = weight.shape
        scale_name = next((n for n in check_weight(weight, source)[1:]), "")
        row_bytes = stored.num_bytes // rows
        if packed:
            row_bytes += source.describe(scale_name).num_bytes // rows
        table = EngramTableFile(
            layer,
            f"engram.{layer}.bin",
            "U8" if packed else stored.dtype,
            rows,
            row_bytes if packed else width,
        )
        progress.start(f"Engram table of layer {layer}", table.info.num_bytes)
        parts = [weight.name, scale_name] if packed else [weight.name]
        with (directory / table.file).open("wb") as file:
            for start in range(0, rows, _CHUNK_ROWS):
                pieces = [source.read(part)[start : start + _CHUNK_ROWS] for part in parts]
                for part, piece in zip(parts, pieces, strict=True):
                    if check_values(part, piece, source.describe(part).dtype, start):
                        huge.append(part)
                chunk = torch.cat([piece.view(torch.uint8) for piece in pieces], dim=1)
                file.write(chunk.numpy().data)
                progress.advance(chunk.nbytes)
        progress.finish()
        tables.append(table)
    return tuple(tables), huge


def _versions() -> dict[str, str]:
    try:
        own = version("dsv41-triton")
    except PackageNotFoundError:
        own = "from source"
    return {"dsv41-triton": own, "torch": torch.__version__, "python": platform.python_version()}
