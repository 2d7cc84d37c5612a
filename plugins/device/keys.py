"""Keys of compiled kernels that are the same in every process.

The Triton language hashes into a kernel's key the global constants of all functions that it calls.
It takes those of a function before it asks for that function's own key, which is what finds them.
So of two kernels that share a function the first one's key lacks its constants: keys depend on
what was launched before, and what one process stored another does not find. Here the function's
key is asked for first (triton-lang/triton#10494 mends it there).
"""

from __future__ import annotations

from typing import Any

from triton.runtime import jit


class _Dependencies(jit.DependenciesFinder):  # type: ignore[misc]
    def _update_hash(self, func: Any) -> None:
        _ = func.cache_key
        super()._update_hash(func)


def make_keys_stable() -> None:
    """From now on, in this process; before the first key."""
    jit.DependenciesFinder = _Dependencies
