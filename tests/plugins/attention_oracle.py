"""Sparse attention of one head of one row in float64, with complex rotations."""

from __future__ import annotations

import numpy as np


def rotate(x: np.ndarray, position: int, inv_freq: np.ndarray) -> np.ndarray:
    """Adjacent pairs of the last dims as complex numbers."""
    start = len(x) - 2 * len(inv_freq)
    turned = (x[start::2] + 1j * x[start + 1 :: 2]) * np.exp(1j * position * inv_freq)
    return np.concatenate([x[:start], np.stack([turned.real, turned.imag], 1).reshape(-1)])


def oracle(operands: dict, t: int, h: int) -> np.ndarray:
    """One head of one row in float64; zeros where the denominator is empty or infinite."""
    inv_freq, position = operands["inv_freq"].numpy(), int(operands["positions"][t])
    q = rotate(operands["q"][t, h].double().numpy(), position, inv_freq)
    keys = []
    for name in ("window", "main"):
        if operands[name] is not None:
            slots = [s for s in operands[f"{name}_slots"][t].tolist() if s >= 0]
            keys += [operands[name].values[s].double().numpy() for s in slots]
    sink = float(operands["sink"][h])
    if not keys or sink == np.inf:
        return np.zeros(len(q))
    rows = np.stack(keys)
    scores = rows @ q * operands["scale"]
    peak = max(scores.max(), sink)
    weights = np.exp(scores - peak)
    return rotate(weights @ rows / (weights.sum() + np.exp(sink - peak)), -position, inv_freq)
