"""Host cost of admitting one long prompt.

    python benchmarks/cpu/admission.py --tokens 855040

Timed, from an int32 buffer: look the prefix up, allocate pages, build the block table, hash all
full blocks and publish them. That is everything on the core's thread that grows with the prompt,
although a server spreads hashing and publishing over the steps of the prefill. `receive_ms` is
what the receiving thread does before: check the ids and copy them into the request's own buffer.
Not timed: the rest of the steps (`scheduler_step.py`) and freeing.

**The floor, first.** A cold admission must read the tokens twice and write them once (hash; keep
them to verify later hits): 1 hash + 1 copy of the buffer. A hit must compare them with the stored
ones and hash them in one go to be able to continue the chain: 1 hash + 1 compare. Receiving is 1
copy and 1 reading. These ceilings are measured in this run, on one core. What is above the floor
is Python: at 855,040 tokens 3,340 pages, so 0.3 µs a page is 1 ms. Goal: 2 ms cold and 1 ms on a
hit; required: 4 and 2.

`cold_ms`: a new prompt into an empty pool. `cold_evicting_ms`: into a pool that is full of
published pages, which it evicts: the steady state of a server. `hit_ms`: the same
prompt again, all of it published. `hit_scattered_ms`: the same with pages in random order, as
after long use. Each is the median wall time over `--samples`, the variants alternate. `…_cpu_ms`
is the median processor time of the same samples: where it is lower, other processes had the core.
The peer, nano-vllm's BlockManager, takes a Python list; the list is made outside the timed part.
"""

from __future__ import annotations

import argparse
import gc
import time

import numpy as np
import numpy.typing as npt
import xxhash
from harness import (
    import_without_package_code,
    median_ms,
    milliseconds,
    print_json,
    print_table,
    spread,
)

from python_backend.replay import ReplayRule
from python_backend.request import Delta, Request, SamplingParams
from python_backend.scheduler.scheduler import Scheduler
from python_backend.scheduler.tracked import TrackedRequest
from python_backend.settings import CoreLimits

Int32Array = npt.NDArray[np.int32]

WINDOW = 128
PAGE_TOKENS = 2 * WINDOW
VOCAB_SIZE = 129_280
MAX_TOKENS = 1_024
REST_S = 0.005  # before each sample: it then starts with a fresh time slice on a busy machine


def limits(num_tokens: int, num_pages: int) -> CoreLimits:
    return CoreLimits(
        vocab_size=VOCAB_SIZE,
        window=WINDOW,
        history_width=3,
        max_num_tokens=8_192,
        max_batch_size=64,
        max_seq_len=max(num_tokens + MAX_TOKENS, 1 << 20),
        global_page_tokens=PAGE_TOKENS,
        window_page_tokens=WINDOW // 4,
        num_global_pages=num_pages,
        num_window_pages=1_024,
        replay=ReplayRule(WINDOW, WINDOW, WINDOW, PAGE_TOKENS),
        prefix_cache=True,
    )


def new_scheduler(num_tokens: int, prompts: float) -> Scheduler:
    """A scheduler whose pool holds that many prompts."""
    return Scheduler(limits(num_tokens, int(prompts * (num_tokens // PAGE_TOKENS + 8)) + 1))


def ignore(delta: Delta) -> None:
    del delta


def receive(scheduler: Scheduler, prompt: Int32Array) -> TrackedRequest:
    sampling, no_end = SamplingParams(), frozenset[int]()
    return scheduler.track(Request("r", prompt, MAX_TOKENS, sampling, no_end, ignore))


def admit(scheduler: Scheduler, tracked: TrackedRequest) -> int:
    """The timed part. Returns the tokens of the prefix hit."""
    residency = scheduler.residency
    admission = residency.plan(tracked)
    assert admission is not None
    residency.enter(0, tracked, admission)
    start, stop = len(admission.hit_pages), tracked.num_prompt_tokens // PAGE_TOKENS
    residency.publish(0, tracked, start, stop)
    return admission.replay.hit


def scatter(scheduler: Scheduler, prompt: Int32Array) -> None:
    """Publish `prompt` on pages in random order: take all pages one by one, free them shuffled."""
    pool = scheduler.residency.global_pages
    slots = np.random.default_rng(1).permutation(np.repeat(np.arange(1, 64), pool.num_pages // 64))
    for slot in slots:
        pool.extend(np.array([slot]), np.array([1]))
    for slot in range(1, 64):
        pool.release(slot)
    admit(scheduler, receive(scheduler, prompt))
    scheduler.residency.leave(0)


def peer_times(prompt: list[int], samples: int) -> dict[str, list[float]]:
    """nano-vllm's BlockManager on the same work. Raises ImportError where it is not installed."""
    manager_module = import_without_package_code("nanovllm", "engine.block_manager")
    sequence_module = import_without_package_code("nanovllm", "engine.sequence")
    times: dict[str, list[float]] = {"cold": [], "hit": []}
    for _ in range(samples):
        manager = manager_module.BlockManager(len(prompt) // PAGE_TOKENS + 8, PAGE_TOKENS)
        for name in ("cold", "hit"):

            def run() -> None:
                sequence = sequence_module.Sequence(prompt)
                manager.allocate(sequence, manager.can_allocate(sequence))  # noqa: B023
                sequence.num_scheduled_tokens = len(prompt) - sequence.num_cached_tokens
                manager.hash_blocks(sequence)  # noqa: B023
                sequences.append(sequence)  # noqa: B023

            sequences: list[object] = []
            times[name].append(milliseconds(run))
            manager.deallocate(sequences[0])
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=855_040)
    parser.add_argument("--samples", type=int, default=31)
    options = parser.parse_args()
    num_tokens, samples = options.tokens, options.samples
    if num_tokens < 2 * PAGE_TOKENS or samples < 3:
        parser.error(f"expected --tokens ≥ {2 * PAGE_TOKENS} and --samples ≥ 3")

    rng = np.random.default_rng(0)

    def random_prompt() -> Int32Array:
        return rng.integers(0, VOCAB_SIZE, num_tokens, dtype=np.int32)

    prompt, other = random_prompt(), random_prompt()
    target = np.empty_like(prompt)
    copy_ms = median_ms(lambda: np.copyto(target, prompt), samples)
    hash_ms = median_ms(lambda: xxhash.xxh3_128_digest(prompt.data), samples)
    same = prompt.copy()
    compare_ms = median_ms(lambda: np.array_equal(same, prompt), samples)

    full, reused, scattered = (new_scheduler(num_tokens, n) for n in (1.5, 2.5, 2.5))
    scatter(scattered, prompt)
    for scheduler, tokens in ((full, other), (full, prompt), (reused, prompt)):
        admit(scheduler, receive(scheduler, tokens))
        scheduler.residency.leave(0)

    times: dict[str, list[float]] = {}

    def sample(name: str, scheduler: Scheduler, tokens: Int32Array, hit: int) -> None:
        received: list[TrackedRequest] = []
        hits: list[int] = []
        time.sleep(REST_S)
        receive_ms = milliseconds(lambda: received.append(receive(scheduler, tokens)))
        times.setdefault("receive", []).append(receive_ms)
        processor_s = time.thread_time()
        admit_ms = milliseconds(lambda: hits.append(admit(scheduler, received[0])))
        times.setdefault(f"{name}_cpu", []).append((time.thread_time() - processor_s) * 1e3)
        times.setdefault(name, []).append(admit_ms)
        assert hits == [hit], f"expected a hit of {hit} tokens in {name}, got {hits}"
        scheduler.residency.leave(0)

    whole = (num_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS
    gc.collect()
    gc.disable()  # the peers' collections are not timed either
    for _ in range(samples):
        sample("cold_evicting", full, random_prompt(), 0)
        sample("hit", reused, prompt, whole)
        sample("hit_scattered", scattered, prompt, whole)
        sample("cold", new_scheduler(num_tokens, 1.5), prompt, 0)
    for scheduler in (full, reused, scattered):
        scheduler.check_integrity()

    cold_floor, hit_floor = copy_ms + hash_ms, compare_ms + hash_ms
    rows = [
        ("tokens", f"{num_tokens:8d}  ({num_tokens // PAGE_TOKENS} pages)"),
        ("copy of the buffer, ms", f"{copy_ms:8.3f}"),
        ("xxh3-128 of the buffer, ms", f"{hash_ms:8.3f}"),
        ("compare of two buffers, ms", f"{compare_ms:8.3f}"),
        ("floor cold / hit, ms", f"{cold_floor:8.3f} / {hit_floor:.3f}"),
    ]
    rows += [(f"{name}, ms", spread(values)) for name, values in times.items()]
    medians = {f"{name}_ms": round(float(np.median(values)), 4) for name, values in times.items()}
    peer: dict[str, float] | None = None
    try:
        peers = peer_times(prompt.tolist(), 3)
        peer = {f"{name}_ms": round(float(np.median(v)), 3) for name, v in peers.items()}
        rows += [(f"nano-vllm {name}, ms", spread(values)) for name, values in peers.items()]
    except ImportError as error:
        rows.append(("nano-vllm", f"not installed here ({error})"))
    print_table(rows)
    print_json(
        {
            "benchmark": "admission",
            "tokens": num_tokens,
            "samples": samples,
            **medians,
            "floor": {"cold_ms": round(cold_floor, 4), "hit_ms": round(hit_floor, 4)},
            "peer": {"nano-vllm": peer},
        }
    )


if __name__ == "__main__":
    main()
