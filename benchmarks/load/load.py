"""Many streams at once through the real server, for a while: does it hold, and how fast is it?

    python benchmarks/load/load.py --streams 256 --seconds 120 --out runs/load.json

Each stream sends one request after another, every other one with a beginning that all share, and
reads its tokens as they come. It passes when every request was
answered in full, nothing is held afterwards, and the server stops with status 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path
from random import Random

import grpc
from harness import ROOT, Outcome, Server, measured_on, percentiles, stream

from builder.cli import main as build

CHECKPOINT = ROOT / "examples" / "tinyflash" / "checkpoint"
VOCAB = range(10, 3000)
STREAMS_PER_CHANNEL = 32
HELD = ("dsv41_num_requests_running", "dsv41_num_requests_waiting", "dsv41_kv_pages_used")


async def run(server: Server, options: argparse.Namespace) -> tuple[list[Outcome], int]:
    """Outcomes, and the most requests that ran at once."""
    rng = Random(1)
    common = rng.choices(VOCAB, k=options.prompt)
    outcomes: list[Outcome] = []
    until = time.monotonic() + options.seconds
    most = 0

    async def work(number: int, channel: grpc.aio.Channel) -> None:
        count = 0
        while time.monotonic() < until:
            ids = rng.choices(VOCAB, k=rng.randint(options.prompt // 8, options.prompt))
            if count % 2:
                ids = common + ids
            values = {
                "input_ids": ids,
                "max_tokens": rng.randint(options.answer // 4, options.answer),
                "end_id": -1,
            }
            outcome = Outcome(f"load-{number}-{count}", str(values["max_tokens"]))
            count += 1
            outcomes.append(await stream(channel, outcome, {**values, "stream": True}))

    async def watch() -> None:
        nonlocal most
        while time.monotonic() < until:
            values = await asyncio.to_thread(server.values)
            most = max(most, int(values["dsv41_num_requests_running"]))
            await asyncio.sleep(1.0)

    channels = [
        grpc.aio.insecure_channel(
            f"127.0.0.1:{server.grpc}", options=[("grpc.use_local_subchannel_pool", 1)]
        )
        for _ in range(-(-options.streams // STREAMS_PER_CHANNEL))
    ]
    try:
        workers = (work(i, channels[i // STREAMS_PER_CHANNEL]) for i in range(options.streams))
        await asyncio.gather(watch(), *workers)
    finally:
        for channel in channels:
            await channel.close()
    return outcomes, most


def problems_of(outcomes: list[Outcome], after: dict[str, float]) -> list[str]:
    problems = [
        f"{o.request_id} ended with {o.end} after {o.num_tokens} of {o.kind} tokens: {o.message}"
        for o in outcomes
        if o.end != "answer" or o.num_tokens != int(o.kind)
    ]
    held = {n: v for n, v in after.items() if n.split()[0] in HELD and v}
    return [*problems[:20], *([f"still held: {held}"] if held else [])]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--prompt", type=int, default=128, help="most new tokens of a prompt")
    parser.add_argument("--answer", type=int, default=48, help="most tokens of an answer")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "load")
    parser.add_argument("--out", type=Path, help="the report as JSON")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    engine = options.folder / "engine"
    sizes = (f"--max_batch_size={options.streams}", "--max_num_tokens=1024", "--max_seq_len=1024")
    if build(["engine", f"--checkpoint_dir={CHECKPOINT}", f"--output_dir={engine}", *sizes]):
        return 1
    server = Server(engine, options.folder)
    try:
        server.wait_until_ready()
        before = server.values()
        started = time.monotonic()
        outcomes, most = asyncio.run(run(server, options))
        seconds = time.monotonic() - started
        time.sleep(0.5)
        after, memory = server.values(), server.memory()
        problems = problems_of(outcomes, after)
        status = server.stop()
        if status:
            problems.append(f"exit status {status} after SIGTERM")
    finally:
        if server.process.poll() is None:
            server.process.kill()
    made = after["dsv41_generation_tokens_total"] - before["dsv41_generation_tokens_total"]
    report = {
        "benchmark": "load",
        **measured_on(),
        "streams": options.streams,
        "prompt": options.prompt,
        "answer": options.answer,
        "most_running": most,
        "seconds": round(seconds, 1),
        "requests": len(outcomes),
        "ends": dict(Counter(outcome.end for outcome in outcomes)),
        "tokens_per_second": round(made / seconds, 1),
        "first_token_ms": percentiles([o.first for o in outcomes if o.first is not None]),
        "between_tokens_ms": percentiles([gap for o in outcomes for gap in o.gaps]),
        **memory,
        "problems": problems,
        "passed": not problems,
    }
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
