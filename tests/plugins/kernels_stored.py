"""Names kernels, compiles them into a directory, or takes them from there; prints what happened.

python kernels_stored.py name TARGET ...
python kernels_stored.py keep DIRECTORY
python kernels_stored.py serve DIRECTORY
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.nvidia import driver
from triton.runtime.build import platform_key
from triton.runtime.cache import get_cache_manager

from plugins.device.launchers import keep_launcher
from plugins.device.record import compile_variant, recording
from plugins.device.store import KernelStore, MissingKernelError, keep
from plugins.norm import rms_norm

TARGET = "sm_90"


def variants_of(rows: int, width: int, target: str = TARGET) -> list[Any]:
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="meta")
    with recording(target) as variants:
        for _ in range(2):
            rms_norm(x, torch.empty(width, dtype=torch.bfloat16, device="meta"), 1e-6)
    return sorted(variants)


def main(what: str, directory: Path) -> None:
    compiled: list[str] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(src.name)

    knobs.compilation.listener = listen
    known, other = variants_of(5, 64), variants_of(5, 96)
    if what == "keep":
        size = 0
        for one in known:
            kernel = compile_variant(one, TARGET)
            size += keep(directory, TARGET, kernel)
            keep_launcher(directory, kernel)
        print(json.dumps({"compiled": compiled, "size": size, "variants": len(known)}))
        return
    store = KernelStore(directory, TARGET, only=True)
    store.serve()
    kernels = [compile_variant(one, TARGET) for one in known]
    (kernel,) = kernels
    source = driver.make_launcher(kernel.src.constants, kernel.src.signature, None)
    key = hashlib.sha256((source + platform_key()).encode()).hexdigest()
    launcher = get_cache_manager(key).get_file(
        f"__triton_launcher{sysconfig.get_config_var('EXT_SUFFIX')}"
    )
    refused = ""
    try:
        compile_variant(other[0], TARGET)
    except MissingKernelError as error:
        refused = str(error)
    print(
        json.dumps(
            {
                "compiled": compiled,
                "names": [kernel.name for kernel in kernels],
                "launcher": launcher,
                "found": len(store.found),
                "missing": len(store.missing),
                "refused": refused,
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1] == "name":
        for target in sys.argv[2:]:
            (variant,) = variants_of(5, 64, target)
            print(json.dumps(variant))
    else:
        main(sys.argv[1], Path(sys.argv[2]))
