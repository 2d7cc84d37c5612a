"""Index keys: MXFP4 whose signs lie where the look-up of their magnitudes leaves room.

A device looks up four magnitudes at a time by four neighbouring nibbles, and their signs then join
as the upper bits of four bytes. Of a word of eight codes, the first one lowest, magnitude i is
therefore in bits 4·i to 4·i + 2 as ever, the sign of code i < 4 in bit 8·i + 7, and that of code
4 + i in bit 8·i + 3. Values and scales are those of MXFP4.
"""

from __future__ import annotations

import torch

from plugins.formats.mxfp4 import MxFp4


class IndexKeys(MxFp4):
    """MXFP4 with the signs of each word's codes moved."""

    def _encode(self, quotients: torch.Tensor) -> torch.Tensor:
        words = torch.unflatten(super()._encode(quotients), -1, (-1, 4))
        signs = torch.stack((words >> 3 & 1, words >> 7), dim=-1).flatten(-2)
        first, last = signs.chunk(2, dim=-1)
        return (words & 0x77 | first << 7 | last << 3).flatten(-2)

    def _decode(self, data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        words = torch.unflatten(data, -1, (-1, 4))
        signs = torch.cat((words >> 7, words >> 3 & 1), dim=-1)
        even, odd = torch.unflatten(signs, -1, (4, 2)).unbind(-1)
        return super()._decode((words & 0x77 | even << 3 | odd << 7).flatten(-2), dtype)


INDEX_KEYS = IndexKeys()
