"""Memory of the host that a device reads by itself: large tables that do not fit the device's own.

Rows are read at random, so small pages cost an address translation each; huge ones are asked for,
and where the system gives none that is logged once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import mmap
import weakref
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def pinned_copy(values: torch.Tensor) -> torch.Tensor:
    """`values` in pinned memory of the host, on huge pages where there are any, until it is freed.
    Raises RuntimeError where the driver refuses."""
    memory = _mapped(values.nbytes)
    copy = _copied(values, memory)
    # Not pin_memory(), whose memory comes in the system's ordinary pages.
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(copy.data_ptr(), copy.nbytes, 0)
    if int(status):
        raise RuntimeError(
            f"expected {copy.nbytes} bytes of host memory to be pinned, got CUDA error "
            f"{int(status)}; free memory or raise the limit of locked memory"
        )
    # What is mapped there next would count as pinned, and the driver's next allocation fails.
    weakref.finalize(memory, runtime.cudaHostUnregister, copy.data_ptr()).atexit = False
    return copy


def on_huge_pages(values: torch.Tensor) -> torch.Tensor:
    """A copy of at least one value in memory of its own, of which huge pages were asked for."""
    return _copied(values, _mapped(values.nbytes))


def _mapped(num_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """The array, and what watches its end, goes before the mapping that it keeps."""
    memory = mmap.mmap(-1, num_bytes)
    if _huge_pages_are_given():
        memory.madvise(mmap.MADV_HUGEPAGE)
    return (ctypes.c_ubyte * num_bytes).from_buffer(memory)


def _copied(values: torch.Tensor, memory: ctypes.Array[ctypes.c_ubyte]) -> torch.Tensor:
    """Keeps `memory` as long as it lives."""
    copy = torch.frombuffer(memory, dtype=torch.uint8, count=values.nbytes)
    return copy.view(values.dtype).view(values.shape).copy_(values)


@functools.cache
def _huge_pages_are_given() -> bool:
    try:
        given = "[never]" not in _HUGE_PAGES.read_text()
    except OSError:  # a kernel without them
        given = False
    if not given:
        logger.warning(
            "expected huge pages for tables in host memory, found none (%s); they are read slower",
            _HUGE_PAGES,
        )
    return given
