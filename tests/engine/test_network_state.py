"""State between steps: a request's result depends on its tokens and floors, on nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ragged import PoisonedPages, Timeline, run_alone, step

from engine.network import Network

Golden = Callable[[bool], dict[str, torch.Tensor]]
LENGTH = 61
TOLERANCE = 1e-9
FEW = settings(
    deadline=None,
    max_examples=6,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def chunkings(length: int) -> st.SearchStrategy[list[int]]:
    """Row counts that add up to `length`, at most 8 of them."""
    cuts = st.lists(st.integers(1, length - 1), max_size=7, unique=True)
    return cuts.map(
        lambda c: [b - a for a, b in zip([0, *sorted(c)], [*sorted(c), length], strict=True)]
    )


@FEW
@given(chunks=chunkings(LENGTH), quantize=st.booleans())
@example(chunks=[1] * LENGTH, quantize=True)
@example(chunks=[33, 1, 1, 26], quantize=False)
def test_any_chunking_gives_the_golden_logits_and_entries(
    network64: Network, golden_of: Golden, quantize: bool, chunks: list[int]
) -> None:
    golden = golden_of(quantize)
    request = Timeline(golden["tokens"].tolist())
    cache = run_alone(network64, request, quantize=quantize, chunks=chunks)
    assert (request.rows(0, LENGTH) - golden["logits_full"]).abs().max() < TOLERANCE
    for source in network64.config.kv_source_layer_ids:
        expected = golden[f"main_kv.{source}"]
        assert len(expected) == LENGTH // network64.config.ratio(source)
        entries = torch.arange(len(expected))
        got = cache.main(source).read(entries, torch.float64)
        assert (got - expected).abs().max() < TOLERANCE
        keys = cache.index(source).read(entries, torch.float64)
        assert (keys - golden[f"index_k.{source}"]).abs().max() < TOLERANCE


def test_an_open_pair_writes_no_entry(network64: Network, golden_of: Golden) -> None:
    tokens = golden_of(True)["tokens"].tolist()
    cache = run_alone(network64, Timeline(tokens[:21]), quantize=True)
    rows = cache.main(2).read(torch.tensor([9, 10]), torch.float64)
    assert rows[0].abs().max() > 0
    assert rows[1].abs().max() == 0


def run_ragged(
    network: Network,
    prompts: list[list[int]],
    *,
    global_page_tokens: int,
    window_page_rows: int,
    quantize: bool,
    seed: int,
) -> list[Timeline]:
    """All prompts through one pool: random arrivals and chunk sizes; pages start as NaN and are
    NaN again below the window."""
    draw = random.Random(seed)
    requests = [Timeline(prompt) for prompt in prompts]
    pages = PoisonedPages(
        network.config,
        network.dtype,
        quantize=quantize,
        num_slots=len(requests),
        max_length=max(len(prompt) for prompt in prompts),
        max_rows=16,
        global_page_tokens=global_page_tokens,
        window_page_rows=window_page_rows,
        seed=seed,
    )
    slots = draw.sample(range(len(requests)), len(requests))
    while unfinished := [i for i, r in enumerate(requests) if r.position < len(r.tokens)]:
        members = draw.sample(unfinished, draw.randint(1, len(unfinished)))
        rows = [
            min(draw.randint(1, 16), len(requests[i].tokens) - requests[i].position)
            for i in members
        ]
        for i, count in zip(members, rows, strict=True):
            pages.extend(slots[i], requests[i].position, requests[i].position + count)
        step(network, [requests[i] for i in members], rows, pages.view([slots[i] for i in members]))
    return requests


def random_prompts(network: Network, lengths: list[int], seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(network.config.vocab_size) for _ in range(n)] for n in lengths]


@FEW
@given(
    seed=st.integers(0, 2**16),
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    global_page_tokens=st.sampled_from([2, 4, 16, 64]),
    window_page_rows=st.sampled_from([1, 2, 3, 8]),
    quantize=st.booleans(),
)
@example(seed=1, lengths=[1, 2, 40], global_page_tokens=2, window_page_rows=1, quantize=True)
def test_ragged_batches_on_shuffled_poisoned_pages_equal_each_request_alone(
    network64: Network,
    seed: int,
    lengths: list[int],
    global_page_tokens: int,
    window_page_rows: int,
    quantize: bool,
) -> None:
    prompts = random_prompts(network64, lengths, seed)
    requests = run_ragged(
        network64,
        prompts,
        global_page_tokens=global_page_tokens,
        window_page_rows=window_page_rows,
        quantize=quantize,
        seed=seed,
    )
    for i, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
        alone = Timeline(prompt)
        run_alone(network64, alone, quantize=quantize)
        difference = request.rows(0, len(prompt)) - alone.rows(0, len(prompt))
        assert difference.abs().max() < TOLERANCE, f"request {i} of {lengths}, seed {seed}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", [0, 1])
def test_served_dtypes_are_bitwise_independent_of_batch_chunks_and_storage(
    network_of: Callable[[torch.dtype], Network], dtype: torch.dtype, seed: int
) -> None:
    """On a CPU: fixed row tiles make a row's bits a function of its own request alone."""
    network = network_of(dtype)
    prompts = random_prompts(network, [37, 5, 52], seed)
    requests = run_ragged(
        network, prompts, global_page_tokens=4, window_page_rows=2, quantize=True, seed=seed
    )
    for prompt, request in zip(prompts, requests, strict=True):
        alone = Timeline(prompt)
        run_alone(network, alone, quantize=True)
        assert torch.equal(request.rows(0, len(prompt)), alone.rows(0, len(prompt)))


@pytest.mark.parametrize("confirmed", [30, 31])
@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
@pytest.mark.parametrize("paged", [True, False])
def test_rolled_back_rows_leave_no_trace(
    network64: Network, golden_of: Golden, confirmed: int, accepted: int, paged: bool
) -> None:
    """A verify step of an anchor and 3 drafts, wrong from draft `accepted` on; then go on."""
    golden = golden_of(True)
    tokens = golden["tokens"].tolist()
    drafts = tokens[confirmed + 1 : confirmed + 4]
    for wrong in range(accepted, 3):
        drafts[wrong] = (drafts[wrong] + 17) % network64.config.vocab_size
    request = Timeline(tokens[: confirmed + 1] + drafts)
    pages = PoisonedPages(
        network64.config,
        torch.float64,
        quantize=True,
        num_slots=1,
        max_length=LENGTH,
        max_rows=LENGTH,
        global_page_tokens=4,
        window_page_rows=2,
        seed=0,
    )
    cache = None if paged else run_alone(network64, Timeline(tokens), quantize=True)

    def advance(rows: int) -> None:
        if cache is not None:
            # Every row ahead of the request already holds something else: stale, never read.
            step(network64, [request], [rows], cache, store_context=False)
            return
        pages.extend(0, request.position, request.position + rows)
        step(network64, [request], [rows], pages.view([0]), store_context=False)

    advance(confirmed)
    advance(4)
    first_wrong = confirmed + 1 + accepted
    request.tokens = list(tokens)
    request.position = first_wrong
    for position in range(first_wrong, LENGTH):
        request.logits.pop(position, None)
    for rows in [1, 2, LENGTH - first_wrong - 3]:
        advance(rows)
    difference = request.rows(0, LENGTH) - golden["logits_full"]
    assert difference.abs().max() < TOLERANCE
