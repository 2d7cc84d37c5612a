"""`dsv41-client generate`: one answer, printed as it arrives."""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

import numpy as np

from client.commands.common import INTERRUPTED, OK, add_command, add_transport, connect, say
from client.http import HttpClient
from client.protocol import FinishReason, GenerateRequest, GenerateResult, Int32Array

_PENALTIES = {"repetition_penalty": "1", "presence_penalty": "0", "frequency_penalty": "0"}
_LOG_PROBS = ("log_probs", "top_log_prob_ids", "top_log_probs")
_SAMPLING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", *_PENALTIES, "min_tokens", "seed"),
    *("stop_words", "bad_words", "ignore_eos", "logprobs", "end_id", "speculative", "request_id"),
)


def add(commands: Any) -> None:
    parser = add_command(
        commands, "generate", run, "generate one answer and print it as it arrives"
    )
    add_transport(parser)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--text", help="the prompt as text; the answer is printed as text")
    prompt.add_argument("--input-ids", help="the prompt as token ids: 5,6,7; so is the answer")
    prompt.add_argument("--ids-file", type=Path, help="a file of token ids: .npy or text")
    option = parser.add_argument
    option("--max-tokens", type=int, help="most tokens to generate (16); -1: as many as fit")
    option("--temperature", type=float, help="0 is greedy")
    option("--top-k", type=int, help="0 is off")
    option("--top-p", type=float, help="1 is off")
    option("--min-p", type=float, help="0 is off")
    for name, off in _PENALTIES.items():
        option(f"--{name.replace('_', '-')}", type=float, help=f"{off} is off")
    option("--min-tokens", type=int, help="so many before an end token")
    option("--seed", type=int, help="of the random draws")
    option("--stop-words", action="append", help="text that ends the answer")
    option("--bad-words", action="append", help="text to avoid; again for more")
    option("--ignore-eos", action="store_true", default=None, help="go on")
    option("--logprobs", type=int, help="with --json: this many alternatives")
    option("--end-id", type=int, help="token that ends the answer, -1: none does")
    option(
        "--no-speculative", dest="speculative", action="store_false", default=None,
        help="take no drafts; the answer is the same",
    )  # fmt: skip
    option("--request-id", help="name of the request in the server's log")
    option("--no-stream", action="store_true", help="ask for one whole answer")
    option("--json", action="store_true", help="print one JSON object instead")


def run(arguments: argparse.Namespace) -> int:
    given = {n: getattr(arguments, n) for n in _SAMPLING if getattr(arguments, n) is not None}
    request = GenerateRequest(text_input=arguments.text, input_ids=_ids(arguments), **given)
    began = time.perf_counter()
    first: float | None = None
    with connect(arguments) as client:
        if arguments.no_stream:
            result = _unstreamed(client, request, arguments)
            _print_delta(result.text_output, result.output_ids, arguments)
            if not arguments.json:
                print(flush=True)
        else:
            with client.stream(request, timeout=arguments.timeout) as stream:
                came = False
                try:
                    for chunk in stream:
                        came = True
                        _print_delta(chunk.text_output, chunk.output_ids, arguments)
                except KeyboardInterrupt:
                    stream.cancel()
                finally:
                    if came and not arguments.json:
                        print(flush=True)
                result, first = stream.result(), stream.time_to_first_token
    _print_summary(result, time.perf_counter() - began, first, arguments)
    return INTERRUPTED if result.finish_reason is FinishReason.CANCELLED else OK


def _unstreamed(
    client: Any, request: GenerateRequest, arguments: argparse.Namespace
) -> GenerateResult:
    try:
        result: GenerateResult = client.generate(request, timeout=arguments.timeout)
    except KeyboardInterrupt:
        if isinstance(client, HttpClient):
            say(
                "dsv41-client: the server generates on: it notices an interrupt only without "
                "--no-stream or over gRPC"
            )
        raise
    return result


def _print_delta(text: str, ids: Int32Array, arguments: argparse.Namespace) -> None:
    """Text for a prompt of text, ids for a prompt of ids: what was asked in is answered in."""
    if not arguments.json:
        shown = text if arguments.text is not None else "".join(f"{i} " for i in ids.tolist())
        print(shown, end="", flush=True)


def _print_summary(
    result: GenerateResult, seconds: float, first: float | None, arguments: argparse.Namespace
) -> None:
    if arguments.json:
        print(
            json.dumps(
                {
                    "text_output": result.text_output,
                    "output_ids": result.output_ids.tolist(),
                    "finish_reason": result.finish_reason,
                    "num_input_tokens": result.num_input_tokens,
                    "num_output_tokens": result.num_output_tokens,
                    "cached_tokens": result.cached_tokens,
                    **{n: v.tolist() for n in _LOG_PROBS if (v := getattr(result, n)) is not None},
                    "time_to_first_token_ms": None if first is None else first * 1e3,
                    "seconds": seconds,
                },
                ensure_ascii=False,
            )
        )
        return
    shown = {
        "input": result.num_input_tokens,
        "cached": result.cached_tokens,
        "output": int(result.output_ids.size),
        "finish": result.finish_reason,
        "TTFT": None if first is None else f"{first * 1e3:.1f} ms",
        "total": f"{seconds:.3f} s",
    }
    say("  ".join(f"{name} {value}" for name, value in shown.items() if value is not None))


def _ids(arguments: argparse.Namespace) -> Int32Array | None:
    """The prompt's ids from --input-ids or --ids-file (.npy, or numbers in a text file)."""
    text, path = arguments.input_ids, arguments.ids_file
    if path is not None:
        try:
            if path.suffix == ".npy":
                loaded: Int32Array = np.load(path, allow_pickle=False)
                return loaded
            text = path.read_text()
        except (OSError, EOFError, ValueError) as error:  # EOFError: an empty .npy
            raise ValueError(f"expected a readable file of token ids at {path}: {error}") from None
    if text is None:
        return None
    try:
        return np.array([int(word) for word in re.split(r"[\s,]+", text) if word], dtype=np.int64)
    except (ValueError, OverflowError):
        raise ValueError(
            f"expected token ids as whole numbers with spaces or commas, got {text[:60]!r}"
        ) from None
