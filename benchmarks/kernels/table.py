"""docs/kernels/measured.md from measured rows.

    python benchmarks/kernels/table.py benchmarks/baselines/kernels-h200.jsonl \\
        > docs/kernels/measured.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = """# Measured on a GPU

Times by graph replay with inputs outside the L2 cache, on one {device} at commit {commit}:
{copy:.2f} TB/s copied, {product:.0f} TFLOP/s in a bfloat16 product, measured in the same run.
`floor ÷ us` is the share of what the device can do; `target ÷ us` from 1 on meets the target, which
is the best peer's time or better. Every row was compared with its reference on the same inputs.
Written by `benchmarks/kernels/table.py`.

| operator | case | µs | floor, µs | floor ÷ us | target, µs | target ÷ us | right |
| --- | --- | --- | --- | --- | --- | --- | --- |"""


def lines(records: Iterable[dict[str, Any]]) -> Iterable[str]:
    for record in records:
        if "device" in record:
            yield HEAD.format(
                device=record["device"],
                commit=record["commit"],
                copy=record["bytes_per_us"] / 1e6,
                product=record["bf16_per_us"] / 1e6,
            )
            continue
        us, floor, target = record["us"], record["floor_us"], record["target_us"]
        cells = [record["op"], record["case"], f"{us:,.1f}", f"{floor:,.2f}", f"{floor / us:.2f}"]
        cells += ["", ""] if target is None else [f"{target:,.1f}", f"{target / us:.2f}"]
        yield f"| {' | '.join(cells)} | {'yes' if record['correct'] else 'no'} |"


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text()
    print("\n".join(lines(json.loads(line) for line in text.splitlines())))
