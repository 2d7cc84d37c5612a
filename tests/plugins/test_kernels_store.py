"""Kernels that were compiled in one process and are taken, not compiled, by another.

In processes of their own: where this one interprets kernels, it cannot compile them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).parent


def run(cache: Path, script: str, *arguments: str) -> dict[str, Any]:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = [str(HERE.parents[1]), environment.get("PYTHONPATH", "")]
    environment |= {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "TRITON_CACHE_DIR": str(cache),
    }
    command = [sys.executable, str(HERE / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_stored_kernels_are_found_and_others_refused_by_name(tmp_path: Path) -> None:
    """The directory is moved and read-only in between, and the second cache never comes to be."""
    first = tmp_path / "first"
    first.mkdir()
    kept = run(tmp_path / "cache", "kernels_stored.py", "keep", str(first))
    assert kept["variants"] == 1, "two equal launches are one variant"
    assert kept["compiled"] == ["_rms_norm"]
    files = sorted(path.suffix for path in (first / "sm_90").iterdir())
    assert files == [".cubin", ".json"]
    assert kept["size"] == sum(path.stat().st_size for path in (first / "sm_90").iterdir())

    moved = first.rename(tmp_path / "moved")
    moved.chmod(0o500)
    served = run(tmp_path / "none", "kernels_stored.py", "serve", str(moved))
    assert served["compiled"] == []
    assert served["names"] == ["_rms_norm"]
    assert Path(served["launcher"]).parent == moved / "launchers"
    assert (served["found"], served["missing"]) == (1, 1)
    assert "plugins.norm.kernel._rms_norm[" in served["refused"]
    assert "--kernels sm_90" in served["refused"]
    assert not (tmp_path / "none").exists()


def test_a_key_does_not_depend_on_the_kernels_before_it(tmp_path: Path) -> None:
    """Whoever compiles meets kernels in another order than a server that looks for them."""
    built = run(tmp_path, "kernel_keys.py", "builds")
    served = run(tmp_path, "kernel_keys.py", "serves")
    assert len(built["keys"]) > 100
    assert built["keys"] == served["keys"]
    assert built["ambiguous"] == []
