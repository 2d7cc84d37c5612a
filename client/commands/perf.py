"""`dsv41-client perf`: latency and throughput, measured by perf_analyzer."""

from __future__ import annotations

import argparse
import json
import secrets
from pathlib import Path
from typing import Any

from client import perf
from client.commands.common import (
    OK,
    add_command,
    add_grpc_address,
    check_writable,
    connect_grpc,
    positive,
)
from client.plot import check_picture, plot
from client.progress import Progress


def add(commands: Any) -> None:
    parser = add_command(
        commands, "perf", run, "measure latency and throughput with perf_analyzer over gRPC"
    )
    add_grpc_address(parser)
    option = parser.add_argument
    option("--concurrency", default="1,2,4", help="4, 1,2,4, 1:8 or 1:8:2 users")
    option("--requests", type=positive, help="requests per level (8 per user)")
    option("--input-tokens", type=int, default=128, help="of each prompt")
    option("--output-tokens", type=int, default=32, help="of each answer")
    option("--shared-prefix", type=int, default=0, help="tokens common to all prompts")
    option("--prompt", choices=("ids", "text"), default="ids", help="kind of prompt")
    option("--vocab-size", type=int, default=256, help="prompt ids are below this")
    option("--seed", type=int, help="of the prompts; a new one each run if left out")
    option("--json", type=Path, metavar="FILE", help="also write the JSON object here")
    option("--plot", type=Path, metavar="FILE", help="throughput over interactivity")
    option("--perf-env", type=Path, default=perf.DEFAULT_ENVIRONMENT, help="perf_analyzer's place")


def run(arguments: argparse.Namespace) -> int:
    workload = perf.Workload(
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        shared_prefix=arguments.shared_prefix,
        prompt=arguments.prompt,
        vocab_size=arguments.vocab_size,
        seed=secrets.randbits(32) if arguments.seed is None else arguments.seed,
    )
    levels = perf.parse_concurrency(arguments.concurrency)
    check_writable(arguments.json, arguments.plot)
    if arguments.plot:
        check_picture(arguments.plot)
    show = Progress()
    measured = []
    with connect_grpc(arguments) as client:
        for level in perf.measure(
            client,
            workload,
            levels,
            requests=arguments.requests,
            environment=arguments.perf_env,
            progress=show,
        ):
            measured.append(level)
            show(
                f"concurrency {level.concurrency}: {level.output_tokens_per_second:.1f} tokens/s, "
                f"TTFT p50 {level.ttft_ms['p50']:.1f} ms",
                last=True,
            )
        report = json.dumps(perf.report(client, workload, measured))
    print(perf.table(measured))
    print(report)
    if arguments.json:
        arguments.json.write_text(report + "\n")
    if arguments.plot:
        title = f"{arguments.model}: {workload.input_tokens} in, {workload.output_tokens} out"
        plot(measured, arguments.plot, title)
    return OK
