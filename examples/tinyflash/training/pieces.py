"""A training run in pieces: what both trainers keep between them, and the loop they share.

A piece ends with the plan's last step, after its minutes, or at Ctrl-C, which lets the step finish;
each way the whole state is saved and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pickle
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from types import FrameType
from typing import Any, TypeVar

import torch

from engine.config import ModelConfig
from engine.network.engram import EngramHash
from examples.tinyflash.training.batch import HostBatch
from examples.tinyflash.training.optimizer import Optimizer
from examples.tinyflash.training.parameters import Parameters
from examples.tinyflash.training.plan import Batches, Plan

_REPORT_STEPS = 50
_PROBE_STEPS = 500
_WEIGHT_PARTS = 3
_STATE = "state.pt"
# What torch.load raises for files that are empty, cut short, or no archive at all.
_BROKEN = (
    OSError, EOFError, RuntimeError, ValueError, LookupError, AttributeError, pickle.PickleError,
)  # fmt: skip

Probe = Callable[[], dict[str, float]]
State = dict[str, Any]


class PiecewiseTrainer(ABC):
    """A trainer whose next piece goes on exactly where the last one ended."""

    def __init__(
        self,
        config: ModelConfig,
        plan: Plan,
        parameters: Parameters,
        trained: Mapping[str, torch.Tensor],
        device: str,
    ) -> None:
        self.config = config
        self.plan = plan
        self.parameters = parameters
        self.device = device
        self.optimizer = Optimizer(trained, plan.matrix_lr, plan.adam_lr)
        self.step = 0
        self.history: list[dict[str, float]] = []

    @abstractmethod
    def train_step(self, batch: HostBatch) -> dict[str, torch.Tensor]:
        """The step's values; on a device valid until the next step."""

    def wait(self) -> None:
        """Until the device has done all steps."""
        if self.device != "cpu":
            torch.cuda.synchronize()

    def state(self) -> State:
        self.wait()
        return {
            "plan": dataclasses.asdict(self.plan),
            "step": self.step,
            "leaves": {p: t.detach() for p, t in self.parameters.leaves.items()},
            "rounding": self.parameters.rounding,
            "optimizer": self.optimizer.state(),
            "history": self.history,
        }

    def restore(self, state: State) -> None:
        """Take over a state of the same plan. Raises ValueError when it is of another model."""
        self.parameters.restore(state["leaves"])
        self.parameters.rounding = {p: t.to(self.device) for p, t in state["rounding"].items()}
        self.optimizer.restore(state["optimizer"])
        self.step = int(state["step"])
        self.history = list(state["history"])


T = TypeVar("T", bound=PiecewiseTrainer)


def train(
    trainer: PiecewiseTrainer,
    batches: Iterable[HostBatch],
    out: Path,
    *,
    minutes: float,
    probe: Probe | None = None,
) -> None:
    """Train until the batches' end, for `minutes` or until Ctrl-C, then write the state.

    Every 500 steps and at the end of the plan the shares of `probe` are printed. Raises
    KeyboardInterrupt, saying where it stopped, once the state of an interrupted piece is written;
    a second Ctrl-C ends at once and leaves the files of the piece before.
    """
    deadline = time.monotonic() + 60 * minutes
    plan = trainer.plan
    last_time, last_step = time.monotonic(), trainer.step
    with _interrupt_noticed() as interrupted:
        for batch in batches:
            values = trainer.train_step(batch)
            if trainer.step % _REPORT_STEPS == 0 or trainer.step == plan.steps:
                trainer.wait()
                record = {k: float(v) for k, v in values.items()}
                now = time.monotonic()
                rate = plan.tokens_per_batch * (trainer.step - last_step) / (now - last_time)
                last_time, last_step = now, trainer.step
                trainer.history.append({"step": trainer.step, **record})
                shown = "  ".join(f"{k} {v:.4f}" for k, v in record.items())
                print(
                    f"step {trainer.step}/{plan.steps}  {shown}  {rate / 1e3:.0f}K tokens/s",
                    flush=True,
                )
                if not all(math.isfinite(value) for value in record.values()):
                    raise FloatingPointError(f"not finite at step {trainer.step}: {shown}")
            if probe and (trainer.step % _PROBE_STEPS == 0 or trainer.step == plan.steps):
                trainer.wait()
                shares = probe()
                trainer.history.append({"step": trainer.step, **shares})
                print("  ".join(f"{k} {share:.2f}" for k, share in shares.items()), flush=True)
            if interrupted.is_set() or time.monotonic() > deadline:
                break
        save(trainer, out)
    if interrupted.is_set():
        raise KeyboardInterrupt(
            f"after step {trainer.step}/{plan.steps}, saved in {out}; the same command goes on"
        )


@contextmanager
def _interrupt_noticed() -> Iterator[Event]:
    """The event is set at the first Ctrl-C; the second acts as ever."""
    noticed = Event()
    before = signal.getsignal(signal.SIGINT)

    def notice(number: int, frame: FrameType | None) -> None:
        noticed.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, notice)
    try:
        yield noticed
    finally:
        signal.signal(signal.SIGINT, before)


# -- files -----------------------------------------------------------------------------------------


def save(trainer: PiecewiseTrainer, out: Path) -> None:
    """The whole state, and the weights alone in parts; each replaced only when complete."""
    out.mkdir(parents=True, exist_ok=True)
    _write(trainer.state(), out / _STATE)
    (out / "history.json").write_text(json.dumps(trainer.history))
    save_weights(trainer.parameters, trainer.step, out)


def save_weights(parameters: Parameters, step: int, out: Path) -> None:
    """The weights alone in bfloat16, in parts."""
    leaves = parameters.leaves
    parts: list[dict[str, torch.Tensor]] = [{} for _ in range(_WEIGHT_PARTS)]
    for path in sorted(leaves, key=lambda path: -leaves[path].numel()):
        smallest = min(parts, key=lambda part: sum(t.numel() for t in part.values()))
        smallest[path] = leaves[path].detach().bfloat16().cpu()
    for number, part in enumerate(parts):
        _write({"step": step, "leaves": part}, out / f"weights{number}.pt")


def load_weights_parts(directory: Path) -> dict[str, torch.Tensor]:
    """What `save_weights` wrote. Raises ValueError naming a file that is missing, broken, or of
    another step than the rest."""
    leaves: dict[str, torch.Tensor] = {}
    steps: set[int] = set()
    for number in range(_WEIGHT_PARTS):
        file = directory / f"weights{number}.pt"
        if not file.is_file():
            raise ValueError(
                f"expected {file.name} of a training run in {directory}, found none; "
                "point at the --out of a run that ended"
            )
        part = _read(file, {"step", "leaves"})
        leaves |= part["leaves"]
        steps.add(part["step"])
        if len(steps) > 1:
            raise ValueError(
                f"{file} is of another step than the parts before it; run the training once more"
            )
    return leaves


def saved_state(out: Path, plan: Plan) -> State | None:
    """The state of the run in `out`, on the CPU; None where none began.

    Raises ValueError when `out` cannot be written to, its state is broken, or is of another plan.
    """
    there = next(path for path in (out, *out.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        fault = "not writable" if there.is_dir() else "a file"
        raise ValueError(f"expected --out {out} to be a directory to write to, {there} is {fault}")
    file = out / _STATE
    if not file.exists():
        return None
    state = _read(file, {"plan", "step", "leaves", "rounding", "optimizer", "history"})
    saved, given = state["plan"], dataclasses.asdict(plan)
    other = [name for name in given if saved.get(name) != given[name]]
    if other:
        was, now = (
            ", ".join(f"{n} {p.get(n)}" for n in other if n != "phases") or "other phases"
            for p in (saved, given)
        )
        raise ValueError(
            f"{file} is of a run with {was}, got {now}; "
            "give the options that the run began with, or another --out"
        )
    return state


def _write(content: State, file: Path) -> None:
    partial = file.with_suffix(".tmp")
    torch.save(content, partial)
    partial.rename(file)


def _read(file: Path, names: set[str]) -> State:
    try:
        content = torch.load(file, map_location="cpu")
        if not names <= content.keys():
            raise ValueError("it lacks entries")
    except _BROKEN:
        raise ValueError(
            f"expected {file} as this version of the training writes it, but it is broken or of "
            "another kind; remove it or choose another directory"
        ) from None
    return content  # type: ignore[no-any-return]


# -- commands --------------------------------------------------------------------------------------


def piece_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """The options that every piece has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m examples.tinyflash.training.{name}",
        description=(description or "").partition("\n")[0],
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="directory of the run; gone on with if there")
    add("--steps", type=int, required=True, help="of the whole plan")
    add("--minutes", type=minutes, default=9.0, help="after which this piece ends")
    add("--tokens-per-batch", type=int, default=32768)
    add("--workers", type=workers, default=8, help="processes that make batches; 0: none")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def minutes(text: str) -> float:
    """An option's value; argparse names the function when it is no number."""
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected more than 0 minutes, got {text}")
    return value


def workers(text: str) -> int:
    """See `minutes`."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected 0 or more processes, got {text}")
    return value


def run_piece(
    options: argparse.Namespace,
    plan: Plan,
    state: State | None,
    config: ModelConfig,
    engram: EngramHash,
    make: Callable[[], T],
    probe: Callable[[T], dict[str, float]] | None = None,
) -> T:
    """Make the trainer after the workers, restore it, and train one piece; see `train`."""
    first = 0 if state is None else int(state["step"])
    with Batches(plan, first, options.workers, config, engram) as batches:
        trainer = make()
        if state is not None:
            try:
                trainer.restore(state)
            except ValueError as error:
                raise ValueError(f"{options.out / _STATE}: {error}") from None
            print(f"resumed at step {trainer.step}", flush=True)
        asked = None if probe is None else lambda: probe(trainer)
        train(trainer, batches, options.out, minutes=options.minutes, probe=asked)
    return trainer


def exit_code(name: str, work: Callable[[], None]) -> int:
    """0 done, 1 a loss is not finite, 2 refused, 130 interrupted; each but 0 with one sentence."""
    try:
        work()
    except FloatingPointError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        print(f"{name}: interrupted {str(stop) or 'before this piece was saved'}", file=sys.stderr)
        return 130
    return 0
