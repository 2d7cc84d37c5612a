"""`dsv41-client health`: whether the deployment serves."""

from __future__ import annotations

import argparse
from typing import Any

from client.commands.common import FAILED, OK, add_command, add_transport, connect, say


def add(commands: Any) -> None:
    parser = add_command(commands, "health", run, "say whether the deployment serves")
    add_transport(parser)
    parser.add_argument("--deep", action="store_true", help="really generate one token")


def run(arguments: argparse.Namespace) -> int:
    with connect(arguments) as client:
        health = client.health(deep=arguments.deep, timeout=arguments.timeout or 10.0)
    rows = {
        "server is live": health.live,
        "server is ready": health.ready,
        f"model {arguments.model} is ready": health.model_ready,
        "one token was generated": health.generates,
    }
    width = max(map(len, rows))
    for name, state in rows.items():
        print(f"{name.ljust(width)}  {'not asked' if state is None else 'yes' if state else 'NO'}")
    if health.detail:
        say(f"dsv41-client: {health.detail}")
    return OK if health.ok else FAILED
