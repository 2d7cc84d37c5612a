"""Compiles every kernel at the released sizes for one compute capability and bytes of
shared memory; run by a test.

    python kernels_ahead.py 90 232448

Prints one JSON object a kernel: its name, shared memory in bytes, and the instructions of its
products.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import kernels_ahead_attention
import kernels_ahead_experts
import kernels_ahead_linear
import triton.language as tl

from plugins.compressor import kernel as compressor
from plugins.device import pages, row_numbers
from plugins.device.ahead import compile_kernel
from plugins.device.launch import Limits
from plugins.engram import kernel as engram
from plugins.indexer import kernel as indexer
from plugins.indexer import kernel_blocks as index_blocks
from plugins.indexer import kernel_few as index_few
from plugins.indexer import kernel_many as index_many
from plugins.indexer import kernel_queries as index_queries
from plugins.indexer import kernel_rows as index_rows
from plugins.kv_write import kernel as kv_write
from plugins.markov import kernel as markov
from plugins.sample import kernel as sample
from plugins.topk_select import kernel as select
from plugins.topk_select import kernel_blocks as in_blocks
from plugins.topk_select import kernel_hopper as select_hopper
from plugins.topk_select import kernel_levels as levels

STRIDE = "aligned i32"
MAIN = {"ROWS": 64, "ROW": 288, "STORED": 4}
WINDOW = {"ROWS": 32, "ROW": 528, "STORED": 2}
INDEX = {"ROWS": 64, "ROW": 64, "STORED": 5}
KEYS = {**INDEX, "PER_PAGE": 128}
FOR_EVERY_GENERATION = (
    "attention", "attention float32", "index float8", "index float8 pairs", "index decode",
    "select rest", "write main",
    "linear planes", "linear planes, 128 rows", "experts down", "mhc",
)  # fmt: skip
DOT = {"DOT": tl.bfloat16, "WIDEN": False}


def index_constants(**more: Any) -> dict[str, Any]:
    heads = {"H": 32, "WIDTH": 128, "HEADS": 32, "PAIRS": 64, "TILE": 128}
    return {**heads, **KEYS, **DOT, **more}


INDEXER = {
    "queries": "*bf16", "row_stride": STRIDE, "head_stride": STRIDE, "head_weights": "*bf16",
    "weight_stride": STRIDE, "data": "*u8", "page_stride": STRIDE, "key_slots": "*i64",
    "slots_stride": STRIDE, "num_keys": STRIDE, "request": "*i64", "num_visible": "*i64",
    "scores": "*fp32", "num_rows": "i32", "num_columns": STRIDE, "blocks": "*i64",
    "blocks_stride": STRIDE, "codes": "*u8", "weights": "*fp32", "groups": "i32", "tiles": "i32",
}  # fmt: skip
SELECT = {
    "scores": "*fp32", "row_stride": STRIDE, "columns": "*i32", "num_columns": STRIDE,
    "kept_scores": "*fp32", "kept_columns": "*i32", "out_width": "i32", "k": "i32",
    "list_scores": "*fp32", "list_columns": "*i32",
    "num_visible": "*i64", "block_scores": "*fp32", "num_blocks": "i32", "largest": "fp32",
    "blocks": "*i64", "blocks_stride": STRIDE, "entries": "*i64", "num_entries": "i32",
    "gathered": "*fp32", "num_gathered": STRIDE, "places": "*i64", "num_places": STRIDE,
    "eights": "*fp32", "num_eights": STRIDE, "tops": "*fp32", "num_tops": STRIDE,
    "names": "*i32", "selected": "*i64",
}  # fmt: skip
SAMPLE = {
    "logits": "*fp32", "row_stride": STRIDE, "temperature": "*fp32", "top_k": "*i64",
    "top_p": "*fp32", "min_p": "*fp32", "seed": "*i64", "output_index": "*i64", "vocab": STRIDE,
    "peaks": "*fp32", "ids": "*i32", "least": "*fp32", "steps": "*fp32", "maxima": "*fp32",
    "tails": "*fp32", "num_chunks": "i32", "num_groups": STRIDE, "state": "*fp32",
    "counter": "*i32", "tokens": "*i64", "sums": "*i64", "listed": "*fp32", "listed_ids": "*i32",
}  # fmt: skip
WRITE = {
    "values": "*bf16", "value_stride": STRIDE, "slots": "*i64", "data": "*u8",
    "page_stride": STRIDE, "a": "*fp32", "a_group": STRIDE, "a_token": STRIDE, "b": "*fp32",
    "b_group": STRIDE, "b_token": STRIDE, "pooled": "*fp32", "current": "*fp32",
    "row_stride": STRIDE, "tail": "*fp32", "request": "*i64", "is_first": "*u8",
    "read_slots": "*i64", "previous": "*fp32",
}  # fmt: skip
ENGRAM = {
    "tokens": "*i64", "request": "*i64", "query_start": "*i64", "history": "*i64",
    "token_class": "*i64", "multipliers": "*i64", "primes": "*i64", "offsets": "*i64",
    "rows": "*i64", "num_tokens": "i32", "pad_class": "i32", "dead_token": "i32",
    "data": "*u8", "memory": "*bf16", "count": "i32", "factor": "fp32",
    "streams": "*bf16", "x_row": STRIDE, "x_stream": STRIDE, "keys": "*bf16", "k_row": STRIDE,
    "k_stream": STRIDE, "value": "*bf16", "v_row": STRIDE, "q_weight": "*fp32",
    "k_weight": "*fp32", "alive": "*u8", "out": "*bf16", "num_rows": "i32", "norm_eps": "fp32",
}  # fmt: skip


# Name, kernel, arguments, constants, warps, and where a launch sets them, stages.
Kernels = list[tuple[str, Any, dict[str, str], dict[str, Any], int, *tuple[int, ...]]]


def row_kernels() -> Kernels:
    """Those of a step's rows, of index queries, and of the draft's choices."""
    rows = {
        **WRITE, "positions": "*i64", "floor": "*i64", "tokens": "*i64", "keys": "*i64",
        "first_visible": "*i64", "second_visible": "*i64", "is_token": "*u8", "token": "i32",
        "owners": "*i64", "query_start": "*i64", "write_floor": "*i64", "first_entries": "*i64",
        "second_entries": "*i64", "newest": "*i64", "before": "*i64", "num_rows": "i32",
        "num_requests": "i32", "capacity": "i32", "table": "*i32", "table_stride": STRIDE,
        "columns": "i32", "first": "*i64", "width": "i32", "numel": "i32", "tail": "*i64",
    }  # fmt: skip
    both = {"FIRST": 1, "SECOND": 2}
    window = {**both, "WINDOW": 128, "PADDED": 128, "TOKENS": True}
    queries = {
        **INDEXER, "positions": "*i64", "inv_freq": "*fp64", "turned_queries": "*bf16",
        "scaled_weights": "*bf16", "scale": "fp32",
    }  # fmt: skip
    turned = {
        "H": 32, "WIDTH": 128, "ROTATED": 64, "PAIRS": 64, "FORMAT": 3, "HEADS": 4,
        "PADDED_HEADS": 32, "OVERLAP": True,
    }  # fmt: skip
    choice = {
        "base": "*fp32", "base_stride": STRIDE, "correction": "*fp32", "correction_stride": STRIDE,
        "keys": "*i64", "vocab": STRIDE, "parts": "i32", "embed": "*bf16", "embed_stride": STRIDE,
        "tokens": "*i64", "taken": "*bf16",
    }  # fmt: skip
    return [
        ("window numbers", row_numbers._window_numbers, rows, window, 1),
        ("entry numbers", row_numbers._entry_numbers, rows, {**both, "TILE": 128}, 4),
        ("first slots", pages._first_slots, rows, {"ROWS": 128, "TILE": 512, "OVERLAP": True}, 4),
        (
            "tail slots", pages._tail_slots, rows,
            {"CAPACITY": 8, "TILE": 512, "OVERLAP": True}, 4,
        ),
        ("queries", index_queries._index_queries, queries, turned, 4),
        ("best of parts", markov._best_of_parts, choice, {"PART": 2048, "OVERLAP": True}, 4),
        (
            "take best", markov._take_best, choice,
            {"RANK": 256, "PADDED": 256, "PARTS": 64, "OVERLAP": True}, 1,
        ),
    ]  # fmt: skip


def engram_kernels(device: Limits) -> Kernels:
    row = {"WIDTH": 256, "PADDED": 256, "ROWS": 8, "FLOAT8": device.float8, "OVERLAP": True}
    return [
        (
            "engram hash", engram._rows, ENGRAM,
            {"REACH": 3, "HEADS": 8, "PADDED": 8, "TOKENS": 32}, 4,
        ),
        ("engram rows", engram._lookup, ENGRAM, {**row, "STORED": 1, "ROW": 264}, 4),
        ("engram rows NVFP4", engram._lookup, ENGRAM, {**row, "STORED": 2, "ROW": 144}, 4),
        (
            "engram gate", engram._gate, ENGRAM,
            {"STREAMS": 4, "WIDTH": 5120, "TILE": 1024, "MASKED": True}, 4,
        ),
    ]  # fmt: skip


def index_float8_kernels() -> Kernels:
    shared = {**INDEX, "PER_PAGE": 64, "HEADS": 32, "WARPS": 4, "WIDEN": False, "EARLY": True}
    few = {**shared, "TILE": 64}
    one = {"SHARING": 1, "SPAN": 1, "BATCH": 1}
    return [
        ("index float8", index_few.score_few_rows, INDEXER, {**few, **one, "PAIRS": False}, 4),
        (
            "index float8 pairs", index_few.score_few_rows, INDEXER,
            {**few, **one, "ROWS": 128, "PER_PAGE": 128, "PAIRS": True}, 4,
        ),
        (
            "index float8 verify", index_few.score_few_rows, INDEXER,
            {**few, "SHARING": 6, "SPAN": 8, "BATCH": 2, "PAIRS": False}, 4,
        ),
        (
            "index float8 candidates", index_blocks.score_blocks, INDEXER,
            {**few, "BLOCK": 8, "ONE": False}, 4,
        ),
        (
            "index float8 prefill", index_many.score_many_rows, INDEXER,
            {**shared, "SHARING": 456, "SPAN": 512, "TILE": 128, "STAGES": 4}, 4,
        ),
        (
            "index float8 pack", index_rows.pack_queries, INDEXER,
            {"H": 32, "HEADS": 32, "EARLY": True}, 4,
        ),
    ]  # fmt: skip


def kernels(device: Limits) -> Kernels:
    one = {
        "PART": 16_384, "GROUPS": 2048, "LIST": 1024, "TILE": 2048, "FIRST": True, "LAST": False,
    }  # fmt: skip
    return [
        *kernels_ahead_attention.kernels(device),
        ("index decode", indexer._index_scores, INDEXER, index_constants(TILES=4, SHARING=1), 4),
        ("index verify", indexer._index_scores, INDEXER, index_constants(TILES=4, SHARING=4), 4),
        ("index candidates", indexer._candidate_scores, INDEXER, index_constants(BLOCK=8), 4),
        *index_float8_kernels(),
        ("select part", select._select_part, SELECT, one, 4),
        (
            "select rest", select._select_part, {**SELECT, "kept_columns": "*i64"},
            {**one, "PART": 1024, "FIRST": False, "LAST": True}, 4,
        ),
        (
            "select blocks", select._select_part, {**SELECT, "kept_columns": "*i64"},
            {**one, "GROUPS": 8192, "LIST": 4096, "FIRST": False, "LAST": True}, 8,
        ),
        *(
            (
                f"select by bins, {warps} warps", select_hopper.select_by_bins, SELECT,
                {"CHUNKS": 4, "RESULTS": 2048, "FIRST": warps == 16, "LAST": warps == 32,
                 "WARPS": warps}, warps,
            )
            for warps in (16, 32)
        ),
        ("select block tops", levels.block_tops, SELECT, {"TILE": 4096}, 8),
        ("select levels", levels.descend, SELECT, {"TOP": 2048, "ROOM": 512}, 8),
        ("block scores", select._block_scores, SELECT, {"BLOCK": 8, "PADDED": 8, "TILE": 512}, 8),
        ("gather blocks", in_blocks.gather_blocks, SELECT, {"BLOCK": 8, "TILE": 1024}, 4),
        ("name columns", in_blocks._name_columns, SELECT, {"BLOCK": 8, "TILE": 512}, 4),
        *(
            (
                f"write {name}", kv_write._kv_write, WRITE,
                {**record, "FORMAT": rounding, "WIDTH": width, "PADDED": width}, 1,
            )
            for name, record, rounding, width in (
                ("main", MAIN, 1, 512), ("window", WINDOW, 2, 512), ("index", INDEX, 3, 128),
            )
        ),
        (
            "write rotated", kv_write._rotated_write,
            {**WRITE, "x": "*bf16", "norm": "*bf16", "positions": "*i64", "inv_freq": "*fp64",
             "eps": "fp32"},
            {**WINDOW, "FORMAT": 2, "WIDTH": 512, "PADDED": 512, "ROTATED": 64, "NORM": True,
             "OVERLAP": device.float8}, 4,
        ),
        (
            "write beside norm", kv_write._norm_and_write,
            {**WRITE, "latent": "*bf16", "latent_stride": STRIDE, "latent_norm": "*bf16",
             "normed": "*bf16", "x": "*bf16", "norm": "*bf16", "positions": "*i64",
             "inv_freq": "*fp64", "eps": "fp32"},
            {**WINDOW, "FORMAT": 2, "WIDTH": 512, "PADDED": 512, "ROTATED": 64, "LATENT": 1280,
             "PADDED_LATENT": 2048, "OVERLAP": device.float8}, 4,
        ),
        (
            "pages", pages._page_slots,
            {**WRITE, "table": "*i32", "table_stride": STRIDE, "columns": "i32", "numel": "i32",
             "positions": "*i64", "width": "i32"},
            {"ROWS": 128, "RING": True, "TILE": 512, "OVERLAP": device.float8}, 4,
        ),
        *row_kernels(),
        ("pool", compressor._pool_pairs, WRITE, {"WIDTH": 512, "TILE": 512}, 4),
        (
            "previous", compressor._previous_rows, WRITE,
            {"ROWS": 4, "ROW": 1024, "STORED": 0, "WIDTH": 1024, "TILE": 512}, 4,
        ),
        (
            "pooled rows", compressor._pooled_rows,
            {**WRITE, "norm": "*bf16", "write_slots": "*i64", "latent": "*bf16", "eps": "fp32"},
            {"ROWS": 4, "ROW": 1024, "STORED": 0, "WIDTH": 512, "PADDED": 512, "KEEP": True,
             "OVERLAP": device.float8}, 4,
        ),
        *kernels_ahead_linear.kernels(device),
        *engram_kernels(device),
        *kernels_ahead_experts.kernels(device),
        ("sample survey", sample._survey, SAMPLE, {"CHUNK": 4096, "GROUP": 64, "LEVELS": 8}, 4),
        (
            "sample limit", sample._limit, SAMPLE,
            {"CHUNKS": 32, "GROUPS": 2048, "LEVELS": 8, "GRID": 64, "HALF": False, "FEW": 2048}, 4,
        ),
        ("sample collect", sample._collect, SAMPLE, {"CHUNK": 4096}, 4),
        (
            "sample draw", sample.draw, SAMPLE,
            {"CHUNKS": 32, "CHUNK": 4096, "TILE": 2048, "PAIRS": 256}, 8,
        ),
    ]  # fmt: skip


def main() -> None:
    capability, shared_memory = int(sys.argv[1]), int(sys.argv[2])
    device = Limits(shared_memory, capability // 10 == 10, capability >= 89)
    for name, kernel, arguments, constants, warps, *stages in kernels(device):
        # What differs between generations is how products are made.
        if capability != 90 and name not in FOR_EVERY_GENERATION:
            continue
        if name.startswith("index float8") and not device.float8:
            continue
        made = compile_kernel(
            kernel, arguments, constants, compute_capability=capability, num_warps=warps,
            num_stages=stages[0] if stages else 3,
        )  # fmt: skip
        assert getattr(made.metadata, "tmem_size", 0) <= 512, name
        products = sorted(set(re.findall(r"(wgmma|tcgen05|mma\.sync)", made.asm["ptx"])))
        instructions = made.asm["ptx"].count(";")
        shared = made.metadata.shared
        row = {"kernel": name, "shared": shared, "instructions": instructions, "by": products}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
