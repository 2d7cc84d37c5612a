"""What serving launches is what an engine's kernels are compiled from.

In a process of its own: where this one interprets kernels, it cannot name them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from python_backend.executor.launches import numbers, turns

pytest.importorskip("triton")

HERE = Path(__file__).parent


def test_everything_that_random_requests_launch_is_foreseen() -> None:
    """Chunked prompts longer than any padded size, prefix hits, decoding of one to five requests,
    drafts of which some stay; with bounded replay and without."""
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(HERE.parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, str(HERE / "launches_served.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["unforeseen"] == []
    # Every kernel of a step is among them, and nearly all of what is foreseen is served.
    assert found["served"] > 100
    assert found["foreseen"] < 2 * found["served"]


def test_numbers_are_of_every_kind_and_magnitude() -> None:
    found = numbers(1000)
    assert found[:16] == list(range(1, 17))
    assert found[-1] == 1000
    for size in (32, 64, 128, 256, 512):
        within = [n for n in found if size <= n < 2 * size]
        # The largest power of two, up to 16, that divides them.
        assert {min(n & -n, 16) for n in within} == {1, 2, 4, 8, 16}
    assert numbers(1) == [1]


def test_turns_come_round_to_every_number() -> None:
    met = list(turns([1, 2, 3], list(range(10))))
    assert {one for one, _ in met} == {1, 2, 3}
    assert {other for _, other in met} == set(range(10))
    assert len(set(met)) > 10  # not always in the same company
