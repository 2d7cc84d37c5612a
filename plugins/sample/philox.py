"""Philox-4x32-10 in int64 tensors: random numbers as a function of (seed, index), with no state.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox_4x32_10(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four 32-bit words per element; every operand holds 32-bit words in int64 tensors."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # The product wraps modulo 2^64; its halves are right once masked.
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _MASK, (product1 >> 32) & _MASK
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _MASK, high0 ^ c3 ^ k1, product0 & _MASK
        k0, k1 = (k0 + _KEY_STEPS[0]) & _MASK, (k1 + _KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def uniform(seed: torch.Tensor, output_index: torch.Tensor) -> torch.Tensor:
    """One float64 in (0, 1) per element: 52 random bits plus a half, never 0 and never 1.

    `seed` int64 (its 64 bits are the key, so a negative seed is a seed too), `output_index` int64
    (the counter).
    """
    zero = torch.zeros_like(output_index)
    counter = (output_index & _MASK, (output_index >> 32) & _MASK, zero, zero)
    first, second, _, _ = philox_4x32_10(counter, (seed & _MASK, (seed >> 32) & _MASK))
    bits = (first << 20) | (second >> 12)
    return (bits.to(torch.float64) + 0.5) * 2.0**-52
