"""Scores index keys of the released sizes over meta tensors, in the sizes that random steps are
padded to, and prints which kernels that launches which python_backend/executor/launches.py does not
foresee. For a process that interprets no kernels.

TINY's keys are not as wide as those that have kernels for few and for many rows of a request.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from engine.batch import StepShape
from engine.config_reader import read_config_file
from engine.directory import BuildConfig
from plugins.device.record import Variant, recording
from plugins.formats.records import index_record, main_record
from plugins.formats.rows import Region
from plugins.indexer import PagedSlots, kernel
from python_backend.executor import launches
from python_backend.executor.shapes import GraphSizes
from python_backend.settings import CoreLimits

TINY = Path(__file__).parents[1] / "vectors" / "tiny"
HEADS, WIDTH, MAIN, SELECTED = 32, 128, 512, 512
BUILDS = (
    BuildConfig(max_batch_size=130, max_num_tokens=4096, max_seq_len=855_000),
    BuildConfig(max_batch_size=16, max_num_tokens=2048, max_seq_len=5000),
    BuildConfig(max_batch_size=128, max_num_tokens=8192, max_seq_len=131_072),
)
Size = tuple[int, int, int]  # requests, rows and context


def foreseen(limits: CoreLimits) -> Iterator[Size]:
    sizes = GraphSizes.of(limits)
    for one in chain(
        launches._decode_sizes(sizes),
        launches._padded_sizes(sizes),
        launches._long_sizes(sizes, limits),
    ):
        # Either segment is of such sizes.
        yield one.requests, one.rows, one.context
        yield one.requests, one.decoder_rows, one.context


def served(limits: CoreLimits, random: np.random.Generator) -> Iterator[Size]:
    """Of the executor's segments: any number of requests and rows, and any context."""
    sizes = GraphSizes.of(limits)
    for _ in range(1500):
        context = int(np.exp(random.uniform(np.log(600), np.log(limits.max_seq_len))))
        requests = int(random.integers(1, limits.max_batch_size + 1))
        rows = max(requests, int(np.exp(random.uniform(0, np.log(limits.max_num_tokens)))))
        drafts = requests * int(random.integers(1, sizes.verify_rows + 1))
        last = int(random.integers(1, rows + 1))
        logits = min(requests, last)
        for shape in (
            sizes.decode(StepShape(requests, drafts, drafts, context)),
            sizes.encoder(step := StepShape(requests, rows, 0, context)) or sizes.long(step),
            sizes.decoder(step := StepShape(requests, last, logits, context)) or sizes.long(step),
        ):
            assert shape is not None
            yield shape.requests, shape.rows, shape.max_context


def variants_of(limits: CoreLimits, sizes: Iterable[Size]) -> set[Variant]:
    """Of a source of pairs and of one of single tokens."""
    with recording("sm_90") as variants:
        for (requests, rows, context), pair in {(s, pair) for s in sizes for pair in (1, 2)}:
            entries, per_page = context // pair, limits.global_page_tokens // pair
            if entries > SELECTED:
                score(requests, rows, entries, per_page)
    return variants


def score(requests: int, rows: int, entries: int, per_page: int) -> None:
    layout, main = index_record(WIDTH), main_record(MAIN)
    offset = per_page * main.bytes_per_row
    with torch.device(launches.DEVICE):
        pages = torch.empty(2, offset + per_page * layout.bytes_per_row, dtype=torch.uint8)
        first = torch.empty(requests, -(-entries // per_page), dtype=torch.int64)
        queries = torch.empty(rows, HEADS, WIDTH, dtype=torch.bfloat16)
        weights = torch.empty(rows, HEADS, dtype=torch.bfloat16)
        of_rows = torch.empty(rows, dtype=torch.int64)
    keys = Region(offset, per_page, WIDTH).store(pages, layout)
    slots = PagedSlots(first, per_page, entries)
    kernel.index_scores(queries, weights, keys, slots, of_rows, of_rows)


def main() -> None:
    tiny, _ = read_config_file(TINY / "config.json")
    config = replace(tiny, sliding_window=128, max_position_embeddings=1 << 20)
    random = np.random.default_rng(0)
    found = []
    for build in BUILDS:
        limits = launches._limits(config, build, torch.bfloat16, bounded=False)
        known = variants_of(limits, foreseen(limits))
        met = variants_of(limits, served(limits, random))
        unforeseen = [variant._asdict() for variant in sorted(met - known)]
        found.append({"foreseen": len(known), "served": len(met), "unforeseen": unforeseen})
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
