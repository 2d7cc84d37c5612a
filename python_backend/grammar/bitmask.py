"""Sets of tokens, one a row: token t of a row is bit t mod 32 of its word t // 32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

_WORD_BITS = 32
_ALL = 0xFFFFFFFF


def everything(num_rows: int, vocab_size: int) -> Words:
    """All tokens, [num_rows, ⌈vocab_size / 32⌉]."""
    return np.full((num_rows, -(-vocab_size // _WORD_BITS)), _ALL, dtype=np.uint32)


def holds(masks: Words, token: int) -> npt.NDArray[np.bool_]:
    """Which rows have the token."""
    word, bit = divmod(token, _WORD_BITS)
    held: npt.NDArray[np.bool_] = (masks[:, word] >> np.uint32(bit)) & np.uint32(1) == 1
    return held


def allow(masks: Words, at: Int64Array, tokens: Int64Array) -> None:
    """Give row at[i] the token tokens[i]."""
    np.bitwise_or.at(masks, (at, tokens // _WORD_BITS), _bits(tokens))


def forbid(masks: Words, at: Int64Array, tokens: Int64Array) -> None:
    """Take the token tokens[i] from row at[i]."""
    np.bitwise_and.at(masks, (at, tokens // _WORD_BITS), ~_bits(tokens))


def _bits(tokens: Int64Array) -> Words:
    return np.uint32(1) << (tokens % _WORD_BITS).astype(np.uint32)
