"""Cost of choosing the tokens of one step.

    python benchmarks/cpu/sampling.py --requests 256 --vocab 4096 --threads 2

Timed: `Sampler.choose` on float32 logits of one row a request, and `Sampler.append` of what it
chose. Four batches: all greedy; all with temperature only; every option mixed, where each request
has a temperature and each other option is on for every second or third; everything, where each
request has every option at once (not a goal, the worst case). Goals at 256 requests and a
vocabulary of 4,096 on 2 cores: all greedy 2 ms, every option mixed 15 ms.

**The floor** is one pass over the logits, as fast as this machine finds each row's largest.
`*_ms` are medians, `*_least_ms` the fastest step: what other work on the machine adds is not in it.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import torch
from harness import median_ms, milliseconds, print_json, print_table

from python_backend.generation.rows import LogitRows
from python_backend.generation.sampler import Sampler
from python_backend.request import Delta, Request, SamplingParams

PROMPT_TOKENS = 512
OUTPUT_TOKENS = 128
NO_DRAFTS = np.zeros(0, dtype=np.int32)


def ignore(delta: Delta) -> None:
    del delta


def greedy(i: int) -> SamplingParams:
    return SamplingParams(seed=i)


def plain(i: int) -> SamplingParams:
    return SamplingParams(seed=i, temperature=0.5 + i % 4 / 4)


def mixed(i: int) -> SamplingParams:
    return SamplingParams(
        seed=i,
        temperature=0.5 + i % 4 / 4,
        top_k=(0, 50, 0)[i % 3],
        top_p=(1.0, 0.9)[i % 2],
        min_p=(0.0, 0.0, 0.05)[i % 3],
        repetition_penalty=(1.0, 1.2)[i % 2],
        presence_penalty=(0.0, 0.5, 0.0)[i % 3],
        frequency_penalty=(0.0, 0.3, 0.0)[i % 3],
        logit_bias=((7, 2.0), (8, -2.0)) if i % 3 == 1 else (),
        bad_words=((5,), (6, 7), (8, 9, 10)) if i % 3 == 2 else (),
        min_tokens=(0, 1_000_000)[i % 2],
        logprobs=(None, 5, None)[i % 3],
    )


def everything(i: int) -> SamplingParams:
    return SamplingParams(
        seed=i,
        temperature=0.5 + i % 4 / 4,
        top_k=1000,
        top_p=0.9,
        min_p=0.001,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        logit_bias=((7, 2.0), (8, -2.0)),
        bad_words=((5,), (6, 7), (8, 9, 10)),
        min_tokens=1_000_000,
        logprobs=5,
    )


BATCHES = {"greedy": greedy, "temperature": plain, "mixed": mixed, "everything": everything}


def step_ms(name: str, num_requests: int, vocab: int, steps: int) -> tuple[float, float]:
    """Milliseconds of a step: the median, and the fastest."""
    rng = np.random.default_rng(0)
    sampler = Sampler(num_requests, vocab)
    for slot in range(num_requests):
        tokens = rng.integers(0, vocab, PROMPT_TOKENS + OUTPUT_TOKENS, dtype=np.int32)
        request = Request(
            request_id=str(slot),
            input_ids=tokens[:PROMPT_TOKENS],
            max_tokens=1_000,
            sampling=BATCHES[name](slot),
            end_ids=frozenset({1}),
            on_delta=ignore,
        )
        sampler.begin(slot, request, tokens)
    slots = np.arange(num_requests)
    index = np.full(num_requests, OUTPUT_TOKENS, dtype=np.int64)
    rows = LogitRows.of_step(slots, index, NO_DRAFTS, np.zeros(num_requests, dtype=np.int64))
    logits = 2.0 * torch.randn(num_requests, vocab, generator=torch.Generator().manual_seed(1))
    none = np.zeros(num_requests, dtype=np.int64)

    def step() -> None:
        choice = sampler.choose(logits, rows)
        sampler.append(rows, none, choice.tokens)

    with torch.inference_mode():
        for _ in range(3):
            step()
        times = [milliseconds(step) for _ in range(steps)]
    return statistics.median(times), min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4_096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if min(options.requests, options.vocab, options.threads, options.steps) < 1:
        parser.error("expected numbers of at least 1")
    torch.set_num_threads(options.threads)
    logits = np.random.default_rng(0).standard_normal(
        (options.requests, options.vocab), dtype=np.float32
    )
    floor = median_ms(lambda: logits.max(axis=-1), options.steps)
    measured = {
        name: step_ms(name, options.requests, options.vocab, options.steps) for name in BATCHES
    }
    rows = [("floor, ms a step", f"{floor:8.3f}")]
    rows += [
        (f"{name}, ms a step", f"{median:8.3f}   least {least:8.3f}")
        for name, (median, least) in measured.items()
    ]
    print_table(rows)
    report: dict[str, object] = {
        "benchmark": "sampling",
        "requests": options.requests,
        "vocab": options.vocab,
        "threads": options.threads,
        "steps": options.steps,
    }
    for name, (median, least) in measured.items():
        report[f"{name}_ms"], report[f"{name}_least_ms"] = round(median, 4), round(least, 4)
    print_json(report | {"floor": {"max_ms": round(floor, 4)}})


if __name__ == "__main__":
    main()
