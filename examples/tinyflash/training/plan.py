"""A training run as data: its phases, rates and batches, made by workers ahead of time."""

from __future__ import annotations

import multiprocessing
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.pool import Pool

import torch

from engine.config import ModelConfig
from engine.network.engram import EngramHash
from examples.tinyflash.mixture import Stage, make_batch
from examples.tinyflash.training.batch import HostBatch, Sizes, training_batch

_BATCHES_AHEAD = 4  # per worker
_WHOLE_EVERY = 4  # one step in four runs the decoder on all rows


@dataclass(frozen=True)
class Phase:
    """Until this share of the steps: how long conversations are, which mixture, and how many
    entries are selected (None: as configured)."""

    until: float
    seq_len: int
    mixture: Stage
    index_topk: int | None = None


# Retrieval is learned on all entries first, and the indexers beside it; then they are used.
PHASES = (
    Phase(0.25, 512, "short", 512),
    Phase(0.35, 1024, "short", 64),
    Phase(0.50, 2048, "short"),
    Phase(1.00, 8192, "long"),
)


@dataclass(frozen=True)
class Plan:
    """A whole training run. Everything that a resumed piece must agree on."""

    steps: int
    tokens_per_batch: int
    phases: tuple[Phase, ...] = PHASES
    quantized_from: float = 0.8  # share of the steps after which weights are rounded
    decay_from: float = 0.6
    matrix_lr: float = 0.02
    adam_lr: float = 2e-3
    warmup_steps: int = 100
    replayed: float = 0.5  # share of conversations whose windows begin anew, as after a hit
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a plan that no batch or no step fits into."""
        longest = max(phase.seq_len for phase in self.phases)
        if self.steps < 1:
            raise ValueError(f"expected at least 1 step, got {self.steps}")
        if self.tokens_per_batch < longest:
            raise ValueError(
                f"expected at least {longest} tokens per batch, the length of the plan's longest "
                f"conversations, got {self.tokens_per_batch}"
            )

    def learning_rate(self, step: int) -> float:
        """As a share of the peak."""
        warm = min(1.0, (step + 1) / self.warmup_steps)
        start = self.decay_from * self.steps
        cool = 1.0 if step < start else max(0.0, (self.steps - step) / (self.steps - start))
        return warm * cool

    def phase(self, step: int) -> Phase:
        share = step / self.steps
        return next((phase for phase in self.phases if share < phase.until), self.phases[-1])

    def trimmed(self, step: int) -> bool:
        return step % _WHOLE_EVERY != 0

    def quantized(self, step: int) -> bool:
        return step >= self.quantized_from * self.steps

    def draw(self, step: int, config: ModelConfig, engram: EngramHash) -> HostBatch:
        """The batch of a step, padded to the sizes of its phase."""
        phase, trimmed = self.phase(step), self.trimmed(step)
        return training_batch(
            make_batch(self.seed, step, self.tokens_per_batch, phase.seq_len, phase.mixture),
            config,
            engram,
            step,
            trimmed=trimmed,
            replayed=self.replayed,
            sizes=Sizes.fixed(self.tokens_per_batch, phase.seq_len, trimmed=trimmed),
        )


def base_plan(steps: int, tokens_per_batch: int) -> Plan:
    """From random weights."""
    return Plan(steps, tokens_per_batch)


def long_plan(steps: int, tokens_per_batch: int) -> Plan:
    """On from a trained checkpoint: long documents only, gently, on batches that neither the base
    plan nor the drafter's draws. Run a second time it draws the same ones again."""
    return Plan(
        steps,
        tokens_per_batch,
        phases=(Phase(1.0, 8192, "long"),),
        quantized_from=0.5,
        decay_from=0.3,
        matrix_lr=0.01,
        adam_lr=1e-3,
        seed=2,
    )


PLANS = {"base": base_plan, "long": long_plan}

_of_worker: list[tuple[Plan, ModelConfig, EngramHash]] = []


def _start_worker(plan: Plan, config: ModelConfig, engram: EngramHash) -> None:
    torch.set_num_threads(1)
    _of_worker[:] = [(plan, config, engram)]


def _draw(step: int) -> HostBatch:
    plan, config, engram = _of_worker[0]
    return plan.draw(step, config, engram)


class Batches:
    """The batches of a plan from a step on, in order; `engram` on the CPU.

    Worker processes are forked at once: make it before anything uses the device. They end with the
    `with` block, not by Ctrl-C, which the terminal sends to them too.
    """

    def __init__(
        self, plan: Plan, first: int, workers: int, config: ModelConfig, engram: EngramHash
    ) -> None:
        self._plan, self._first = plan, first
        self._own = (plan, config, engram)
        self._ahead = _BATCHES_AHEAD * workers
        self._pool: Pool | None = None
        if workers:
            # The pool's threads and all its processes inherit the mask.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                context = multiprocessing.get_context("fork")
                self._pool = context.Pool(workers, _start_worker, self._own)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> Batches:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()

    def __iter__(self) -> Iterator[HostBatch]:
        steps = range(self._first, self._plan.steps)
        if self._pool is None:
            plan, config, engram = self._own
            yield from (plan.draw(step, config, engram) for step in steps)
            return
        pool = self._pool
        drawn = deque(pool.apply_async(_draw, (step,)) for step in steps[: self._ahead])
        for step in steps:
            batch = drawn.popleft().get()
            if step + self._ahead < self._plan.steps:
                drawn.append(pool.apply_async(_draw, (step + self._ahead,)))
            yield batch
