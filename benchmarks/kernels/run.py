"""Times the kernels on a GPU, against their floors and, where they are at hand, their peers.

    python benchmarks/kernels/run.py --out kernels.jsonl [--peers DIR] [--ops topk_select]

One JSON object a case: op, case, us, floor_us, peer, peer_us, target_us, correct. --peers names
the folder of the peer libraries, with their wrappers peers.py in it or beside it. --dry compares
with the references and calls each peer once, which compiles them; it also runs on a CPU, in the
interpreter: use --cases to name small ones there.
"""

from __future__ import annotations

import argparse
import importlib
import re

import torch
from harness import DEVICE, Ceilings, emit, load_peers, run

OPS = (
    "mega_attention", "indexer", "topk_select", "cache_writes", "linear", "engram", "experts",
    "around_experts", "sample",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ops", nargs="+", choices=OPS, default=OPS)
    parser.add_argument("--cases", default="", help="regular expression of the cases to run")
    parser.add_argument("--peers", metavar="DIR", help="folder of the peer libraries")
    parser.add_argument("--out", metavar="FILE", help="also append the rows to FILE")
    parser.add_argument("--dry", action="store_true", help="call everything once, time nothing")
    args = parser.parse_args()
    if DEVICE == "cpu" and not args.dry:
        parser.error("expected a CUDA device to time kernels on, found none; --dry only compares")
    torch.manual_seed(0)
    peers, ceilings = load_peers(args.peers), Ceilings()
    if not args.dry:
        ceilings.calibrate()
        emit({"device": torch.cuda.get_device_name(), **vars(ceilings)}, args.out)
    for op in args.ops:
        for row in importlib.import_module(op).rows(peers):
            if re.search(args.cases, row.case):
                emit(run(row, ceilings, dry=args.dry), args.out)


if __name__ == "__main__":
    main()
