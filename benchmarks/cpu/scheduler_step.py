"""Host cost of one decode step.

    python benchmarks/cpu/scheduler_step.py --requests 256 --drafts 5

Timed per step of R running requests, one token each: `Scheduler.schedule` (rows, budget, pages,
page tables, step arrays) and `Scheduler.commit` (append the tokens, end ids, max tokens, retire
and publish pages). Requests have different lengths, so in each step some cross a page boundary.
The step between the two is not run: its result is made up beforehand. Delivery (one callback per
request) is timed apart, because it is the receivers' price. With `--drafts K` each request verifies
K drafts in every step and half of them stay: the same work for several tokens.

**The floor, first.** A step touches about 40 numbers of 4 or 8 bytes per request: nothing, as
bytes. What costs is dispatch. The least a vectorised step can do is one gather or scatter per
array it reads or writes (18 arrays), one arithmetic or comparison on each (18 more) and, per
request and 256 tokens, one block hash. Both are calibrated in this run; the floor is their sum.
Goal: 1 µs a request at 256 requests; required: 2.

The peer, nano-vllm's scheduler, keeps Python objects; it samples into the same made-up tokens.
`us_per_request` is the median over steps; a step's time is divided by its requests.
"""

from __future__ import annotations

import argparse
import gc
import time
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import xxhash
from harness import import_without_package_code, median_ms, print_json, print_table, spread

from python_backend.core import EngineCore
from python_backend.drafting.rule import DraftRule
from python_backend.replay import ReplayRule
from python_backend.request import Delta, Request, SamplingParams
from python_backend.scheduler.scheduler import Scheduler
from python_backend.settings import CoreLimits
from python_backend.step_plan import DraftBlocks, StepPlan, StepResult

Float64Array = npt.NDArray[np.float64]

WINDOW = 128
PAGE_TOKENS = 2 * WINDOW
VOCAB_SIZE = 129_280
END_ID = 1
TOKEN = 77
NUM_ARRAYS = 18
WARM_UP = 64
MAX_PROMPT_TOKENS = 4_096


def limits(num_requests: int, num_tokens: int, num_drafts: int = 0) -> CoreLimits:
    length = MAX_PROMPT_TOKENS + num_tokens
    return CoreLimits(
        vocab_size=VOCAB_SIZE,
        window=WINDOW,
        history_width=3,
        max_num_tokens=max(8_192, num_requests),
        max_batch_size=num_requests,
        max_seq_len=length,
        global_page_tokens=PAGE_TOKENS,
        window_page_tokens=WINDOW // 4,
        num_global_pages=num_requests * (length // PAGE_TOKENS + 1) + 1,
        num_window_pages=num_requests * 6 + max(8_192, num_requests) // 32 + 1,
        replay=ReplayRule(WINDOW, WINDOW, WINDOW, PAGE_TOKENS),
        prefix_cache=True,
        draft=DraftRule(num_drafts, 0.0) if num_drafts else None,
    )


def ignore(delta: Delta) -> None:
    del delta


def requests(num_requests: int, num_tokens: int) -> list[Request]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(PAGE_TOKENS, MAX_PROMPT_TOKENS, num_requests)
    return [
        Request(
            request_id=str(i),
            input_ids=rng.integers(2, VOCAB_SIZE, length, dtype=np.int32),
            max_tokens=num_tokens,
            sampling=SamplingParams(),
            end_ids=frozenset({END_ID}),
            on_delta=ignore,
        )
        for i, length in enumerate(lengths.tolist())
    ]


def made_up(plan: StepPlan, num_drafts: int = 0) -> StepResult:
    tokens = np.where(plan.arrays.wants_logits, TOKEN, -1).astype(np.int32)
    if not num_drafts:
        return StepResult(tokens)
    block = (len(tokens), num_drafts)
    drafts = DraftBlocks(np.full(block, TOKEN, np.int32), np.ones(block, np.float32))
    return StepResult(tokens, (plan.num_drafts + 1) // 2, drafts)


class MadeUp:
    """An executor that answers at once, for the cost of everything else."""

    def run(self, plan: StepPlan) -> StepResult:
        return made_up(plan)


def scheduler_times(
    num_requests: int, num_steps: int, num_drafts: int = 0
) -> tuple[Float64Array, Float64Array]:
    """Seconds of schedule and of commit per decode step, [num_steps]."""
    # Nobody ends before the last step.
    total = (num_steps + WARM_UP + MAX_PROMPT_TOKENS // 8) * (num_drafts + 1) + MAX_PROMPT_TOKENS
    scheduler = Scheduler(limits(num_requests, total, num_drafts))
    for request in requests(num_requests, total):
        scheduler.add(scheduler.track(request))
    schedule, commit = [], []
    while len(schedule) < num_steps + WARM_UP:
        start = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        assert plan is not None
        result = made_up(plan, num_drafts)
        again = time.perf_counter()
        scheduler.commit(result)
        end = time.perf_counter()
        if plan.arrays.num_rows == num_requests * (num_drafts + 1):
            schedule.append(middle - start)
            commit.append(end - again)
    scheduler.check_integrity()
    return np.array(schedule[WARM_UP:]), np.array(commit[WARM_UP:])


def core_times(num_requests: int, num_steps: int) -> Float64Array:
    """Seconds of a whole step of the core, delivery to empty receivers included."""
    total = num_steps + WARM_UP + MAX_PROMPT_TOKENS
    core = EngineCore(MadeUp(), limits(num_requests, total))
    for request in requests(num_requests, total):
        core.add_request(request)
    times: list[float] = []
    while len(times) < num_steps + WARM_UP:
        before = core.statistics()
        start = time.perf_counter()
        core.step()
        seconds = time.perf_counter() - start
        after = core.statistics()
        if after.num_rows - before.num_rows == num_requests == after.num_running:
            times.append(seconds)
    return np.array(times[WARM_UP:])


def peer_times(num_requests: int, num_steps: int) -> Float64Array:
    """Seconds of nano-vllm's schedule and postprocess. Raises ImportError where it is missing."""
    scheduler_module = import_without_package_code("nanovllm", "engine.scheduler")
    sequence_module = import_without_package_code("nanovllm", "engine.sequence")
    sampling_module = import_without_package_code("nanovllm", "sampling_params")
    total = num_steps + WARM_UP + MAX_PROMPT_TOKENS
    sampling = sampling_module.SamplingParams(max_tokens=total)
    bounds = limits(num_requests, total)
    scheduler = scheduler_module.Scheduler(
        SimpleNamespace(
            max_num_seqs=num_requests,
            max_num_batched_tokens=bounds.max_num_tokens,
            eos=END_ID,
            kvcache_block_size=PAGE_TOKENS,
            num_kvcache_blocks=bounds.num_global_pages,
        )
    )
    for request in requests(num_requests, total):
        scheduler.add(sequence_module.Sequence(request.input_ids.tolist(), sampling))
    times: list[float] = []
    while len(times) < num_steps + WARM_UP:
        start = time.perf_counter()
        sequences, is_prefill = scheduler.schedule()
        middle = time.perf_counter()
        tokens = [TOKEN] * len(sequences)
        again = time.perf_counter()
        scheduler.postprocess(sequences, tokens, is_prefill)
        end = time.perf_counter()
        if not is_prefill and len(sequences) == num_requests:
            times.append(middle - start + end - again)
    return np.array(times[WARM_UP:])


def floor_us(num_requests: int) -> float:
    """One gather and one addition per array and step, and the block hashes, per request."""
    slots = np.random.default_rng(0).permutation(num_requests)
    numbers = np.arange(num_requests)
    gather_ms = median_ms(lambda: numbers[slots], 2_000)
    add_ms = median_ms(lambda: numbers + numbers, 2_000)
    block = np.zeros(PAGE_TOKENS, dtype=np.int32)
    hash_ms = median_ms(lambda: xxhash.xxh3_128_digest(block.data), 2_000)
    return NUM_ARRAYS * (gather_ms + add_ms) * 1e3 / num_requests + hash_ms * 1e3 / PAGE_TOKENS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--drafts", type=int, default=5, help="of a request in each step (5)")
    options = parser.parse_args()
    num_requests, num_steps = options.requests, options.steps
    if num_requests < 1 or num_steps < 3:
        parser.error("expected --requests ≥ 1 and --steps ≥ 3")

    gc.collect()
    gc.disable()
    to_us = 1e6 / num_requests
    floor = floor_us(num_requests)
    schedule, commit = (seconds * to_us for seconds in scheduler_times(num_requests, num_steps))
    drafting = sum(scheduler_times(num_requests, num_steps, options.drafts)) * to_us
    whole = core_times(num_requests, num_steps) * to_us
    rows = [
        ("requests", f"{num_requests:8d}"),
        ("floor, µs a request", f"{floor:8.3f}"),
        ("schedule, µs a request", spread(schedule.tolist())),
        ("commit, µs a request", spread(commit.tolist())),
        ("both, µs a request", spread((schedule + commit).tolist())),
        (f"both with {options.drafts} drafts, µs a request", spread(drafting.tolist())),
        ("step of the core with delivery", spread(whole.tolist())),
    ]
    peer: float | None = None
    try:
        times = peer_times(num_requests, num_steps) * to_us
        peer = round(float(np.median(times)), 4)
        rows.append(("nano-vllm, µs a request", spread(times.tolist())))
    except ImportError as error:
        rows.append(("nano-vllm", f"not installed here ({error})"))
    print_table(rows)
    print_json(
        {
            "benchmark": "scheduler_step",
            "requests": num_requests,
            "steps": num_steps,
            "us_per_request": round(float(np.median(schedule + commit)), 4),
            "schedule_us": round(float(np.median(schedule)), 4),
            "commit_us": round(float(np.median(commit)), 4),
            "drafts": options.drafts,
            "with_drafts_us": round(float(np.median(drafting)), 4),
            "with_delivery_us": round(float(np.median(whole)), 4),
            "floor": {"us_per_request": round(floor, 4)},
            "peer": {"nano-vllm": peer},
        }
    )


if __name__ == "__main__":
    main()
