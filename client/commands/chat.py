"""`dsv41-client chat`: a conversation on a terminal, from a pipe or from options."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from client.chat import DEFAULT_MAX_TOKENS, Chat, converse
from client.commands.common import INTERRUPTED, OK, add_command, add_transport, connect, say

_GIVEN = ("max_tokens", "temperature", "top_p", "seed", "reasoning_effort")


def add(commands: Any) -> None:
    parser = add_command(
        commands, "chat", run, "talk with the model; history is kept from turn to turn"
    )
    add_transport(parser)
    option = parser.add_argument
    option("--message", action="append", help="ask this instead; again for more turns")
    option("--system", help="how the assistant shall behave")
    option("--thinking", action="store_true", help="reason before answering")
    option("--reasoning-effort", help="low, high, xhigh, max or 1 to 100")
    option("--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, help="most tokens of an answer")
    option("--temperature", type=float, help="0 is greedy")
    option("--top-p", type=float, help="1 is off")
    option("--seed", type=int, help="of the random draws")


def run(arguments: argparse.Namespace) -> int:
    options = {n: getattr(arguments, n) for n in _GIVEN if getattr(arguments, n) is not None}
    turns = arguments.message
    if turns is None and not sys.stdin.isatty():
        turns = [sys.stdin.read().rstrip("\n")]
    if turns is not None and not all(turn.strip() for turn in turns):
        raise ValueError("expected messages with text, got an empty one; write one")
    with connect(arguments) as client:
        chat = Chat(
            client,
            system=arguments.system,
            thinking=arguments.thinking,
            timeout=arguments.timeout,
            **options,
        )
        finished = converse(chat, sys.stdin if turns is None else turns, say=say)
    return OK if finished else INTERRUPTED
