"""`dsv41-client`: generate, chat, health, perf, eval, openai-proxy. Options may have - or _.

Answers, tables and JSON go to standard output; progress, summaries and errors to standard error.
Exit codes: 0 done, 1 the deployment failed or is not healthy, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from client.commands import chat, evaluate, generate, health, openai_proxy, perf
from client.commands.common import FAILED, INTERRUPTED, USAGE, say
from client.protocol import DeploymentError

_COMMANDS = (generate, chat, health, perf, evaluate, openai_proxy)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="dsv41-client",
        description="Speak to a DeepSeek-V4.1 deployment on Triton Inference Server.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in _COMMANDS:
        command.add(commands)
    arguments = parser.parse_args(_dashes(sys.argv[1:] if argv is None else argv))
    try:
        return int(arguments.run(arguments))
    except DeploymentError as error:
        say(f"dsv41-client: {error}")
        return FAILED
    except ValueError as error:
        say(f"dsv41-client: {error}")
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, for instance `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _dashes(argv: Sequence[str]) -> list[str]:
    """--top_k=5 becomes --top-k=5; values are left as they are."""

    def canonical(word: str) -> str:
        if not word.startswith("--"):
            return word
        name, equals, value = word.partition("=")
        return name.replace("_", "-") + equals + value

    return [canonical(word) for word in argv]


if __name__ == "__main__":
    sys.exit(main())
