"""Prints the key of every kernel, and which constants have several values by one name: their order
in a key would be one of addresses.

python kernel_keys.py builds    as who compiles kernels, in the order of their names
python kernel_keys.py serves    as who takes them from an engine, backwards
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

from triton.language.core import constexpr
from triton.runtime import JITFunction

from plugins.device.record import compile_variant
from plugins.device.store import KernelStore
from tests.plugins.kernels_stored import TARGET, variants_of

ROOT = Path(__file__).parents[2]


def main(role: str) -> None:
    if role == "builds":
        compile_variant(variants_of(5, 64)[0], TARGET)
    else:
        KernelStore(Path("none"), TARGET, only=True).serve()
    kernels = {}
    for path in ROOT.glob("plugins/*/kernel*.py"):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name, kernel in vars(module).items():
            if isinstance(kernel, JITFunction):
                kernels[f"{module.__name__}.{name}"] = kernel
    names = sorted(kernels, reverse=role == "serves")
    keys = {name: kernels[name].cache_key for name in names}
    ambiguous = []
    for name, kernel in kernels.items():
        values: dict[str, set[str]] = {}
        for (constant, _), (value, _) in kernel.used_global_vals.items():
            if isinstance(value, constexpr):
                values.setdefault(constant, set()).add(str(value))
        ambiguous += [f"{name}: {c}" for c, found in values.items() if len(found) > 1]
    json.dump({"keys": keys, "ambiguous": sorted(ambiguous)}, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
