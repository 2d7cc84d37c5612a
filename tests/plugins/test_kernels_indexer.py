"""The index-score kernels against an oracle in float64, on packed pages and plain values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kernel_oracle import DEVICE, load_kernel, moved, paged

from plugins.formats.records import index_record
from plugins.formats.rows import PackedRows, ValueRows
from plugins.indexer import PagedSlots
from plugins.indexer.cases import CASES, IndexCase
from plugins.registry import OPERATORS

kernel = load_kernel("indexer")

TOLERANCE = 2e-5
MODELS = (
    IndexCase("TINY", (1, 1, 3), 16, 32, 40, holes=0.1),
    IndexCase("TinyFlash", (1, 6, 2), 8, 64, 150, holes=0.1),
    IndexCase("released decode", (1, 1), 32, 128, 700, holes=0.01),
    IndexCase("released verify", (6, 6), 32, 128, 140, holes=0.1),
)


def oracle(operands: dict) -> np.ndarray:
    """Row by row, in float64."""
    queries, weights = (operands[name].double().numpy() for name in ("queries", "head_weights"))
    values = operands["keys"].values.double().numpy()
    visible, num_keys = operands["num_visible"].tolist(), operands["key_slots"].shape[1]
    scores = np.full((len(queries), num_keys), -np.inf)
    for t in range(len(queries)):
        slots = operands["key_slots"][operands["request"][t]].numpy()
        (seen,) = np.nonzero((slots >= 0) & (np.arange(num_keys) < visible[t]))
        dots = np.maximum(queries[t] @ values[slots[seen]].T, 0)
        scores[t, seen] = weights[t] @ dots
    return scores


def compare(ours: torch.Tensor, expected: np.ndarray, case: IndexCase) -> None:
    got = ours.double().cpu().numpy()
    assert np.array_equal(np.isneginf(got), np.isneginf(expected)), "−inf at other columns"
    atol = TOLERANCE * case.heads * math.sqrt(case.width)
    np.testing.assert_allclose(got, expected, rtol=TOLERANCE, atol=atol)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matches_the_oracle(case: IndexCase, dtype: torch.dtype) -> None:
    operands = case.operands(dtype)
    ours = kernel.index_scores(**moved(operands))
    assert ours.dtype == torch.float32
    compare(ours, oracle(operands), case)


def packed_operands(case: IndexCase, rows_per_page: int) -> tuple[dict, dict]:
    """bfloat16 queries, rounded as stored keys are, and keys in packed pages; the second one holds
    the same keys as values, for the oracle."""
    expected = case.operands(torch.bfloat16, seed=3)
    layout = index_record(case.width)
    expected["queries"] = layout.round(expected["queries"])
    store, values = paged(expected["keys"], layout, rows_per_page)
    return {**moved(expected), "keys": store}, {**expected, "keys": values}


@pytest.fixture(params=[True, False], ids=["E4M3 products", "bfloat16 products"])
def float8(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Released sizes take E4M3 products where the device has them."""
    if request.param and not kernel.limits(torch.device(DEVICE)).float8:
        pytest.skip("this device has no E4M3 products")
    found = kernel.limits(torch.device(DEVICE))._replace(float8=request.param)
    monkeypatch.setattr(kernel, "limits", lambda device: found)
    return bool(request.param)


@pytest.mark.usefixtures("float8")
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_packed_pages_of_real_sizes(case: IndexCase) -> None:
    operands, expected = packed_operands(case, 7)
    compare(kernel.index_scores(**operands), oracle(expected), case)


@pytest.mark.usefixtures("float8")
@pytest.mark.parametrize("block_size", [3, 4, 8])
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_candidate_blocks_alone(case: IndexCase, block_size: int) -> None:
    operands, expected = packed_operands(case, 16)
    num_blocks = -(-case.keys // block_size)
    draw = torch.Generator().manual_seed(5)
    count = max(1, num_blocks // 3)
    rows = sum(case.rows)
    blocks = torch.stack(
        [torch.randperm(num_blocks, generator=draw)[:count].sort().values for _ in range(rows)]
    )
    blocks[0, count // 2 :] = -1
    ours = kernel.candidate_scores(**operands, blocks=blocks.to(DEVICE), block_size=block_size)
    everything = np.full((rows, num_blocks * block_size + 1), -np.inf)
    everything[:, : case.keys] = oracle(expected)
    entries = (blocks.unsqueeze(-1) * block_size + torch.arange(block_size)).flatten(1)
    entries[(blocks < 0).repeat_interleave(block_size, 1)] = -1  # the last column: always −inf
    compare(ours, np.take_along_axis(everything, entries.numpy(), 1), case)


@pytest.mark.usefixtures("float8")
def test_candidates_do_not_depend_on_the_tiles_of_a_program(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six tiles of a row, the last one not whole: one a program, in runs, and all of them."""
    from plugins.indexer import kernel_float8

    operands, _ = packed_operands(IndexCase("runs", (1, 1), 8, 128, 500), 16)
    operands["num_visible"].copy_(torch.tensor([500, 270]))
    draw = torch.Generator().manual_seed(5)
    blocks = torch.stack([torch.randperm(62, generator=draw)[:45] for _ in range(2)]).to(DEVICE)
    blocks[1, 20] = -1

    def scored(run: int) -> torch.Tensor:
        monkeypatch.setattr(kernel_float8, "_run_of_candidates", lambda *_: run)
        return kernel.candidate_scores(**operands, blocks=blocks, block_size=8)

    alone = scored(1)
    assert alone.isfinite().sum() > 400
    for run in (2, 4, 8):
        assert torch.equal(scored(run), alone)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_best_of_the_candidates(case: IndexCase) -> None:
    """By sorting the oracle's scores of the candidates in Python; float32 keeps distinct scores
    apart. A row may have fewer candidates than it selects."""
    operands = case.operands(torch.float32)
    block_size = 8 if case.width == 128 else 3
    rows, num_blocks = sum(case.rows), -(-case.keys // block_size)
    draw = torch.Generator().manual_seed(6)
    mask = torch.rand(rows, num_blocks, generator=draw) < 0.5
    blocks = torch.where(mask, torch.arange(num_blocks), num_blocks).sort(1).values
    blocks = blocks.where(blocks < num_blocks, -1)
    ours = kernel.candidate_topk(
        **moved({**operands, "blocks": blocks}), k=20, block_size=block_size
    )
    width = min(20, case.keys)
    assert ours.shape == (rows, width)
    for t, row in enumerate(oracle(operands).tolist()):
        inside = [j for j, s in enumerate(row) if mask[t, j // block_size] and s > -np.inf]
        best = sorted(sorted(inside, key=lambda j: (-row[j], j))[:width])
        assert ours[t].tolist() == best + [-1] * (width - len(best))


def test_which_products_are_taken() -> None:
    """Groups must be aligned, rows 128 wide and queries bfloat16."""
    operands, _ = packed_operands(MODELS[2], 7)
    stored = kernel.device_rows(operands["keys"])
    assert (
        kernel._takes_float8(operands["queries"], stored)
        == kernel.limits(torch.device(DEVICE)).float8
    )
    assert not kernel._takes_float8(operands["queries"].float(), stored)
    narrow, _ = packed_operands(MODELS[1], 7)
    assert not kernel._takes_float8(narrow["queries"], kernel.device_rows(narrow["keys"]))


@pytest.mark.usefixtures("float8")
def test_released_keys_of_any_magnitude() -> None:
    """Groups of a key from 2^−40 to 2^40, heads of a query likewise, and a poisoned key. A tensor
    core keeps 13 bits below the largest term of an E4M3 product; the interpreter keeps all."""
    operands, expected = packed_operands(MODELS[2], 7)
    layout, exponents = index_record(128), torch.arange(-40, 40, 10)
    draw = torch.Generator().manual_seed(8)
    picked = exponents[torch.randint(8, (2, 32, 1), generator=draw)]
    queries = layout.round(torch.randn(2, 32, 128, generator=draw) * 2.0**picked)
    expected["queries"] = queries.bfloat16()
    picked = exponents[torch.randint(8, (len(expected["keys"].values), 4), generator=draw)]
    values = torch.randn(len(picked), 4, 32, generator=draw) * (2.0**picked).unsqueeze(-1)
    store, expected["keys"] = paged(ValueRows(values.flatten(1)), layout, 7)
    operands |= {"keys": store, "queries": expected["queries"].to(DEVICE)}
    expected["num_visible"] = torch.tensor([700, 300])
    operands["num_visible"] = expected["num_visible"].to(DEVICE)
    ours, exact = kernel.index_scores(**operands).double().cpu().numpy(), oracle(expected)
    seen = np.isfinite(exact)
    assert np.array_equal(np.isfinite(ours), seen)
    size = np.abs(exact[seen]).max()
    if DEVICE == "cuda" and kernel.limits(torch.device(DEVICE)).float8:
        absolute = {**expected, "keys": ValueRows(expected["keys"].values.abs())}
        for name in ("queries", "head_weights"):
            absolute[name] = expected[name].abs()
        assert (np.abs(ours[seen] - exact[seen]) <= 2.0**-12 * oracle(absolute)[seen]).all()
    else:
        np.testing.assert_allclose(ours[seen], exact[seen], rtol=1e-3, atol=1e-6 * size)
    slot = int(expected["key_slots"][expected["request"][1], 9])
    store.write(torch.tensor([slot], device=DEVICE), torch.full((1, 128), torch.nan, device=DEVICE))
    assert kernel.index_scores(**operands)[1].isnan().nonzero().flatten().tolist() == [9]


def test_a_row_depends_on_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, in another order, beside more keys, and however many rows share a program."""
    case = IndexCase("batch", (6, 1, 2), 8, 64, 150, holes=0.1)
    operands = moved(case.operands(torch.float32))
    whole = kernel.index_scores(**operands)
    for rows in ([3], [8, 2, 6, 0], [1, 2]):
        names = ("queries", "head_weights", "request", "num_visible")
        some = {name: operands[name][torch.tensor(rows)] for name in names}
        wider = torch.nn.functional.pad(operands["key_slots"], (0, 600), value=-1)
        ours = kernel.index_scores(**{**operands, **some, "key_slots": wider})
        assert torch.equal(ours[:, :150], whole[rows])
        assert torch.isneginf(ours[:, 150:]).all()
    monkeypatch.setattr(kernel, "_MAX_ROWS", 1)
    assert torch.equal(kernel.index_scores(**operands), whole)


def test_packed_rows_are_the_same_whatever_shares_their_keys() -> None:
    """Thirty-one rows of one request keep keys, fewer keep queries, in one, two or three batches;
    among rows of another request, too. Bits and values."""
    case = IndexCase("many", (31, 2), 32, 128, 140, holes=0.1)
    operands, expected = packed_operands(case, 16)
    whole = kernel.index_scores(**operands)
    compare(whole, oracle(expected), case)
    for rows in ([3], [30, 31], [9, 10, 11, 12, 31], [0, 32, *range(1, 9)]):
        names = ("queries", "head_weights", "request", "num_visible")
        some = {name: operands[name][torch.tensor(rows)] for name in names}
        assert torch.equal(kernel.index_scores(**{**operands, **some}), whole[rows])


def test_strided_queries_weights_and_slots() -> None:
    case = IndexCase("strides", (2, 2), 3, 16, 30, holes=0.2)
    operands = moved(case.operands(torch.float32))
    whole = kernel.index_scores(**operands)
    strided = {}
    for name in ("queries", "head_weights", "key_slots"):
        x = operands[name]
        wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), 1 << 20)
        strided[name] = wide[..., ::2].copy_(x)
    assert torch.equal(kernel.index_scores(**{**operands, **strided}), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pages_of_slots_are_the_slots(dtype: torch.dtype) -> None:
    """Bits of both kernels and of the reference; pages of 8 rows, one of them missing, the last one
    not whole."""
    operands, _ = packed_operands(IndexCase("pages", (2, 1), 8, 128, 30), 8)
    operands["queries"] = operands["queries"].to(dtype)
    operands["num_visible"].fill_(30)
    values = ValueRows(torch.randn(64, 128, generator=torch.Generator().manual_seed(5)))
    operands["keys"] = paged(values, index_record(128), 8)[0]
    first = 8 * torch.tensor([[3, 1, -1, 0], [2, 5, 4, 6]], device=DEVICE)
    first[0, 2] = -1
    entry = torch.arange(30, device=DEVICE)
    pages = first[:, entry // 8]
    plain = torch.where(pages >= 0, pages + entry % 8, -1)
    by_page = {**operands, "key_slots": PagedSlots(first, 8, 30)}
    written = {**operands, "key_slots": plain}
    whole = kernel.index_scores(**written)
    assert torch.isneginf(whole[:2, 16:24]).all()
    assert torch.equal(kernel.index_scores(**by_page), whole)
    reference = OPERATORS["index_scores"].reference
    assert torch.equal(reference(**by_page), reference(**written))
    blocks = torch.tensor([[0, 3, -1], [1, 2, 5], [0, 5, 7]], device=DEVICE)
    scored = [
        kernel.candidate_scores(**given, blocks=blocks, block_size=4)
        for given in (by_page, written)
    ]
    assert torch.equal(*scored)


@pytest.mark.parametrize("page", [(128, 128), (256, 256), (256, 128)], ids=str)
@pytest.mark.parametrize("pairs", [True, False], ids=["pairs of tiles", "tiles"])
@pytest.mark.parametrize("rows", [(1, 1), (6, 5), (40, 1)], ids=str)
def test_tiles_that_lie_in_one_page(
    rows: tuple[int, ...], pairs: bool, page: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of entries looked up one by one. Pages as a pair source and one of single tokens
    have, and pages of slots that are half a page of rows; one of them is missing, the last one not
    whole; what a row does not see of a page is NaN."""
    from plugins.indexer import kernel_float8

    if pairs and max(rows) > 1:
        pytest.skip("only a lone row runs over pairs of tiles")
    # On a device of one multiprocessor each program has more than one pair.
    keys, device = 1068 if pairs else 300, kernel.limits(torch.device(DEVICE))
    if pairs:
        device = device._replace(multiprocessors=1)
    monkeypatch.setattr(kernel_float8, "limits", lambda _: device)
    operands, _ = packed_operands(IndexCase("whole pages", rows, 8, 128, keys), 128)
    values = torch.randn(6 * 128, 128, generator=torch.Generator().manual_seed(5))
    stored, per_page = page
    last = len(values) // per_page - 1
    values[last * per_page + 44 :] = torch.nan
    operands["keys"] = paged(ValueRows(values), index_record(128), stored)[0]
    operands["num_visible"].copy_(keys - 37 * torch.arange(sum(rows)) % keys)
    # No neighbours in order: what lies behind a page is not what comes next.
    column = torch.arange(-(-keys // per_page))
    first = per_page * torch.stack([(last - 1 - column) % last, (column * column) % last])
    first[:, -1] = per_page * last
    first[0, -2] = -1
    first = first.to(DEVICE)
    entry = torch.arange(keys, device=DEVICE)
    pages = first[:, entry // per_page]
    plain = torch.where(pages >= 0, pages + entry % per_page, -1)
    with monkeypatch.context() as patched:
        taken = recorded(patched, kernel_float8, "score_few_rows")
        whole = kernel.index_scores(**{**operands, "key_slots": PagedSlots(first, per_page, keys)})
    assert [arguments[-1] for arguments in taken] == ([pairs] if max(rows) < 40 else [])
    assert not whole.isnan().any()
    assert torch.isneginf(whole[0, keys - 44 - per_page : keys - 44]).all()
    assert torch.equal(whole, kernel.index_scores(**{**operands, "key_slots": plain}))


def recorded(patch: pytest.MonkeyPatch, module: object, name: str) -> list[tuple]:
    """The arguments of every launch of a module's kernel from now on."""
    launched: list[tuple] = []
    real = getattr(module, name)

    class Launcher:
        def __getitem__(self, grid):
            def run(*arguments, **options) -> None:
                launched.append(arguments)
                real[grid](*arguments, **options)

            return run

    patch.setattr(module, name, Launcher())
    return launched


def test_keys_that_are_not_aligned_are_scored_all_the_same() -> None:
    """Groups of 16 bytes are loaded at once, where every page begins at a multiple of 16."""
    operands, expected = packed_operands(IndexCase("aligned", (1, 2), 8, 128, 90), 8)
    aligned = operands["keys"].data
    pages, rows, row = aligned.shape
    wide = torch.full((pages, rows * row + 4), 0xFF, dtype=torch.uint8, device=DEVICE)
    data = wide[:, : rows * row].unflatten(1, (rows, row))
    data.copy_(aligned)
    odd = {**operands, "keys": PackedRows(data, operands["keys"].layout)}
    for given in (operands, odd):
        np.testing.assert_allclose(
            kernel.index_scores(**given).double().cpu().numpy(), oracle(expected), 1e-4, 1e-3
        )


def test_a_poisoned_key_stays_poisoned() -> None:
    operands = moved(IndexCase("NaN", (1,), 4, 32, 20).operands(torch.float32))
    operands["num_visible"][:] = 20
    operands["keys"].values[operands["key_slots"][0, 7]] = torch.nan
    scores = kernel.index_scores(**operands)
    assert scores[0].isnan().nonzero().flatten().tolist() == [7]


def test_float64_runs_the_reference_and_has_no_candidate_form() -> None:
    operands = moved(CASES[1].operands(torch.float64))
    assert kernel.index_scores(**operands).dtype == torch.float64
    blocks = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="candidate_topk"):
        kernel.candidate_scores(**operands, blocks=blocks, block_size=4)
