"""Cost of structured output: compiling a schema, and the masks of a step.

    python benchmarks/cpu/grammar.py --requests 256 --vocab 129280 --threads 1

The vocabulary is the bytes and the most frequent words of Python's standard library, each with and
without a space before it. All requests follow one schema of seven properties (text, number,
pattern, list, object, enumeration); each goes its own way through it, token by token at random, and
begins anew at its end. Timed, in milliseconds of a step: `masks`, the packed masks of all rows;
`append`, walking on by the chosen tokens; `choose`, greedy choices of the sampler on float32
logits with the masks; **the floor**, the same choices without a grammar. With `drafts` the rows of
five drafts, all of them allowed, are masked as well.

Compiling: `first_ms` starts the worker process, `new_ms` is a schema that was not seen yet (tried
out by the worker, then compiled), `again_ms` one that was, compiled for one more answer; `begin_us`
is a request entering a slot.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import torch
from harness import milliseconds, print_json, print_table
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from python_backend.generation.rows import LogitRows
from python_backend.generation.sampler import Sampler
from python_backend.grammar.compiler import GrammarCompiler
from python_backend.grammar.grammar import Grammar
from python_backend.grammar.guide import Guide, GuideKind
from python_backend.grammar.masks import GrammarMasks
from python_backend.grammar.messages import Setup
from python_backend.request import Delta, Request, SamplingParams

END = 0
DRAFTS = 5
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z]+@[a-z]+\\.com$"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
        "address": {
            "type": "object",
            "properties": {
                "street": {"type": "string"},
                "zip": {"type": "string"},
                "country": {"enum": ["DE", "FR", "US"]},
            },
            "required": ["street", "zip"],
            "additionalProperties": False,
        },
        "score": {"type": "number"},
        "active": {"type": "boolean"},
    },
    "required": ["name", "age", "address"],
    "additionalProperties": False,
}


def tokenizer(vocab: int) -> Tokenizer:
    """Byte-level, without merges: only what its tokens spell matters here."""
    words: Counter[str] = Counter()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        words.update(
            re.findall(r"[A-Za-z]+|[0-9]{1,3}|[^A-Za-z0-9\s]{1,4}", path.read_text("utf-8"))
        )
    common = [word for word, _ in words.most_common()]
    pairs = (a + b for a, b in itertools.product(common[:500], repeat=2))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelled = (f"{space}{word}" for word in itertools.chain(common, pairs) for space in ("", "Ġ"))
    latin = (word for word in spelled if word.removeprefix("Ġ").isascii())
    unique = dict.fromkeys(itertools.chain(["<end>"], alphabet, latin))
    ids = {word: id for id, word in enumerate(itertools.islice(unique, vocab))}
    made = Tokenizer(models.BPE(vocab=ids, merges=[]))
    made.add_special_tokens(["<end>"])
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return made


def compiled(compiler: GrammarCompiler, name: str) -> Grammar:
    """The schema with one more property."""
    properties = SCHEMA["properties"] | {name: {"type": "null"}}  # type: ignore[operator]
    guide = Guide(GuideKind.JSON_SCHEMA, json.dumps(SCHEMA | {"properties": properties}))
    return compiler.compile(guide).result()


def rows_of(num_requests: int, drafts: np.ndarray) -> LogitRows:
    slots = np.arange(num_requests)
    zeros = np.zeros(num_requests, dtype=np.int64)
    counts = np.full(num_requests, drafts.shape[1], dtype=np.int64)
    return LogitRows.of_step(slots, zeros, drafts.ravel(), counts)


class Walks:
    """Requests that each go their own way through the grammar."""

    def __init__(
        self, compile: Callable[[], Grammar], num_requests: int, vocab: int, threads: int
    ) -> None:
        self.compile, self.masks = compile, GrammarMasks(vocab, END, threads)
        self.rng = np.random.default_rng(0)
        self.slots = np.arange(num_requests)
        self.none = rows_of(num_requests, np.empty((num_requests, 0), dtype=np.int32))
        self.begins: list[float] = []
        self.grammars: dict[int, Grammar] = {}  # their answers' own, which the masks do not keep
        for slot in range(num_requests):
            self.begin(slot)

    def begin(self, slot: int) -> None:
        empty = np.empty(0, np.int32)
        grammar = self.grammars[slot] = self.compile()
        self.begins.append(milliseconds(lambda: self.masks.begin(slot, grammar, empty)))

    def chosen(self, masks: np.ndarray) -> np.ndarray:
        """One allowed token of each row, at random."""
        bits = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        return np.array([self.rng.choice(np.flatnonzero(row)) for row in bits], dtype=np.int32)

    def append(self, tokens: np.ndarray) -> None:
        self.masks.append(self.slots, tokens[:, None], np.ones(len(tokens), dtype=np.int64))

    def begin_again(self, tokens: np.ndarray) -> None:
        for slot in np.flatnonzero(tokens == END).tolist():
            self.begin(slot)

    def drafts(self) -> np.ndarray:
        """What each request might say next, the end included."""
        found = []
        matchers = self.masks._matchers
        for slot in self.slots.tolist():
            grammar = self.grammars[slot]
            kept = matchers[grammar]
            matcher = matchers[grammar] = kept.deep_copy()
            row = self.none.take(np.array([slot]))
            said = []
            for _ in range(DRAFTS):
                token = int(self.chosen(self.masks.masks(row))[0])
                said.append(token)
                matcher.consume_tokens([token])
            matchers[grammar] = kept
            found.append(said)
        return np.array(found, dtype=np.int32)


def mask_times(walks: Walks, steps: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {"masks": [], "append": [], "drafts": []}
    for step in range(steps):
        if step % 10 == 0:
            rows = rows_of(len(walks.slots), walks.drafts())
            times["drafts"].append(milliseconds(lambda rows=rows: walks.masks.masks(rows)))
        start = time.perf_counter()
        masks = walks.masks.masks(walks.none)
        times["masks"].append((time.perf_counter() - start) * 1e3)
        tokens = walks.chosen(masks)
        times["append"].append(milliseconds(lambda tokens=tokens: walks.append(tokens)))
        walks.begin_again(tokens)
    return times


def choose_times(
    compile: Callable[[], Grammar] | None, num_requests: int, vocab: int, steps: int
) -> list[float]:
    """Milliseconds of greedy choices by logits that change from step to step."""

    def ignore(delta: Delta) -> None:
        del delta

    def request() -> Request:
        future: Future[Grammar] = Future()
        if compile is not None:
            future.set_result(compile())
        return Request(
            request_id="r",
            input_ids=np.array([1], dtype=np.int32),
            max_tokens=1000,
            sampling=SamplingParams(),
            end_ids=frozenset({END}),
            on_delta=ignore,
            grammar=None if compile is None else future,
        )

    sampler = Sampler(num_requests, vocab)
    rows = rows_of(num_requests, np.empty((num_requests, 0), dtype=np.int32))
    zeros = np.zeros(num_requests, dtype=np.int64)
    logits = torch.randn(num_requests, vocab, generator=torch.Generator().manual_seed(1))
    tokens = np.full(num_requests, END)
    requests: dict[int, Request] = {}  # which the sampler does not keep
    times = []
    with torch.inference_mode():
        for _ in range(steps):
            for slot in np.flatnonzero(tokens == END).tolist():
                requests[slot] = request()
                sampler.begin(slot, requests[slot], np.array([1], dtype=np.int32))
            logits = logits.roll(1, dims=0)
            start = time.perf_counter()
            tokens = sampler.choose(logits, rows).tokens
            times.append((time.perf_counter() - start) * 1e3)
            sampler.append(rows, zeros, tokens)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=4_096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    if min(options.requests, options.threads, options.steps) < 1 or options.vocab < 300:
        parser.error("expected numbers of at least 1, and a vocabulary of at least 300")
    torch.set_num_threads(options.threads)
    text = tokenizer(options.vocab).to_str()
    load = milliseconds(lambda: GrammarCompiler(Setup(text, options.vocab, END, None)).close())
    compiler = GrammarCompiler(Setup(text, options.vocab, END, None))
    first = milliseconds(lambda: compiled(compiler, "first"))
    new = [milliseconds(lambda i=i: compiled(compiler, f"p{i}")) for i in range(15)]
    again = [milliseconds(lambda: compiled(compiler, "p0")) for _ in range(15)]

    walks = Walks(
        lambda: compiled(compiler, "p0"), options.requests, options.vocab, options.threads
    )
    times = mask_times(walks, options.steps)
    times["choose"] = choose_times(walks.compile, options.requests, options.vocab, options.steps)
    floor = choose_times(None, options.requests, options.vocab, options.steps)
    compiler.close()
    report: dict[str, object] = {
        "benchmark": "grammar",
        "requests": options.requests,
        "vocab": options.vocab,
        "threads": options.threads,
        "steps": options.steps,
        "load_ms": round(load, 2),
        "first_ms": round(first, 2),
        "new_ms": round(statistics.median(new), 3),
        "again_ms": round(statistics.median(again), 4),
        "begin_us": round(statistics.median(walks.begins) * 1e3, 2),
    }
    for name, samples in times.items():
        report[f"{name}_ms"] = round(statistics.median(samples), 4)
        report[f"{name}_worst_ms"] = round(max(samples), 4)
    report["floor"] = {"choose_ms": round(statistics.median(floor), 4)}
    print_table([(name, str(value)) for name, value in report.items() if name != "benchmark"])
    print_json(report)


if __name__ == "__main__":
    main()
