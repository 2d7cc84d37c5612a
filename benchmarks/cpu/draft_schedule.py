"""Tokens a second without drafts, with every draft verified that survives the threshold, and with
as many as pay for their rows.

    python benchmarks/cpu/draft_schedule.py --requests 1 4 16 --rounds 5

TinyFlash in this process. Requests come all at once, greedy: word problems, whose answers its
drafter knows well, or prompts of random tokens, whose answers it does not. The ways take turns,
round by round, with the same prompts; tokens a second are medians of the rounds, from the first
request until the last answer is whole, prompts included. Drafts verified and accepted are of one
verification, by the core's own counters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from harness import print_json, print_table

from builder.cli import main as build
from examples.tinyflash.evaluation import questions
from examples.tinyflash.in_process import InProcess

Int32Array = npt.NDArray[np.int32]
CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "tinyflash" / "checkpoint"
PROMPTS = ("problems", "random")
WAYS: dict[str, dict[str, Any]] = {
    "off": {},
    "threshold": {"speculative": True, "speculative_schedule": False},
    "schedule": {"speculative": True},
}


class Way:
    """One served engine; `rates` are tokens a second by round."""

    def __init__(self, engine: Path, requests: int, options: dict[str, Any]) -> None:
        self.served = InProcess(
            engine, {"max_batch_size": requests, "prefix_cache": False, **options}
        )
        self.rates: list[float] = []

    def run(self, prompts: list[Int32Array], max_tokens: int) -> float:
        began = time.perf_counter()
        answers = list(self.served.answers(prompts, max_tokens=max_tokens))
        tokens = sum(answer.num_output_tokens for answer in answers)
        return tokens / (time.perf_counter() - began)

    def drafts(self) -> dict[str, float]:
        """Verified and accepted, of one verification on average."""
        counted = self.served.statistics()
        number = max(1, counted.num_verifications)
        return {
            "verified": round(float(counted.num_drafted.sum()) / number, 2),
            "accepted": round(float(counted.num_accepted.sum()) / number, 2),
        }


def prompts_of(kind: str, served: InProcess, requests: int, seed: int) -> list[Int32Array]:
    if kind == "random":
        rng = np.random.default_rng(seed)
        return [rng.integers(10, 3000, 40, dtype=np.int32) for _ in range(requests)]
    asked = questions("arithmetic", max(2, requests), seed)[:requests]
    return [served.encode(question.prompt) for question in asked]


def measured(engine: Path, requests: int, options: argparse.Namespace) -> dict[str, Any]:
    ways = {name: Way(engine, requests, chosen) for name, chosen in WAYS.items()}
    try:
        for seed in range(options.rounds + 1):
            for way in ways.values():
                prompts = prompts_of(options.prompts, way.served, requests, seed)
                rate = way.run(prompts, options.tokens)
                if seed:  # the first warms up
                    way.rates.append(rate)
        return {
            name: {"tokens_per_s": round(statistics.median(way.rates), 2), **way.drafts()}
            for name, way in ways.items()
        }
    finally:
        for way in ways.values():
            way.served.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--prompts", choices=PROMPTS, default=PROMPTS[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    if min(*options.requests, options.rounds, options.tokens, options.threads) < 1:
        parser.error("expected numbers of at least 1")
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "engine"
        if build(["engine", f"--checkpoint_dir={CHECKPOINT}", f"--output_dir={engine}"]):
            raise SystemExit(1)
        cases = [
            {"requests": requests, **measured(engine, requests, options)}
            for requests in options.requests
        ]
    print_table([(str(case["requests"]), json.dumps(case)) for case in cases])
    print_json(
        {
            "benchmark": "draft_schedule",
            "prompts": options.prompts,
            "threads": options.threads,
            "rounds": options.rounds,
            "tokens": options.tokens,
            "cases": cases,
        }
    )


if __name__ == "__main__":
    main()
