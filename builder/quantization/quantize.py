"""`dsv41-build quantize`: a checkpoint in, the same checkpoint in other formats out.

Shards keep their names and their tensors. Everything streams by chunks of rows: a piece of a
weight is read, decoded to float32, quantised, decoded again for comparison, and written. A shard
is written under a temporary name and renamed when complete, so an interrupted run repeats one
shard at most; the directory gets its own name when all are there.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from builder.assemble import check_output
from builder.checkpoint import Checkpoint, check_weight, requantized_format
from builder.layout import Requantized, WeightSpec
from builder.progress import Progress
from builder.quantization.calibrate import CalibrationData, input_scales
from builder.quantization.companions import layer_formats, write_companions, write_json
from builder.quantization.modelopt import (
    check_modelopt,
    global_scale,
    modelopt_version,
    quantize_rows,
)
from builder.quantization.recipe import Target, stored_format, weight_class
from builder.quantization.report import ClassTotals, merged
from builder.values import HUGE, check_values, huge_warning
from engine.config import ConfigError
from engine.directory import PARTIAL_SUFFIX
from engine.safetensors_file import SafetensorsFile, SafetensorsWriter, TensorInfo
from engine.tensor_source import FLOAT_DTYPES, CheckpointError
from plugins.formats.released import (
    BLOCK,
    quantize_fp4_rows,
    quantize_fp8_blocks,
    quantize_fp8_rows,
)
from plugins.linear import PackedFormat, PackedMatrix

REPORT_NAME = "report.json"
_STATE_NAME = "quantize.state.json"
_SCALES_NAME = "quantize.scales.json"
_SUMS_SUFFIX = ".sums.json"
_CHUNK_VALUES = 4 << 20
_SAME_INPUT = {"w1": "w3", "w3": "w1"}  # of an expert: the gated and the linear projection
_RELEASED = {
    "fp8": (PackedFormat.FP8_BLOCKS, quantize_fp8_blocks),
    "fp4": (PackedFormat.FP4_ROWS, quantize_fp4_rows),
    "fp8_rows": (PackedFormat.MXFP8, quantize_fp8_rows),
}


@dataclass(frozen=True)
class _Job:
    """One weight that changes its format. `stored` are its tensors in the output."""

    weight: WeightSpec
    target: Target
    names: tuple[str, ...]  # of its tensors in the source
    stored: Mapping[str, TensorInfo]

    @property
    def requantized(self) -> Requantized | None:
        return stored_format(self.target)


def quantize_checkpoint(
    checkpoint: Checkpoint,
    output: Path,
    targets: Mapping[str, Target],
    *,
    progress: Progress,
    data: CalibrationData | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Write `output` with each weight in its target format; returns the report and warnings.

    `targets` has every weight by name; those with calibrated inputs need `data`. Raises
    ConfigError or CheckpointError with one sentence; what is complete stays under the temporary
    name, and the same call resumes.
    """
    check_output(output)
    calibrated = {w.base for w in checkpoint.weights if targets[w.name] == "nvfp4-w4a4"}
    jobs = {job.weight.name: job for job in _jobs(checkpoint, targets)}
    formats = layer_formats(checkpoint, targets, calibrated)
    warnings = check_modelopt() if any(formats.values()) else []
    shards = _shards(checkpoint, targets, jobs, calibrated)
    needed = sum(info.num_bytes for stored in shards.values() for info in stored.values())
    partial = _prepare(checkpoint, output, targets, data, needed)
    scales: dict[str, float] = {}
    if data is not None:
        scales, warned = _calibrated(checkpoint, partial, calibrated, data, progress)
        warnings += warned
    progress.start("quantising", sum(f.path.stat().st_size for f in _files(checkpoint).values()))
    run = _Run(checkpoint, jobs, scales, progress)
    for name, stored in shards.items():
        if (partial / name).is_file():
            progress.advance(_files(checkpoint)[name].path.stat().st_size)
        else:
            run.write_shard(partial / name, stored)
    progress.finish()
    sums = [json.loads((partial / (name + _SUMS_SUFFIX)).read_text()) for name in shards]
    merged_sums = merged(one["classes"] for one in sums)
    totals = {title: total.figures() for title, total in sorted(merged_sums.items())}
    huge = [name for one in sums for name in one["huge"]]
    warnings += map(huge_warning, huge)
    report = {
        "classes": totals,
        "source_bytes": sum(file.path.stat().st_size for file in _files(checkpoint).values()),
        "output_bytes": sum((partial / name).stat().st_size for name in shards),
        "kept_tensors": sum(len(stored) for stored in shards.values())
        - sum(len(job.stored) for job in jobs.values()),
        "huge_tensors": huge,
    }
    write_json(partial / REPORT_NAME, report)
    released = any(job.target == "released" for job in jobs.values())
    write_companions(checkpoint, partial, formats, shards, released=released)
    for name in (_STATE_NAME, _SCALES_NAME, *(name + _SUMS_SUFFIX for name in shards)):
        (partial / name).unlink(missing_ok=True)
    os.rename(partial, output)
    return report, warnings


class _Run:
    """Writes shards; holds nothing larger than a chunk."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        jobs: Mapping[str, _Job],
        scales: Mapping[str, float],
        progress: Progress,
    ) -> None:
        self.source = checkpoint.source
        self.jobs = jobs
        # Scales of one layout of ModelOpt's may have the names of another's.
        self.made = {name for job in jobs.values() for name in job.stored}
        self.scales = {f"{name}.input_scale": scale for name, scale in scales.items()}
        self.progress = progress
        self.amax: dict[str, float] = {}
        self.huge: dict[str, None] = {}

    def write_shard(self, path: Path, stored: Mapping[str, TensorInfo]) -> None:
        totals: dict[str, ClassTotals] = {}
        self.huge.clear()
        unfinished = path.with_name(path.name + PARTIAL_SUFFIX)
        with SafetensorsWriter(unfinished, stored, {"format": "pt"}) as writer:
            for name in stored:
                job = self.jobs.get(name)
                if job is not None:
                    title = str(weight_class(job.weight))
                    self._convert(writer, job, totals.setdefault(title, ClassTotals()))
                elif name in self.scales:
                    writer.write(name, torch.tensor(self.scales[name], dtype=torch.float32))
                elif name not in self.made:
                    self._copy(writer, name)
        classes = {title: asdict(total) for title, total in totals.items()}
        sums = {"classes": classes, "huge": list(self.huge)}
        write_json(path.with_name(path.name + _SUMS_SUFFIX), sums)
        os.replace(unfinished, path)

    def _copy(self, writer: SafetensorsWriter, name: str) -> None:
        file, info = self.source.file_of(name), self.source.describe(name)
        if not info.shape or not info.num_bytes:
            stored = file.read(name)
            self._check(name, stored)
            writer.write(name, stored)
            return
        for start, stop in _chunks(info.shape):
            rows = file.read_rows(name, start, stop)
            self._check(name, rows, start)
            writer.write(name, rows)
            self.progress.advance(rows.nbytes)

    def _check(self, name: str, rows: torch.Tensor, first_row: int = 0) -> None:
        if check_values(name, rows, self.source.describe(name).dtype, first_row):
            self.huge[name] = None

    def _convert(self, writer: SafetensorsWriter, job: _Job, totals: ClassTotals) -> None:
        weight = job.weight
        chunks = list(_chunks(weight.shape))
        source_bytes = sum(self.source.describe(name).num_bytes for name in job.names)
        whole = self._global_amax(job) if job.requantized == "nvfp4" else None
        for chunk in chunks:
            values = self._values(job, *chunk)
            amax = float(values.abs().amax()) if whole is None else whole
            if amax >= HUGE:
                self.huge[weight.name] = None
            matrix = self._write_rows(writer, job, values, amax)
            totals.add_rows(values, matrix)
            self.progress.advance(source_bytes * (chunk[1] - chunk[0]) // weight.shape[0])
        if whole is not None:
            writer.write(f"{weight.base}.weight_scale_2", global_scale(weight.name, whole))
        totals.tensors += 1
        totals.values += weight.shape[0] * weight.shape[1]
        totals.source_bytes += source_bytes
        totals.output_bytes += sum(info.num_bytes for info in job.stored.values())

    def _global_amax(self, job: _Job) -> float:
        """What NVFP4's global scale comes from: all rows of the weight, and of the other matrix on
        the same input of an expert. Fused kernels take one scale for both, so ModelOpt's export
        gives them one."""
        expert, _, part = job.weight.base.rpartition(".")
        other = self.jobs.get(f"{expert}.{_SAME_INPUT.get(part, part)}.weight", job)
        return max(self._amax(one) for one in (job, other) if one.requantized == "nvfp4")

    def _amax(self, job: _Job) -> float:
        name = job.weight.name
        if name not in self.amax:
            chunks = _chunks(job.weight.shape)
            self.amax[name] = max(float(self._values(job, *one).abs().amax()) for one in chunks)
        return self.amax[name]

    def _write_rows(
        self, writer: SafetensorsWriter, job: _Job, values: torch.Tensor, amax: float
    ) -> PackedMatrix:
        weight = job.weight
        rows, columns = values.shape
        if job.requantized is not None:
            quantized = quantize_rows(weight.name, values, job.requantized, amax)
            for name, tensor in quantized.stored(weight.name, weight.base).items():
                writer.write(name, tensor)
            return quantized.matrix
        packed_format, quantize = _RELEASED[weight.storage]
        codes, scale = quantize(values)
        scale = scale.view(torch.uint8)
        writer.write(weight.name, codes)
        writer.write(str(weight.scale_name), scale)
        return PackedMatrix(packed_format, (rows, columns), codes, scale, None, torch.float32)

    def _values(self, job: _Job, start: int, stop: int) -> torch.Tensor:
        """Rows start … stop − 1 in float32. Raises CheckpointError where one is not finite."""
        weight, source = job.weight, self.source
        codes = source.file_of(weight.name).read_rows(weight.name, start, stop)
        if source.describe(weight.name).dtype in FLOAT_DTYPES:
            values = codes.to(torch.float32)
        else:
            values = self._decoded(job, codes, start, stop)
        if not torch.isfinite(values).all():
            row = int((~torch.isfinite(values)).any(1).nonzero()[0])
            raise CheckpointError(
                f"{weight.name} holds a NaN or an infinity (in float32) in row {start + row}; "
                "repair the checkpoint"
            )
        return values

    def _decoded(self, job: _Job, codes: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        weight, source = job.weight, self.source
        requantized = requantized_format(weight, source)
        packed_format = PackedFormat(requantized) if requantized else _RELEASED[weight.storage][0]
        scale_name = job.names[1]
        rows = (start, stop)
        if packed_format is PackedFormat.FP8_BLOCKS:
            rows = start // BLOCK, -(-stop // BLOCK)
        scale = source.file_of(scale_name).read_rows(scale_name, *rows).view(torch.uint8)
        whole = source.read(job.names[2]).clone() if len(job.names) > 2 else None
        shape = (stop - start, weight.shape[1])
        matrix = PackedMatrix(packed_format, shape, codes, scale, whole, torch.float32)
        return matrix.dequantize()


def _jobs(checkpoint: Checkpoint, targets: Mapping[str, Target]) -> Iterator[_Job]:
    for weight in checkpoint.weights:
        target = targets[weight.name]
        names = check_weight(weight, checkpoint.source)
        if target == "source" or not weight.shape[0]:
            continue
        requantized = stored_format(target)
        if requantized is not None:
            if requantized_format(weight, checkpoint.source) != requantized:
                yield _Job(weight, target, names, weight.requantized(requantized))
        elif tuple(names) != tuple(weight.released()):
            yield _Job(weight, target, names, weight.released())


def _files(checkpoint: Checkpoint) -> dict[str, SafetensorsFile]:
    """The source's shards by file name."""
    source = checkpoint.source
    return {file.path.name: file for file in map(source.file_of, source.names())}


def _shards(
    checkpoint: Checkpoint,
    targets: Mapping[str, Target],
    jobs: Mapping[str, _Job],
    calibrated: Collection[str],
) -> dict[str, dict[str, TensorInfo]]:
    """The tensors of every output shard; a converted weight stays in the shard of its codes."""
    replaced = {name for job in jobs.values() for name in job.names}
    # Weights alone, where the source has scales for their inputs too.
    replaced |= {w.input_scale_name for w in checkpoint.weights if targets[w.name] == "nvfp4"}
    shards: dict[str, dict[str, TensorInfo]] = {}
    for shard, file in _files(checkpoint).items():
        stored: dict[str, TensorInfo] = {}
        for name, info in file.tensors.items():
            if name in jobs:
                stored |= jobs[name].stored
            elif name not in replaced and name in checkpoint.source:
                stored[name] = info
            base = name.removesuffix(".weight")
            if base != name and base in calibrated:
                stored[f"{base}.input_scale"] = TensorInfo("F32", ())
        shards[shard] = stored
    return shards


def _chunks(shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Ranges of rows, whole blocks of 32, of about _CHUNK_VALUES values."""
    row_values = max(1, int(torch.Size(shape[1:]).numel()))
    step = max(_CHUNK_VALUES // row_values // BLOCK, 1) * BLOCK
    for start in range(0, shape[0], step):
        yield start, min(start + step, shape[0])


def _calibrated(
    checkpoint: Checkpoint,
    partial: Path,
    names: Collection[str],
    data: CalibrationData,
    progress: Progress,
) -> tuple[dict[str, float], list[str]]:
    """Input scales, those of an interrupted run where it had come so far, and warnings."""
    path = partial / _SCALES_NAME
    if path.is_file():
        return json.loads(path.read_text()), []
    scales, warnings = input_scales(checkpoint, names, data, progress)
    write_json(path.with_name(path.name + PARTIAL_SUFFIX), scales)
    os.replace(path.with_name(path.name + PARTIAL_SUFFIX), path)
    return scales, warnings


def _prepare(
    checkpoint: Checkpoint,
    output: Path,
    targets: Mapping[str, Target],
    data: CalibrationData | None,
    needed: int,
) -> Path:
    """The directory to write in, with the complete shards of an interrupted run of the same kind.

    Raises ConfigError when the disk has no room for the rest.
    """
    partial = output.absolute().with_name(output.name + PARTIAL_SUFFIX)
    files = {
        name: [file.path.stat().st_size, file.path.stat().st_mtime_ns]
        for name, file in _files(checkpoint).items()
    }
    run = json.dumps([str(checkpoint.directory.resolve()), dict(targets), files], sort_keys=True)
    digest = hashlib.sha256(run.encode())
    for piece in () if data is None else data.pieces:
        digest.update(repr(piece.tolist()).encode())
    state = {"run": digest.hexdigest(), "modelopt": modelopt_version()}
    path = partial / _STATE_NAME
    text = json.dumps(state)
    if partial.exists() and (not path.is_file() or path.read_text() != text):
        shutil.rmtree(partial)
    for unfinished in partial.glob(f"*{PARTIAL_SUFFIX}"):
        unfinished.unlink()
    done = sum(file.stat().st_size for file in partial.glob("*.safetensors"))
    free = shutil.disk_usage(next(place for place in partial.parents if place.exists())).free
    if needed - done > free:
        raise ConfigError(
            f"output_dir: {needed - done:,} bytes are still to be written to {output.parent}, and "
            f"{free:,} are free; make room or choose another disk"
        )
    partial.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return partial
