"""Shared by the CPU benchmarks: paired timing, a table, and one JSON object last."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, where not installed


def milliseconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def median_ms(run: Callable[[], object], samples: int) -> float:
    run()
    return statistics.median(milliseconds(run) for _ in range(samples))


def spread(times: list[float]) -> str:
    """Median with the middle half of the samples, which a busy machine moves first."""
    low, middle, high = statistics.quantiles(times, n=4)
    return f"{middle:8.3f}  ({low:.3f} … {high:.3f})"


def print_table(rows: list[tuple[str, str]]) -> None:
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def print_json(result: dict[str, Any]) -> None:
    print(json.dumps(result))


def import_without_package_code(package: str, module: str) -> types.ModuleType:
    """Import `package.module` of an installed package without running the package's own start-up
    code, which may want a GPU. Raises ImportError when it is not installed."""
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError(f"no package named {package}")
        shell = types.ModuleType(package)
        shell.__path__ = list(spec.submodule_search_locations)
        sys.modules[package] = shell
    return importlib.import_module(f"{package}.{module}")
