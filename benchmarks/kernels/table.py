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

Times by graph replay on one {device} at commit {commit}: {copy:.2f} TB/s copied, {bf16:.0f} TFLOP/s in
a bfloat16 product and {float8:.0f} in one of E4M3, measured in the same run.

- `inputs`: "cold" where calls take turns among inputs of twice the L2 cache, so that they come from
  memory; "L2" where they are too small for that and stay in the cache.
- `µs` is the mean of two medians, one before the peers' times and one behind them; `spread` is their
  difference, relative to it.
- `floor ÷ us` is the share of what the device can do.
- `peer` is the fastest of the others that do the same work and ran, on inputs in its own formats,
  measured in the same process between two measurements of ours. `peer ÷ us` above 1 means that ours
  is faster. Some do less than ours: of `wo_a` the product alone, of attention no rotation, of
  Engram rows a copy of the bytes as they are.
- `target` is set by hand from peers' times in an earlier run on the same kind of card: their time for
  attention, selection and index scores of 8K and in prefill; 0.65 of it for other index scores, 0.5 to
  0.7 for those of candidates, 0.8 to 0.95 for experts, 0.7 to 0.8 for the gate, 0.35 to 0.55 for the
  hyper-connections, 1.2 for Engram rows; more than the product's alone for the whole of `wo_a`.
  `target ÷ us` from 1 on meets it.
- `right`: so many rows of the output, here in brackets, were compared with the reference on the same
  inputs and agree.

Written by `benchmarks/kernels/table.py`.

| operator | case | inputs | µs | spread | floor, µs | floor ÷ us | peer | peer, µs | peer ÷ us | target, µs | target ÷ us | right |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""  # noqa: E501


def cells(record: dict[str, Any]) -> Iterable[str]:
    us, floor = record["us"], record["floor_us"]
    yield from (record["op"], record["case"], record["state"])
    yield from (f"{us:,.1f}", f"{record['spread']:.1%}", f"{floor:,.2f}", f"{floor / us:.2f}")
    yield record["peer"] or ""
    for other in (record["peer_us"], record["target_us"]):
        yield from ("", "") if other is None else (f"{other:,.1f}", f"{other / us:.2f}")
    yield f"{'yes' if record['correct'] else 'no'} ({record['compared']})"


def lines(records: Iterable[dict[str, Any]]) -> Iterable[str]:
    for record in records:
        if "device" in record:
            yield HEAD.format(
                device=record["device"],
                commit=record["commit"],
                copy=record["bytes_per_us"] / 1e6,
                bf16=record["bf16_per_us"] / 1e6,
                float8=record["float8_per_us"] / 1e6,
            )
        else:
            yield f"| {' | '.join(cells(record))} |"


if __name__ == "__main__":
    text = Path(sys.argv[1]).read_text()
    print("\n".join(lines(json.loads(line) for line in text.splitlines())))
