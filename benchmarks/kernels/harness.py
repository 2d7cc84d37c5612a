"""Shared by the kernel benchmarks: graph-replay timing, ceilings of the card, one JSON line a row.

A row is timed by replaying a captured graph of calls on rotated inputs. Where they exceed the L2
cache reads come from memory and the row is "cold"; inputs too small for that are "L2". A short
graph is repeated until its launch does not matter.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, where not installed
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_COLD_BYTES = 120e6  # twice the L2 cache of an H200
_MOST_SETS = 512
_SHORTEST_GRAPH_MS = 0.3
_SAMPLES = 50

Call = Callable[[], Any]
Timing = Callable[[], dict[str, Any]]
Peers = Mapping[str, Callable[[], Sequence[Call]]]


@dataclass
class Ceilings:
    """Bytes and operations a microsecond; defaults are those of an H200, `calibrate` measures."""

    bytes_per_us: float = 4.27e6
    bf16_per_us: float = 798e6
    float8_per_us: float = 1501e6

    def calibrate(self) -> None:
        """A copy by an elementwise kernel, read and written bytes counted, and 8192³ products."""
        source = torch.randn(1 << 28, device=DEVICE)
        target = torch.empty_like(source)
        copy = prepared([lambda: torch.add(source, 1.0, out=target)])()
        self.bytes_per_us = 2 * source.nbytes / copy["us_p10"]
        a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        product = prepared([lambda: a @ b])()
        self.bf16_per_us = 2 * 8192**3 / product["us_p10"]
        one = torch.ones((), device=DEVICE)
        a, b = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
        scaled = {"scale_a": one, "scale_b": one, "use_fast_accum": True}
        product = prepared([lambda: torch._scaled_mm(a, b, out_dtype=torch.bfloat16, **scaled)])()
        self.float8_per_us = 2 * 8192**3 / product["us_p10"]


@dataclass
class Row:
    """One case. `ours` is the same work on rotated inputs; so is what each of `peers` makes, of
    which the fastest counts. `error` compares ours with the reference, relative to its norm, in
    `compared` rows of the output."""

    op: str
    case: str
    bytes: float
    flop: float
    ours: Sequence[Call]
    error: Callable[[], float]
    tolerance: float
    compared: int
    target_us: float | None = None
    peers: Peers = field(default_factory=dict)
    unit: str = "bf16"  # or "float8": whose ceiling `flop` is held against

    @property
    def state(self) -> str:
        """Where the inputs are before a call: "cold", in memory, or "L2", being too small."""
        return "cold" if self.bytes * len(set(self.ours)) >= _COLD_BYTES else "L2"


def rotations(footprint: float) -> int:
    """How many input sets are twice the L2 cache, at most 512; 1 where nothing is timed."""
    if DEVICE == "cpu":
        return 1
    return int(max(1, min(_MOST_SETS, -(-_COLD_BYTES // footprint))))


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def prepared(calls: Sequence[Call]) -> Timing:
    """Captures the calls; what comes back replays them and says the microseconds of one: median,
    10th and 90th percentile of the samples."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = _captured(calls)
    _milliseconds(graph)
    once = min(_milliseconds(graph) for _ in range(3))
    if once < _SHORTEST_GRAPH_MS:
        calls = [*calls] * int(-(-_SHORTEST_GRAPH_MS // once))
        graph = _captured(calls)

    def timed() -> dict[str, Any]:
        _milliseconds(graph)
        times = sorted(_milliseconds(graph) * 1e3 / len(calls) for _ in range(_SAMPLES))
        return {
            "us": round(times[_SAMPLES // 2], 3),
            "us_p10": round(times[_SAMPLES // 10], 3),
            "us_p90": round(times[9 * _SAMPLES // 10], 3),
            "samples": _SAMPLES,
        }

    return timed


def _called(calls: Sequence[Call]) -> Timing:
    """In place of `prepared` where nothing is timed: compiles, and shows what fails."""
    calls[0]()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return lambda: {"us": 0.0}


def _fastest(row: Row, prepare: Callable[[Sequence[Call]], Timing]) -> tuple[str, float] | None:
    """Name and microseconds of the fastest peer, measured twice. One that does not load or run
    costs a sentence, never the row."""
    found: list[tuple[float, str, Timing]] = []
    for name, make in row.peers.items():
        try:
            timed = prepare(make())
            found.append((timed()["us"], name, timed))
        except Exception as error:  # a library's own, of any kind
            said = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"{row.op} {row.case}: {name} does not run here: {said}", file=sys.stderr)
    if not found:
        return None
    us, name, timed = min(found, key=lambda one: one[0])
    return name, (us + timed()["us"]) / 2


@contextmanager
def poisoned() -> Iterator[None]:
    """New memory holds NaN or the largest integer: an element that a kernel leaves out shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def run(row: Row, ceilings: Ceilings, *, dry: bool) -> dict[str, Any]:
    """Ours, peers, the fastest peer again, ours: drift hits both alike. `dry` calls each once."""
    with poisoned():
        error = row.error()
    result: dict[str, Any] = {"op": row.op, "case": row.case}
    if dry:
        _called(row.ours)
        _fastest(row, _called)
    else:
        ours = prepared(row.ours)
        first = ours()
        peer, peer_us = _fastest(row, prepared) or (None, None)
        second = ours()
        floor_bytes = row.bytes / ceilings.bytes_per_us
        per_us = ceilings.float8_per_us if row.unit == "float8" else ceilings.bf16_per_us
        floor_flop = row.flop / per_us
        us = (first["us"] + second["us"]) / 2
        floor = max(floor_bytes, floor_flop)
        result |= first
        result |= {
            "us": round(us, 3),
            "spread": round(abs(first["us"] - second["us"]) / us, 4),
            "state": row.state,
            "floor_us": round(floor, 3),
            "floor_by": "bytes" if floor_bytes >= floor_flop else row.unit,
            "floor_ratio": round(floor / us, 4),
            "peer": peer,
            "peer_us": peer_us and round(peer_us, 3),
            "peer_ratio": peer_us and round(peer_us / us, 4),
            "target_us": row.target_us,
        }
    correct = bool(error <= row.tolerance)
    return result | {"error": float(f"{error:.3e}"), "correct": correct, "compared": row.compared}


def relative(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """‖ours − expected‖ / ‖expected‖ in float64; infinities must be the same ones."""
    ours, expected = ours.double(), expected.double()
    infinite = expected.isinf()
    if not torch.equal(infinite & (ours == expected), infinite):
        return float("inf")
    ours, expected = ours.masked_fill(infinite, 0), expected.masked_fill(infinite, 0)
    return float((ours - expected).norm() / expected.norm().clamp(min=1e-30))


def load_peers(folder: str | None) -> ModuleType | None:
    """The module peers.py, which wraps the peer libraries of `folder` and lies there or beside it;
    None where none is asked."""
    if folder is None:
        return None
    place = Path(folder).resolve()
    os.environ.setdefault("PEERS_DIR", str(place))
    sys.path += [str(place), str(place.parent)]
    return importlib.import_module("peers")


def emit(result: dict[str, Any], out: str | None) -> None:
    line = json.dumps(result)
    print(line, flush=True)
    if out is not None:
        with Path(out).open("a") as file:
            file.write(line + "\n")
