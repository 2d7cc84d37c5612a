"""A server that can compile nothing, on a GPU: an engine brings all that it launches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ROOT = Path(__file__).parents[2]
TINYFLASH = ROOT / "examples" / "tinyflash" / "checkpoint"


def run(environment: dict[str, str], *command: str) -> str:
    """What a Python process prints, which it must do well."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("model", ["tiny", "tinyflash"])
def test_an_engine_is_served_from_its_compiled_kernels_alone(
    model: str, tiny_dir: Path, tmp_path: Path
) -> None:
    """Built where no GPU is seen, served without a C compiler and with no place to write: decode
    and verify graphs of all sizes, prefill padded and not, prefix hits, choices."""
    engine, checkpoint = tmp_path / "engine", tiny_dir
    limits = ["--max_batch_size=5", "--max_num_tokens=400", "--max_seq_len=700"]
    limits.append(f"--token_class={tiny_dir / 'golden_quant.safetensors'}")
    if model == "tinyflash":
        if not (TINYFLASH / "config.json").is_file():
            pytest.skip(f"no checkpoint in {TINYFLASH}")
        checkpoint, limits = TINYFLASH, ["--max_batch_size=16", "--max_num_tokens=4096"]
    build = "import sys; from builder.cli import main; sys.exit(main(sys.argv[1:]))"
    target = "sm_{}{}".format(*torch.cuda.get_device_capability())
    started = time.monotonic()
    told = run(
        {"CUDA_VISIBLE_DEVICES": ""},
        *["-c", build, "engine", f"--checkpoint_dir={checkpoint}", f"--output_dir={engine}"],
        *[*limits, f"--kernels={target}"],
    )
    print(f"{told}built in {time.monotonic() - started:.0f} s")
    started = time.monotonic()
    nowhere = {"CC": "/bin/false", "TRITON_CACHE_DIR": "/proc/none"}
    serve = Path(__file__).with_name("served_from_store.py")
    found = json.loads(run(nowhere, str(serve), str(engine)))
    print(f"{found}, served in {time.monotonic() - started:.0f} s")
    assert found["compiled"] == []
    assert found["missing"] == 0
    assert found["found"] > 50
    assert found["tokens"] > 50
