"""Launches without a device: what kernels a program would launch on a target, and their code.

    with recording("sm_90") as variants:
        network.forward(batch, cache)          # over meta tensors
    compiled = [compile_variant(one, "sm_90") for one in variants]

Meta tensors have shapes and no values, so a step of any size takes no memory and its kernels are
named and not run. A variant is what the Triton language itself compiles once: a kernel with its
constants, the types of its arguments, which of them are 1 or multiples of 16, warps and stages.
Both need a process in which kernels are not interpreted.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple

from triton import knobs, runtime
from triton.backends.compiler import GPUTarget

from plugins.device.keys import make_keys_stable
from plugins.device.launch import limits


class Target(NamedTuple):
    """shared_memory: bytes that one block may take, of CUDA's table of compute capabilities.
    multiprocessors: of the product named; kernels of others are compiled for as many."""

    shared_memory: int
    multiprocessors: int


TARGETS = {
    "sm_80": Target(166_912, 108),  # A100
    "sm_90": Target(232_448, 132),  # H100 SXM, H200
    "sm_100": Target(232_448, 148),  # B200
    "sm_120": Target(101_376, 188),  # RTX PRO 6000
}


class Variant(NamedTuple):
    """`specialization` is the Triton language's own text of all that the code depends on."""

    module: str
    kernel: str
    specialization: str


class _Driver:
    """The driver of a device that is not there; its number is that of the target, because kernels
    keep what they compiled by device."""

    def __init__(self, target: str) -> None:
        self._capability = int(target.removeprefix("sm_"))
        shared_memory, multiprocessors = TARGETS[target]
        properties = {"max_shared_mem": shared_memory, "multiprocessor_count": multiprocessors}
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def _as_if_on(target: str) -> Iterator[None]:
    before: Any = runtime.driver._active
    runtime.driver.set_active(_Driver(target))
    limits.cache_clear()
    try:
        yield
    finally:
        runtime.driver.set_active(before)
        limits.cache_clear()


class _NotRun:
    """Stands for a kernel that was recorded, so that its next launch costs no more than one."""

    function = packed_metadata = None

    def launch_metadata(self, *_: object) -> None: ...

    def run(self, *_: object) -> None: ...


@contextmanager
def recording(target: str) -> Iterator[set[Variant]]:
    """The variants that the block launches on a device of `target`, a name in TARGETS. None of them
    is compiled or run: what a kernel would have written is left as it is."""
    variants: set[Variant] = set()
    caches: list[dict[str, Any]] = []

    def keep(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        specialization = json.loads(compile["specialization_data"])
        # Where this machine has its mathematical library is nothing that the code depends on.
        del specialization["options"]["extern_libs"]
        variants.add(Variant(fn.module, fn.name, json.dumps(specialization)))
        kernels = fn.jit_function.device_caches[compile["device"]][0]
        kernels[key] = _NotRun()
        caches.append(kernels)
        return True  # that is all

    hook = knobs.runtime.jit_cache_hook
    with _as_if_on(target):
        knobs.runtime.jit_cache_hook = keep
        try:
            yield variants
        finally:
            knobs.runtime.jit_cache_hook = hook
            for kernels in caches:
                kernels.clear()


def compile_variant(variant: Variant, target: str) -> Any:
    """The compiled kernel, through the Triton language's cache: `hash` is its key there,
    `metadata_group` its files. Errors are the compiler's own."""
    make_keys_stable()
    kernel = getattr(importlib.import_module(variant.module), variant.kernel)
    with _as_if_on(target):
        return kernel.preload(variant.specialization)
