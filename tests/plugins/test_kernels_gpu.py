"""What only a GPU can show: kernels are captured in a CUDA graph and replay to the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from kernel_oracle import load_kernel, moved, paged

from plugins.compressor.cases import PREVIOUS_CASES, PoolCase
from plugins.engram import engram_layout
from plugins.engram.cases import HASH_CASES, InjectCase
from plugins.formats.nvfp4 import quantize_weight
from plugins.formats.records import engram_record, index_record, main_record, window_record
from plugins.formats.released import quantize_fp4_rows, quantize_fp8_blocks
from plugins.formats.rows import PackedRows, ValueRows
from plugins.indexer.cases import IndexCase
from plugins.kv_write.cases import KvWriteCase
from plugins.linear import PackedFormat, PackedMatrix
from plugins.linear.cases import PackedCase
from plugins.mega_attention.cases import AttentionCase
from plugins.mega_gate.cases import GateCase
from plugins.mega_mhc.cases import ATTRIBUTES, MhcCase
from plugins.moe import PackedExpertWeights
from plugins.norm.cases import NormCase
from plugins.registry import OPERATORS
from plugins.rope.cases import RopeCase
from plugins.sample.cases import CASES
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
    if name == "topk_of_blocks":
        blocks = torch.arange(0, 3000, 2, device="cuda").expand(4, -1)
        return lambda: kernel.topk_of_blocks(scores, blocks, k=512, block_size=8)
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
    operands = moved(PREVIOUS_CASES[1].operands(torch.float32))
    return lambda: load_kernel("compressor").previous_rows(**operands)


def pooled_rows() -> Callable[[], torch.Tensor]:
    operands = moved(PREVIOUS_CASES[1].operands(torch.float32))
    norm = torch.ones(PREVIOUS_CASES[1].width // 2, dtype=torch.bfloat16, device="cuda")
    return lambda: load_kernel("compressor").pooled_rows(norm, **operands, eps=1e-6)


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


def expert_operands(rows: int, stored: PackedFormat) -> dict:
    """A sixteenth of the released sizes; FP4 runs as E4M3 products."""
    draw = torch.Generator().manual_seed(rows)

    def matrices(count: int, kept: PackedFormat, *shape: int) -> list[PackedMatrix]:
        return [packed_weight(kept, *shape, draw) for _ in range(count)]

    def stack(count: int, kept: PackedFormat) -> PackedExpertWeights:
        shapes = ((640, 1280), (640, 1280), (1280, 640))
        lists = [matrices(count, kept, *shape) for shape in shapes]
        return PackedExpertWeights(*lists, torch.bfloat16, quantized_input=True)

    return {
        "u": torch.randn(rows, 1280, generator=draw).bfloat16().cuda(),
        "ids": torch.rand(rows, 8, generator=draw).argsort(1)[:, :3].contiguous().cuda(),
        "weights": torch.rand(rows, 3, generator=draw).cuda(),
        "routed": stack(8, stored),
        "shared": stack(1, PackedFormat.FP8_BLOCKS),
        "swiglu_limit": 10.0,
    }


def experts(rows: int, stored: PackedFormat) -> Callable[[], torch.Tensor]:
    operands = expert_operands(rows, stored)
    return lambda: load_kernel("moe").moe(**operands)


def packed_weight(
    stored: PackedFormat, rows: int, columns: int, draw: torch.Generator
) -> PackedMatrix:
    values = torch.randn(rows, columns, generator=draw) * columns**-0.5
    quantize = {
        PackedFormat.FP4_ROWS: quantize_fp4_rows,
        PackedFormat.FP8_BLOCKS: quantize_fp8_blocks,
        PackedFormat.NVFP4: quantize_weight,
    }[stored]
    kept = [x.cuda() for x in quantize(values)]
    kept += [None] * (3 - len(kept))
    return PackedMatrix(stored, (rows, columns), *kept, torch.bfloat16)


def gate(rows: int) -> Callable[[], torch.Tensor]:
    operands = moved(GateCase("graph", rows, 5120, 384, 6, images=True).operands(torch.bfloat16))
    return lambda: load_kernel("mega_gate").mega_gate(**operands).weights


def streams(rows: int) -> Callable[[], torch.Tensor]:
    case = MhcCase("graph", rows, 4, 5120)
    operands = moved(case.operands(torch.bfloat16))
    x, y = operands.pop("streams"), case.output(torch.bfloat16).cuda()
    coefficients = torch.rand(3, rows, 4, device="cuda").unbind(0)
    comb, norm = torch.rand(rows, 4, 4, device="cuda"), torch.rand(5120, device="cuda")
    post, pre = coefficients[0], coefficients[1]
    kernel = load_kernel("mega_mhc")

    def run() -> torch.Tensor:
        expanded, mix, u = kernel.mega_mhc(
            x, y, post, comb, pre, **operands, norm=norm, **ATTRIBUTES
        )
        return torch.cat([expanded.flatten(), u.flatten(), *(part.flatten() for part in mix)])

    return run


def normalised() -> Callable[[], torch.Tensor]:
    operands = moved(NormCase("graph", (5, 5120)).operands(torch.bfloat16))
    return lambda: load_kernel("norm").rms_norm(**operands)


def rotated() -> Callable[[], torch.Tensor]:
    operands = moved(RopeCase("graph", 5, 128, 64, lead=(32,)).operands(torch.bfloat16))
    return lambda: load_kernel("rope").apply_rope(**operands)


def sampled() -> Callable[[], torch.Tensor]:
    operands = moved(CASES[11].operands(torch.float32))
    return lambda: load_kernel("sample").sample(**operands)


CALLS = {
    "experts, few rows": lambda: experts(2, PackedFormat.FP4_ROWS),
    "experts, many rows": lambda: experts(300, PackedFormat.FP4_ROWS),
    "experts, NVFP4": lambda: experts(40, PackedFormat.NVFP4),
    "gate, few rows": lambda: gate(3),
    "gate, many rows": lambda: gate(1100),
    "hyper-connections, few rows": lambda: streams(3),
    "hyper-connections, many rows": lambda: streams(700),
    "norm": normalised,
    "rotation": rotated,
    "attention, few rows": lambda: attention(3),
    "attention, many rows": lambda: attention(70),
    "index, decode": lambda: index((1, 1, 1), False),
    "index, verify": lambda: index((6, 6), False),
    "index, candidates": lambda: index((1, 1), True),
    "top-k, one round": lambda: select("topk_select", 5000),
    "top-k, two rounds": lambda: select("topk_select", 40_000),
    "candidate blocks": lambda: select("candidate_blocks", 40_000),
    "top-k of blocks": lambda: select("topk_of_blocks", 40_000),
    "cache write": write,
    "pooling": pool,
    "previous rows": previous,
    "pooled rows": pooled_rows,
    "linear, FP8 as stored": lambda: linear(5, PackedFormat.FP8_BLOCKS),
    "linear, FP8 decoded as it streams": lambda: linear(100, PackedFormat.MXFP8),
    "linear, FP8 decoded once": lambda: linear(600, PackedFormat.FP8_BLOCKS),
    "linear, NVFP4": lambda: linear(5, PackedFormat.NVFP4),
    "grouped output, few rows": lambda: grouped(3),
    "grouped output, many rows": lambda: grouped(70),
    "sampling": sampled,
    "Engram row ids": engram_hash,
    "Engram rows": lambda: engram_table(False),
    "Engram rows in memory of the host": lambda: engram_table(True),
    "Engram gate": engram_gate,
}


@pytest.mark.parametrize("name", CALLS)
def test_a_graph_replays_to_the_bits_of_the_call(name: str) -> None:
    """A host synchronisation, or anything that depends on data, would fail the capture. What a
    replay does not write is not the call's: neither holds NaN."""
    call = CALLS[name]()
    expected = call().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    for _ in range(3):
        result.fill_(math.nan if result.is_floating_point() else 85)
        graph.replay()
        assert torch.equal(result, expected)


def test_cuda_tensors_run_the_kernels() -> None:
    for name in (
        "mega_attention", "index_scores", "topk_select", "candidate_blocks", "topk_of_blocks",
        "candidate_topk",
        "kv_write", "pool_pairs", "previous_rows", "pooled_rows", "linear", "wo_a", "engram_rows",
        "engram_lookup", "engram_gate", "moe", "mega_gate", "hc_mix", "hc_expand", "hc_collapse",
        "norm", "rope", "sample",
    ):  # fmt: skip
        implementation = OPERATORS[name].implementation(torch.device("cuda"))
        assert implementation.__module__.endswith(".kernel")


def test_bits_of_experts_do_not_depend_on_the_rows_beside() -> None:
    """Row 0 alone, and among so many that tiles of rows and warps are others."""
    run = load_kernel("moe").moe
    for stored in (PackedFormat.FP4_ROWS, PackedFormat.NVFP4):
        operands = expert_operands(300, stored)
        whole = run(**operands)
        for count in (1, 30):
            some = {name: operands[name][:count].contiguous() for name in ("u", "ids", "weights")}
            assert torch.equal(run(**{**operands, **some}), whole[:count]), (stored, count)


@pytest.mark.parametrize("name", ["gate", "streams"])
def test_bits_do_not_depend_on_the_number_of_rows(name: str) -> None:
    """Parts of sums as programs of their own, and added up inside one. From 512 rows on the library
    adds up the gate's."""
    if name == "gate":
        operands = GateCase("rows", 511, 5120, 384, 6).operands(torch.bfloat16)
        operands = moved(operands)
        run = load_kernel("mega_gate").mega_gate
        whole = run(**operands)
        alone = run(**{**operands, "u": operands["u"][:3].contiguous()})
    else:
        operands = moved(MhcCase("rows", 700, 4, 5120).operands(torch.bfloat16))
        run = load_kernel("mega_mhc").hc_mix
        whole = run(**operands, **ATTRIBUTES)
        some = {**operands, "streams": operands["streams"][:3].contiguous()}
        alone = run(**some, **ATTRIBUTES)
    for one, other in zip(alone, whole, strict=True):
        assert torch.equal(one, other[:3])
