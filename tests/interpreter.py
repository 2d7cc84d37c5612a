"""The interpreter of the Triton language, twice as fast.

For a launch it replaces the functions of the language, and at every call of a device function it
looks through all of them again. Here it does so once a launch. Every value that it makes has a type
and a shape of its own, built and checked anew. Here equal ones are built and checked once. Sums and
products of integers it computes once more, wider, to see whether they overflow, and looks at that
in debug mode only. Here it does not.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

from triton import language
from triton.runtime import interpreter


def make_faster() -> None:
    patch_once_a_launch()
    remember_types()
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def patch_once_a_launch() -> None:
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[frozenset[str]] = set()

    def patch_once(fn: Callable[..., Any]) -> interpreter._LangPatchScope:
        if _languages(fn) in patched:
            return interpreter._LangPatchScope()
        patched.add(_languages(fn))
        return patch(fn)

    def launch_alone(self: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        try:
            launch(self, *args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_alone


def remember_types() -> None:
    """Blocks of one shape share what depends on it alone; nothing changes it."""
    of_block, of_tensor = language.block_type.__init__, language.tensor.__init__
    of_numpy = interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, getattr(element_ty, "address_space", None), _sizes(shape)
        if key not in blocks:
            of_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = _sizes(type.shape) if type.is_block() else ()
        if key not in tensors:
            of_tensor(self, handle, type)
            tensors[key] = {name: vars(self)[name] for name in ("shape", "numel")}
        vars(self).update(tensors[key], handle=handle, type=type, dtype=type.scalar)

    def numpy_type(type: Any) -> Any:
        key = type.scalar.name
        if key not in numpy_types:
            numpy_types[key] = of_numpy(type)
        return numpy_types[key]

    language.block_type.__init__ = block
    language.tensor.__init__ = tensor
    interpreter._get_np_dtype = numpy_type


def _sizes(shape: Any) -> tuple[int, ...]:
    return tuple([int(getattr(size, "value", size)) for size in shape])


@functools.cache
def _languages(fn: Callable[..., Any]) -> frozenset[str]:
    """The modules that are replaced for a function: the language, its core, or both."""
    seen = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
    return frozenset(one.__name__ for one in seen if one in (language, language.core))
