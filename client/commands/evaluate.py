"""`dsv41-client eval`: TinyFlash's held-out questions, asked and scored."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from client.commands.common import (
    OK,
    add_command,
    add_grpc_address,
    check_writable,
    connect_grpc,
    positive,
)
from client.eval import Evaluation
from client.eval import run as evaluate
from client.progress import Progress


def add(commands: Any) -> None:
    parser = add_command(
        commands, "eval", run, "ask TinyFlash's held-out questions and score the answers"
    )
    add_grpc_address(parser)
    option = parser.add_argument
    option("--task", choices=("arithmetic", "retrieval"), required=True)
    option("--limit", type=positive, default=200, help="number of questions")
    option("--seed", type=int, default=0, help="each seed draws other questions")
    option("--concurrency", type=positive, default=8, help="questions at once")
    option("--thinking", action="store_true", help="reason before answering")
    option("--max-tokens", type=positive, help="most tokens of an answer")
    option("--document-tokens", type=int, nargs=2, metavar=("LEAST", "MOST"), help="of retrieval")
    option("--json", type=Path, metavar="FILE", help="write the report here")


def run(arguments: argparse.Namespace) -> int:
    check_writable(arguments.json)
    lengths = None if arguments.document_tokens is None else tuple(arguments.document_tokens)
    show = Progress()
    with connect_grpc(arguments) as client:
        asked = Evaluation(
            task=arguments.task,
            limit=arguments.limit,
            seed=arguments.seed,
            concurrency=arguments.concurrency,
            thinking=arguments.thinking,
            document_tokens=lengths,
            max_tokens=arguments.max_tokens,
        )
        report, table = evaluate(client, asked, show)
    show(f"{report['n']} questions answered in {report['seconds']:.1f} s", last=True)
    print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    return OK
