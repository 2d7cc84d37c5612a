"""Decoding stored codes through tables: one look-up gives two or four values.

A cast of torch from float8 costs ten times as much as a product with the value. The tables are
indexed by 16-bit words of the codes (little endian, as stored), or by bytes where four values
would not fit one element, one table per device. The values are those of `rounding`, bit for bit.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch

from plugins.formats.rounding import decode_e4m3, decode_e8m0, raw_bytes, unpack_e2m1

Codes = Literal["e4m3", "e2m1"]
TABLE_DTYPES = (torch.bfloat16, torch.float32)
_ELEMENT = {4: torch.int32, 8: torch.int64}


def decode_codes(codes: torch.Tensor, kind: Codes, dtype: torch.dtype) -> torch.Tensor:
    """One-byte codes [N, C] → values in `dtype`, one of TABLE_DTYPES: [N, C], or [N, 2·C] for two
    E2M1 a byte. C is even, the rows contiguous."""
    index, table = _index(codes, kind, dtype), _table(kind, dtype, codes.device)
    return table.index_select(0, index).view(dtype).view(codes.shape[0], -1)


def decode_scale(codes: torch.Tensor, kind: Literal["e4m3", "e8m0"]) -> torch.Tensor:
    """float32 values of one-byte scales, any shape."""
    index = raw_bytes(codes).reshape(-1).to(torch.int32)
    return _scales(kind, codes.device).index_select(0, index).view(codes.shape)


def _index(codes: torch.Tensor, kind: Codes, dtype: torch.dtype) -> torch.Tensor:
    flat = raw_bytes(codes).view(-1)
    if kind == "e2m1" and dtype == torch.float32:
        return flat.to(torch.int32)
    return flat.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)


@functools.cache
def _table(kind: Codes, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    decode = decode_e4m3 if kind == "e4m3" else unpack_e2m1
    one = decode(byte.unsqueeze(-1), dtype)  # [256, values of a byte]
    if kind == "e2m1" and dtype == torch.float32:
        return one.view(torch.int64).view(-1).to(device)
    word = torch.arange(1 << 16)
    both = torch.cat([one[word & 0xFF], one[word >> 8]], dim=-1)
    return both.view(_ELEMENT[both.shape[-1] * both.itemsize]).view(-1).to(device)


@functools.cache
def _scales(kind: Literal["e4m3", "e8m0"], device: torch.device) -> torch.Tensor:
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    return (decode_e4m3 if kind == "e4m3" else decode_e8m0)(byte, torch.float32).to(device)
