"""What only a GPU can show: kernels are captured in a CUDA graph and replay to the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from kernel_oracle import load_kernel, moved, paged

from plugins.compressor.cases import PREVIOUS_CASES, PoolCase
from plugins.engram import engram_layout
from plugins.engram.cases import HASH_CASES, InjectCase
from plugins.formats.records import engram_record, index_record, main_record, window_record
from plugins.formats.rows import PackedRows, ValueRows
from plugins.indexer.cases import IndexCase
from plugins.kv_write.cases import KvWriteCase
from plugins.linear import PackedFormat
from plugins.linear.cases import PackedCase
from plugins.mega_attention.cases import AttentionCase
from plugins.registry import OPERATORS
from plugins.topk_select.cases import SelectCase
from plugins.wo_a.cases import WoACase

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def attention(rows: int) -> Callable[[], torch.Tensor]:
    case = AttentionCase("graph", rows, 64, 512, 64, 128, 512, holes=0.1)
    operands = moved(case.operands(torch.bfloat16))
    for name, record in (("window", window_record), ("main", main_record)):
        values = ValueRows(operands[name].values.cpu())
        operands[name] = paged(values, record(512), 8)[0]
    return lambda: load_kernel("mega_attention").mega_attention(**operands)


def index(rows: tuple[int, ...], candidates: bool) -> Callable[[], torch.Tensor]:
    operands = IndexCase("graph", rows, 32, 128, 900).operands(torch.bfloat16)
    layout = index_record(128)
    store = paged(operands["keys"], layout, 16)[0]
    operands = moved(operands) | {"keys": store}
    operands["queries"] = layout.round(operands["queries"])
    kernel = load_kernel("indexer")
    if not candidates:
        return lambda: kernel.index_scores(**operands)
    blocks = torch.arange(0, 80, 2, device="cuda").expand(sum(rows), -1)
    return lambda: kernel.candidate_scores(**operands, blocks=blocks, block_size=8)


def select(name: str, columns: int) -> Callable[[], torch.Tensor]:
    operands = moved(SelectCase("graph", 4, columns, 512).operands(torch.float32))
    kernel, scores = load_kernel("topk_select"), operands["scores"]
    if name == "topk_select":
        return lambda: kernel.topk_select(scores, 512)
    sizes = {"block_size": 8, "num_blocks": 2048}
    return lambda: kernel.candidate_blocks(scores, operands["num_visible"], **sizes)


def write() -> Callable[[], torch.Tensor]:
    operands = KvWriteCase("graph", main_record, 512, (3, -1, 0)).operands(torch.bfloat16)
    store = operands["rows"]
    store.data = store.data.cuda()
    values, slots = operands["values"].cuda(), operands["slots"].cuda()

    def run() -> torch.Tensor:
        store.data.fill_(0xA5)
        load_kernel("kv_write").kv_write(values, store, slots)
        return store.data.clone()

    return run


def pool() -> Callable[[], torch.Tensor]:
    operands = moved(PoolCase("graph", 5, 512).operands(torch.float32))
    return lambda: load_kernel("compressor").pool_pairs(**operands)


def previous() -> Callable[[], torch.Tensor]:
    operands = moved(PREVIOUS_CASES[0].operands(torch.float32))
    return lambda: load_kernel("compressor").previous_rows(**operands)


def linear(rows: int, stored: PackedFormat) -> Callable[[], torch.Tensor]:
    operands = moved(PackedCase("graph", rows, 1280, 640, stored).operands(torch.bfloat16))
    return lambda: load_kernel("linear").linear(**operands)


def grouped(rows: int) -> Callable[[], torch.Tensor]:
    case = WoACase("graph", rows, 16, 512, 2, 1024, stored=PackedFormat.FP8_BLOCKS)
    operands = moved(case.operands(torch.bfloat16))
    return lambda: load_kernel("wo_a").wo_a(**operands)


def engram_table(pinned: bool) -> Callable[[], torch.Tensor]:
    layout = engram_record(256)
    data = layout.pack(torch.randn(500, 256, generator=torch.Generator().manual_seed(0)))
    table = PackedRows(data.pin_memory() if pinned else data.cuda(), layout)
    rows = torch.arange(240, device="cuda").view(10, 24)
    return lambda: load_kernel("engram").engram_lookup(table, rows, torch.bfloat16)


def engram_hash() -> Callable[[], torch.Tensor]:
    layout = engram_layout(
        [1], max_ngram_size=4, n_heads=8, vocab_size=16_000_000, compressed_vocab_size=99_092
    )[1]
    operands = moved(HASH_CASES[4].operands())
    return lambda: load_kernel("engram").engram_rows(**operands, layout=layout)


def engram_gate() -> Callable[[], torch.Tensor]:
    operands = moved(InjectCase("graph", 9, 4, 5120, dead=0.3).operands(torch.bfloat16))
    return lambda: load_kernel("engram").engram_gate(**operands)


CALLS = {
    "attention, few rows": lambda: attention(3),
    "attention, many rows": lambda: attention(70),
    "index, decode": lambda: index((1, 1, 1), False),
    "index, verify": lambda: index((6, 6), False),
    "index, candidates": lambda: index((1, 1), True),
    "top-k, one round": lambda: select("topk_select", 5000),
    "top-k, two rounds": lambda: select("topk_select", 40_000),
    "candidate blocks": lambda: select("candidate_blocks", 40_000),
    "cache write": write,
    "pooling": pool,
    "previous rows": previous,
    "linear, FP8 as stored": lambda: linear(5, PackedFormat.FP8_BLOCKS),
    "linear, FP8 decoded as it streams": lambda: linear(100, PackedFormat.MXFP8),
    "linear, FP8 decoded once": lambda: linear(600, PackedFormat.FP8_BLOCKS),
    "linear, NVFP4": lambda: linear(5, PackedFormat.NVFP4),
    "grouped output, few rows": lambda: grouped(3),
    "grouped output, many rows": lambda: grouped(70),
    "Engram row ids": engram_hash,
    "Engram rows": lambda: engram_table(False),
    "Engram rows in memory of the host": lambda: engram_table(True),
    "Engram gate": engram_gate,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_replays_to_the_bits_of_the_call(name: str) -> None:
    """A host synchronisation, or anything that depends on data, would fail the capture."""
    call = CALLS[name]()
    expected = call().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    for _ in range(3):
        result.zero_()
        graph.replay()
        assert torch.equal(result.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_cuda_tensors_run_the_kernels() -> None:
    for name in (
        "mega_attention", "index_scores", "topk_select", "candidate_blocks", "restrict_to_blocks",
        "kv_write", "pool_pairs", "previous_rows", "linear", "wo_a", "engram_rows",
        "engram_lookup", "engram_gate",
    ):  # fmt: skip
        implementation = OPERATORS[name].implementation(torch.device("cuda"))
        assert implementation.__module__.endswith(".kernel")
