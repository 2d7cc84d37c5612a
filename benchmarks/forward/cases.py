"""Batches by a small grammar, and the steps that a scheduler would make of them.

    decode=32*1@8192             32 requests decode one token, their contexts 8192 tokens long
    verify=16*6@131072:5         16 verify five drafts each
    hit=2048@10240               one prompt of 10240 tokens, all but 2048 found in the prefix cache
    last=2048@10240c             the same, all but 2048 computed in earlier steps
    mix=8192,32*1@8192           a cold prompt beside decoding requests

NAME=[N*]ROWS[@CONTEXT][c][:DRAFTS], comma-separated; CONTEXT counts the rows and is their number
unless given. A request of 1 + DRAFTS rows behind a longer context decodes; others prefill, and a
prefix hit brings its replayed rows along.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from engine.batch import StepArrays
from python_backend.replay import plan_replay
from python_backend.settings import CoreLimits
from python_backend.step_plan import PageTables, SamplingArrays, StepPlan

_REQUEST = re.compile(
    r"(?:(?P<count>\d+)\*)?(?P<rows>\d+)(?:@(?P<context>\d+))?(?P<chunk>c)?(?::(?P<drafts>\d+))?"
)


@dataclass(frozen=True)
class Request:
    rows: int
    context: int
    drafts: int
    is_chunk: bool

    @property
    def decodes(self) -> bool:
        return self.rows == 1 + self.drafts and self.context > self.rows and not self.is_chunk


@dataclass(frozen=True)
class Case:
    name: str
    text: str
    requests: tuple[Request, ...]

    @property
    def most_drafts(self) -> int:
        return max(request.drafts for request in self.requests)

    @property
    def longest(self) -> int:
        return max(request.context for request in self.requests)


def parse(text: str) -> Case:
    """Raises ValueError saying what the grammar wants."""
    name, equals, batch = text.partition("=")
    requests: list[Request] = []
    for part in batch.split(","):
        found = _REQUEST.fullmatch(part)
        if not (name and equals and found):
            raise ValueError(
                f"expected NAME=[N*]ROWS[@CONTEXT][c][:DRAFTS], comma-separated, got {text!r}"
            )
        rows = int(found["rows"])
        one = Request(
            rows, int(found["context"] or rows), int(found["drafts"] or 0), bool(found["chunk"])
        )
        if not 1 <= one.rows <= one.context or one.drafts >= one.rows:
            raise ValueError(
                f"expected at least one row beside the drafts and a context that holds them, got "
                f"{part!r}"
            )
        requests += [one] * int(found["count"] or 1)
    return Case(name, text, tuple(requests))


def jittered(case: Case, longest: int, *, seed: int = 0) -> Case:
    """The contexts of requests that decode, spread by up to half of each: evenly around what the
    case says, in random order, and none beyond `longest`. A lone one keeps its own."""
    rng = np.random.default_rng(seed)
    requests = list(case.requests)
    for kind in dict.fromkeys(request for request in requests if request.decodes):
        places = [r for r, request in enumerate(requests) if request == kind]
        before = kind.context - kind.rows
        most = max(0, min(before // 2, longest - kind.context))
        shares = rng.permutation(2 * np.arange(len(places)) + 1 - len(places)) / len(places)
        for r, moved in zip(places, np.rint(most * shares).astype(int).tolist(), strict=True):
            requests[r] = replace(kind, context=max(kind.rows + 1, kind.context + moved))
    return replace(case, requests=tuple(requests))


def step_of(case: Case, limits: CoreLimits, *, seed: int = 0) -> StepPlan:
    """The step of a scheduler whose requests stand as the case says: random tokens, pages of their
    own, the null page where a window has gone.

    Raises ValueError for a hit that is not whole pages.
    """
    rng = np.random.default_rng(seed)
    count = len(case.requests)
    rows, first, floors = [], [], np.zeros((3, count), dtype=np.int64)
    for r, request in enumerate(case.requests):
        before = request.context - request.rows
        start = before
        tail = limits.replay.decoder_tail
        if not request.decodes:
            hit = 0 if request.is_chunk else before
            plan = plan_replay(
                limits.replay,
                num_tokens=request.context,
                num_prompt_tokens=request.context,
                hit=hit,
            )
            if not request.is_chunk:
                start = plan.replay_start
            floors[:, r] = plan.encoder_floor, plan.decoder_floor, plan.write_floor
        elif tail is not None:
            floors[1, r] = max(0, before - tail)
        rows.append(request.context - start)
        first.append(start)
    num_rows = np.array(rows, dtype=np.int64)
    drafts = np.array([request.drafts for request in case.requests], dtype=np.int64)
    return StepPlan(
        arrays=StepArrays(
            tokens=rng.integers(3, limits.vocab_size, int(num_rows.sum()), dtype=np.int32),
            query_start=np.concatenate([[0], np.cumsum(num_rows)]).astype(np.int32),
            first_position=np.array(first, dtype=np.int64),
            encoder_floor=floors[0],
            decoder_floor=floors[1],
            write_floor=floors[2],
            history=rng.integers(3, limits.vocab_size, (count, limits.history_width), np.int32),
            wants_logits=np.ones(count, dtype=bool),
        ),
        slots=np.arange(count, dtype=np.int32),
        fresh=np.zeros(count, dtype=bool),
        tables=_tables(limits, np.array(first), num_rows),
        sampling=SamplingArrays(np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.int64)),
        beginnings=(),
        num_drafts=drafts,
        wants_drafts=np.full(count, limits.most_drafts > 0),
    )


def prompt_steps(tokens: int, limits: CoreLimits, *, chunk: int, hit: int = 0) -> list[StepPlan]:
    """The steps of one prompt of so many tokens in chunks, whose decoder runs at its end; `hit` of
    them were found in the prefix cache."""
    tail = limits.replay.decoder_tail
    floor = 0 if tail is None else max(0, tokens - tail)
    plans = []
    for start in range(hit, tokens, chunk):
        end = min(start + chunk, tokens)
        follows = "c" if start > hit or not hit else ""
        plan = step_of(parse(f"chunk={end - start}@{end}{follows}"), limits)
        arrays = replace(
            plan.arrays,
            decoder_floor=np.array([floor]),
            wants_logits=np.array([end == tokens]),
        )
        plans.append(replace(plan, arrays=arrays))
    return plans


def num_global_pages(case: Case, page_tokens: int) -> int:
    """The null page included."""
    return 1 + sum(-(-request.context // page_tokens) for request in case.requests)


def _tables(limits: CoreLimits, first: np.ndarray, num_rows: np.ndarray) -> PageTables:
    page_tokens, page_rows = limits.global_page_tokens, limits.window_page_tokens
    global_pages = np.zeros((limits.max_batch_size, limits.global_columns), dtype=np.int32)
    window_pages = np.zeros((limits.max_batch_size, limits.window_columns), dtype=np.int32)
    next_global = next_window = 1
    for r, (start, count) in enumerate(zip(first.tolist(), num_rows.tolist(), strict=True)):
        pages = -(-(start + count) // page_tokens)
        global_pages[r, :pages] = np.arange(next_global, next_global + pages)
        next_global += pages
        live = np.arange(
            max(0, start - limits.window + 1) // page_rows, -(-(start + count) // page_rows)
        )
        window_pages[r, live % limits.window_columns] = next_window + np.arange(len(live))
        next_window += len(live)
    return PageTables(global_pages, window_pages, page_tokens, page_rows)
