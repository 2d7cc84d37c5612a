"""What several commands share: the server's address, files that are written, what is said."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from client.http import HttpClient
from client.protocol import DEFAULT_MODEL

if TYPE_CHECKING:  # tritonclient is imported by what speaks gRPC, and by nothing else
    from client.grpc import GrpcClient

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
GRPC_ADDRESS, HTTP_ADDRESS = "localhost:8001", "localhost:8000"

Run = Callable[[argparse.Namespace], int]


def add_command(commands: Any, name: str, run: Run, description: str) -> argparse.ArgumentParser:
    """A command with the options that every command has."""
    added: argparse.ArgumentParser = commands.add_parser(
        name,
        help=description,
        description=description,
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    added.set_defaults(run=run)
    added.add_argument("--model", default=DEFAULT_MODEL, help="the model's name on the server")
    return added


def add_transport(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--url", help=f"host:port ({GRPC_ADDRESS} or {HTTP_ADDRESS})")
    parser.add_argument("--timeout", type=seconds, help="seconds for everything; none if left out")


def add_grpc_address(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help=f"host:port of the gRPC endpoint ({GRPC_ADDRESS})")


def connect(arguments: argparse.Namespace) -> GrpcClient | HttpClient:
    """By the protocol that `add_transport` offers. Errors as `connect_grpc`."""
    if arguments.protocol == "grpc":
        return connect_grpc(arguments)
    return HttpClient(arguments.url or HTTP_ADDRESS, arguments.model)


def connect_grpc(arguments: argparse.Namespace) -> GrpcClient:
    """Raises ValueError where the package that speaks gRPC is missing."""
    try:
        from client.grpc import GrpcClient
    except ImportError as error:
        raise ValueError(
            f"expected the package tritonclient with gRPC, but {error}: "
            "pip install 'tritonclient[grpc,http]'"
        ) from None
    return GrpcClient(arguments.url or GRPC_ADDRESS, arguments.model)


def check_writable(*paths: Path | None) -> None:
    """Before work whose result goes to these files. Raises ValueError for one that cannot be
    written; opening it is the only sure question."""
    for path in paths:
        if path is None:
            continue
        existed = path.exists()
        try:
            path.open("ab").close()
        except OSError as error:
            raise ValueError(
                f"expected a file in an existing folder that can be written, but {error}; choose "
                "another path"
            ) from None
        if not existed:
            path.unlink()


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a finite number above 0, got {value}")
    return value


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
