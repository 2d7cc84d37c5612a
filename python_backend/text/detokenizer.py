"""Incremental detokenisation: a delta never splits a character and never guesses one.

The bytes of the tokens go through an incremental UTF-8 decoder. At most three bytes of an
unfinished character are held back until their rest comes. Bytes that can never become a character
turn into U+FFFD, one per maximal invalid part (Unicode 15, section 3.9), exactly as when the whole
output is decoded at once; so concatenated deltas equal the whole text.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Detokenizer:
    """One request's output. `token_bytes[id]` are the bytes of each id; shared, read only."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, output_ids: npt.NDArray[np.int32], *, last: bool = False) -> str:
        """The text that is certain after these ids; `last` also turns what was held back."""
        table = self._token_bytes
        return self._decoder.decode(b"".join([table[id] for id in output_ids.tolist()]), last)
