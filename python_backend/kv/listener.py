"""What happens to published blocks, for whoever wants to know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class CacheListener(Protocol):
    """Called on the core's thread, in order; must not block. Keys are those of `block_hash`."""

    def stored(
        self, keys: Sequence[bytes], parent: bytes | None, blocks: npt.NDArray[np.int32]
    ) -> None:
        """Consecutive blocks [n, page tokens] behind the block `parent`, None for the first. The
        tokens never change."""

    def removed(self, keys: Sequence[bytes]) -> None: ...

    def cleared(self) -> None:
        """All blocks are gone."""
