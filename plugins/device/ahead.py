"""Ahead-of-time compilation: kernels for a compute capability that this machine need not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

# Arguments of these types are taken to be multiples of 16, as pool pointers and strides are.
_ALIGNED = "aligned i32"


def compile_kernel(
    kernel: Any,
    arguments: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    compute_capability: int,
    num_warps: int = 4,
    num_stages: int = 3,
) -> Any:
    """The compiled kernel, of the Triton language or of Gluon; `.asm["cubin"]` is what a device
    loads, `.metadata.shared` its bytes of shared memory.

    arguments: the type of every run-time argument in the Triton language's notation ("*bf16",
    "i32"), or "aligned i32"; constants: the value of every other one. compute_capability: 90 for
    9.0. Raises KeyError where an argument is in neither; compile errors are the compiler's own.
    """
    signature, attributes = {}, {}
    for place, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kind = arguments[name]
        signature[name] = "i32" if kind == _ALIGNED else kind
        if kind == _ALIGNED or kind.startswith("*"):
            attributes[(place,)] = [["tt.divisibility", 16]]
    made_from = GluonASTSource if kernel.is_gluon() else ASTSource
    source = made_from(kernel, signature, dict(constants), attributes)
    target = GPUTarget("cuda", compute_capability, 32)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return triton.compile(source, target=target, options=options)
