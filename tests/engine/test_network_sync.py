"""A step between its upload and its result asks the host nothing: what operators do beside, each
operator's kernel answers for; here it is what the network and the cache do between them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from ragged import PoisonedPages, Timeline, make_batch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import engine.network as rooms
from engine.batch import DraftBatch
from engine.network import Network
from plugins.registry import OPERATORS

# What makes a host wait for a device, or a shape depend on data. Indexing with a mask is nonzero.
WAITS = ("_local_scalar_dense", "nonzero", "unique", "masked_select", "bincount", "is_nonzero")


class NothingWaits(TorchDispatchMode):
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.__name__.partition(".")[0]
        assert not name.startswith(WAITS), f"{name} waits for the device"
        masks = [x for x in args[1] if x is not None] if name.startswith("index") else []
        assert not any(getattr(x, "dtype", None) == torch.bool for x in masks), "a boolean index"
        uploads = name == "lift_fresh" or (name == "_to_copy" and "device" in (kwargs or {}))
        assert not uploads, f"{name} brings a tensor from the host"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def unwatched_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """References may ask; kernels stand in their place on a device."""

    def unwatched(operator: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return operator(*args, **kwargs)

        return run

    references = {entry.reference for entry in OPERATORS.values()}
    replaced = 0
    for found in pkgutil.iter_modules(rooms.__path__, "engine.network."):
        module = importlib.import_module(found.name)
        for name, value in list(vars(module).items()):
            if callable(value) and getattr(value, "__wrapped__", None) in references:
                monkeypatch.setattr(module, name, unwatched(value))
                replaced += 1
    assert replaced > 20


def test_nothing_in_a_step_waits_for_the_device(
    network_of: Callable[[torch.dtype], Network], unwatched_operators: None
) -> None:
    network = network_of(torch.float32)
    tokens = np.random.default_rng(3).integers(3, 500, 40).tolist()
    requests = [Timeline(tokens[:30], decoder_floor=9), Timeline(tokens[5:20])]
    pages = PoisonedPages(
        network.config, torch.float32, quantize=True, num_slots=2, max_length=40, max_rows=24,
        global_page_tokens=6, window_page_rows=5, seed=2,
    )  # fmt: skip
    for rows in ([22, 8], [1, 1], [4, 1]):
        for slot, request in enumerate(requests):
            pages.extend(slot, request.position, request.position + rows[slot])
        batch, cache = make_batch(network.config, requests, rows), pages.view([0, 1])
        anchors = DraftBatch(*(torch.tensor(x) for x in ([7, 8], [30, 15], [0, 1], [9, 0])))
        with torch.no_grad(), NothingWaits():
            output = network.forward(batch, cache)
            request = batch.request[batch.decoder_rows]
            positions = batch.positions[batch.decoder_rows]
            network.store_draft_context(output.draft_features, request, positions, cache)
            network.draft(anchors, cache)
        for request, count in zip(requests, rows, strict=True):
            request.position += count


@pytest.mark.parametrize("asks", ["item", "mask", "nonzero", "branch", "upload"])
def test_the_test_sees_what_waits(asks: str) -> None:
    x = torch.arange(4)
    calls: dict[str, Callable[[], object]] = {
        "item": lambda: x[0].item(),
        "mask": lambda: x[x > 1],
        "nonzero": lambda: x.nonzero(),
        "branch": lambda: 1 if x.sum() > 0 else 0,
        "upload": lambda: torch.tensor([1, 2]),
    }
    with pytest.raises(AssertionError), NothingWaits():
        calls[asks]()
