"""Tables in host memory: the copy is exact and its own, and missing huge pages are told once."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from engine import host_memory


@pytest.mark.parametrize("shape", [(3, 5), (1,), (1000, 1000)])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.bfloat16])
def test_the_copy_has_the_values_in_other_memory(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    values = (torch.arange(torch.Size(shape).numel()) % 251).view(shape).to(dtype)
    copy = host_memory.on_huge_pages(values)
    assert torch.equal(copy, values)
    assert copy.dtype == dtype
    copy.view(-1)[0] = 7
    assert values.view(-1)[0] == 0


@pytest.mark.parametrize(("enabled", "warnings"), [("always [never]", 1), ("[madvise] never", 0)])
def test_missing_huge_pages_are_told_once(
    enabled: str,
    warnings: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "enabled"
    path.write_text(enabled)
    monkeypatch.setattr(host_memory, "_HUGE_PAGES", path)
    host_memory._huge_pages_are_given.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            host_memory.on_huge_pages(torch.ones(4))
    assert len(caplog.records) == warnings
    host_memory._huge_pages_are_given.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_freed_memory_is_no_longer_pinned() -> None:
    """Else what the system maps there next is, and every later allocation of the driver fails."""
    for _ in range(3):
        copy = host_memory.pinned_copy(torch.arange(1 << 22))
        assert copy.is_pinned()
        assert torch.equal(copy.cuda().cpu(), copy)
        del copy
        again = host_memory.on_huge_pages(torch.zeros(1 << 22, dtype=torch.int64))
        assert not again.is_pinned()
        assert not torch.zeros(1 << 22, device="cuda").any()
