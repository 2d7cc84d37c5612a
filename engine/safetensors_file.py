"""One safetensors file: a header checked before anything is read, mapped data, a streaming writer.

Read and written here rather than through the safetensors library because the released files hold
dtypes that its torch binding does not map (F8_E8M0), and because a table of 98 GB must never be in
memory as a whole. The format: u64 little-endian header length, JSON header, tensors without gaps.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeGuard

import torch

from engine.json_file import parse_json

# E8M0 scales and other exponent bytes are kept as raw bytes: a numeric cast would destroy them.
STORED_AS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
_LENGTH_FIELD = 8
_MAX_HEADER_BYTES = 100_000_000
_MAP_NORESERVE = 0x4000  # Linux; the mmap module has no name for it


class CheckpointError(ValueError):
    """A weight file that cannot be used; the message names the file or the tensor."""


@dataclass(frozen=True)
class TensorInfo:
    """Dtype as the header spells it ("BF16", "F8_E8M0") and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return STORED_AS[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def map_file(path: Path, offset: int = 0, length: int = 0) -> mmap.mmap:
    """The file's bytes from `offset` on, a multiple of ALLOCATIONGRANULARITY; all of them where
    length is 0. Pages are read on first use and shared by all processes that map it.

    Private and writable because torch wants a writable buffer; not reserved because a table may be
    larger than the machine's memory.
    """
    with path.open("rb") as file:
        return mmap.mmap(
            file.fileno(),
            length,
            offset=offset,
            flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
            prot=mmap.PROT_READ | mmap.PROT_WRITE,
        )


class SafetensorsFile:
    """A checked header and, from the first read on, a private mapping of the file.

    Raises CheckpointError naming the file when it is not a whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = None
        try:
            size = path.stat().st_size
            with path.open("rb") as file:
                header, self._data_start = _read_header(path, file, size)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
        header.pop("__metadata__", None)
        self.tensors: dict[str, TensorInfo] = {}
        self._begin: dict[str, int] = {}
        self._check_entries(header, size - self._data_start)

    def read(self, name: str) -> torch.Tensor:
        """The tensor as stored; memory is the mapped file, so treat it as read-only."""
        info = self.tensors[name]
        dtype = STORED_AS[info.dtype]
        if info.num_bytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        begin = self._data_start + self._begin[name]
        # Floats are copied by whoever computes with them. In a map of their own, which goes with
        # the tensor, their pages do not stay resident beside the copy.
        if info.dtype in FLOAT_DTYPES:
            place = begin % mmap.ALLOCATIONGRANULARITY
            mapped = map_file(self.path, begin - place, place + info.num_bytes)
        else:
            place, mapped = begin, self._mapping()
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=info.num_bytes, offset=place)
        if begin % info.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start … stop − 1 along the first dim, in memory of their own.

        Read, not mapped: what streams through a file larger than memory must not count as used.
        """
        info = self.tensors[name]
        row_bytes = info.num_bytes // info.shape[0]
        rows = torch.empty((stop - start, *info.shape[1:]), dtype=STORED_AS[info.dtype])
        with self.path.open("rb", buffering=0) as file:
            file.seek(self._data_start + self._begin[name] + start * row_bytes)
            if file.readinto(rows.view(-1).view(torch.uint8).numpy().data) != rows.nbytes:
                raise CheckpointError(f"{self.path} ended while {name} was read; copy it again")
        return rows

    def _mapping(self) -> mmap.mmap:
        if self._map is None:
            self._map = map_file(self.path)
        return self._map

    def _check_entries(self, header: Mapping[str, object], data_bytes: int) -> None:
        spans: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            fields = entry if isinstance(entry, dict) else {}
            dtype, shape = fields.get("dtype"), fields.get("shape")
            offsets = fields.get("data_offsets")
            if not isinstance(dtype, str) or not _naturals(shape) or not _naturals(offsets, 2):
                raise CheckpointError(
                    f"{self.path} has a damaged header entry for {name}; copy the file again"
                )
            begin, end = offsets
            if dtype not in STORED_AS:
                raise CheckpointError(
                    f"{self.path} stores {name} as {dtype}, which is not one of "
                    f"{', '.join(STORED_AS)}; convert the checkpoint"
                )
            info = TensorInfo(dtype, tuple(shape))
            if end - begin != info.num_bytes:
                raise CheckpointError(
                    f"{self.path} gives {name} {end - begin} bytes where {info} takes "
                    f"{info.num_bytes}; copy the file again"
                )
            spans.append((begin, end, name))
            self.tensors[name], self._begin[name] = info, begin
        expected = 0
        for begin, end, name in sorted(spans):
            if begin != expected:
                raise CheckpointError(
                    f"{self.path} has a gap or an overlap before {name}; copy the file again"
                )
            expected = end
        if expected != data_bytes:
            relation = "truncated" if expected > data_bytes else "longer than its header says"
            raise CheckpointError(
                f"{self.path} is {relation}: expected {expected} bytes of tensors, found "
                f"{data_bytes}; copy the file again"
            )


def _naturals(values: object, count: int | None = None) -> TypeGuard[list[int]]:
    """Whether `values` is a list of integers from 0 on, `count` of them."""
    return (
        isinstance(values, list)
        and (count is None or len(values) == count)
        and all(type(value) is int and value >= 0 for value in values)
    )


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, object], int]:
    start = file.read(_LENGTH_FIELD)
    length = struct.unpack("<Q", start)[0] if len(start) == _LENGTH_FIELD else 0
    if length < 2 or length > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path} is not a safetensors file: expected a header length in its first 8 bytes"
        )
    if _LENGTH_FIELD + length > size:
        raise CheckpointError(
            f"{path} is truncated: expected a header of {length} bytes, found a file of {size}; "
            "copy the file again"
        )
    try:
        header = parse_json(file.read(length))
    except ValueError:
        header = None
    if not isinstance(header, dict):
        raise CheckpointError(f"{path} is not a safetensors file: its header is not JSON")
    return header, _LENGTH_FIELD + length


class SafetensorsWriter:
    """Writes a file tensor by tensor, in any order and in pieces, never holding it whole.

    Use as a context manager. Leaving the block checks that every tensor was written in full.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str] = {}
    ) -> None:
        self._path = path
        self._tensors = dict(tensors)
        # Wide dtypes first, so that every tensor is aligned to its own size.
        order = sorted(self._tensors, key=lambda name: (-self._tensors[name].itemsize, name))
        header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        offsets: dict[str, int] = {}
        for name in order:
            info = self._tensors[name]
            offsets[name] = offset
            end = offset + info.num_bytes
            header[name] = {
                "dtype": info.dtype,
                "shape": list(info.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)
        data_start = _LENGTH_FIELD + len(text)
        self._offsets = {name: data_start + begin for name, begin in offsets.items()}
        self._written = dict.fromkeys(self._tensors, 0)

    def write(self, name: str, values: torch.Tensor) -> None:
        """Append `values` to tensor `name`: the whole tensor, or its next rows."""
        info = self._tensors[name]
        if values.dtype != STORED_AS[info.dtype] or values.shape[1:] != info.shape[1:]:
            raise ValueError(
                f"{name}: expected rows of {info}, got {values.dtype} {list(values.shape)}"
            )
        data = values.detach().contiguous().view(-1).view(torch.uint8).numpy()
        if self._written[name] + data.nbytes > info.num_bytes:
            raise ValueError(f"{name}: expected {info.num_bytes} bytes in all, got more")
        self._file.seek(self._offsets[name] + self._written[name])
        self._file.write(data.data)
        self._written[name] += data.nbytes

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                for name in self._unfinished():
                    raise ValueError(f"{self._path}: {name} was not written in full")
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    def _unfinished(self) -> Iterator[str]:
        return (n for n, i in self._tensors.items() if self._written[n] != i.num_bytes)
