"""`dsv41-client`: generate, chat, health, perf, eval. Options may be written with - or _.

Answers, tables and JSON go to standard output; progress, summaries and errors to standard error.
Exit codes: 0 done, 1 the deployment failed or is not healthy, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from client import perf
from client.chat import DEFAULT_MAX_TOKENS, Chat, converse
from client.eval import Evaluation
from client.eval import run as run_evaluation
from client.grpc import GrpcClient
from client.http import HttpClient
from client.plot import plot, require_matplotlib
from client.progress import Progress
from client.protocol import (
    DEFAULT_MODEL,
    DeploymentError,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    Int32Array,
)

OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

_GRPC_ADDRESS, _HTTP_ADDRESS = "localhost:8001", "localhost:8000"
_PENALTIES = {"repetition_penalty": "1", "presence_penalty": "0", "frequency_penalty": "0"}
_LOG_PROBS = ("log_probs", "top_log_prob_ids", "top_log_probs")
_SAMPLING = (
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", *_PENALTIES, "min_tokens", "seed"),
    *("stop_words", "bad_words", "ignore_eos", "logprobs", "end_id", "request_id"),
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(_dashes(sys.argv[1:] if argv is None else argv))
    try:
        return int(arguments.run(arguments))
    except DeploymentError as error:
        _say(f"dsv41-client: {error}")
        return FAILED
    except ValueError as error:
        _say(f"dsv41-client: {error}")
        return USAGE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, for instance `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


def _generate(arguments: argparse.Namespace) -> int:
    given = {n: getattr(arguments, n) for n in _SAMPLING if getattr(arguments, n) is not None}
    request = GenerateRequest(text_input=arguments.text, input_ids=_ids(arguments), **given)
    began = time.perf_counter()
    first: float | None = None
    with _client(arguments) as client:
        if arguments.no_stream:
            result = _unstreamed(client, request, arguments)
            _print_delta(result.text_output, result.output_ids, arguments)
        else:
            with client.stream(request, timeout=arguments.timeout) as stream:
                try:
                    for chunk in stream:
                        _print_delta(chunk.text_output, chunk.output_ids, arguments)
                except KeyboardInterrupt:
                    stream.cancel()
                finally:
                    if not arguments.json:
                        print(flush=True)
                result, first = stream.result(), stream.time_to_first_token
    _print_summary(result, time.perf_counter() - began, first, arguments)
    return INTERRUPTED if result.finish_reason is FinishReason.CANCELLED else OK


def _unstreamed(
    client: GrpcClient | HttpClient, request: GenerateRequest, arguments: argparse.Namespace
) -> GenerateResult:
    try:
        return client.generate(request, timeout=arguments.timeout)
    except KeyboardInterrupt:
        if isinstance(client, HttpClient):
            _say(
                "dsv41-client: the server generates on: it notices an interrupt only without "
                "--no-stream or over gRPC"
            )
        raise


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
    if arguments.no_stream:
        print(flush=True)
    shown = {
        "input": result.num_input_tokens,
        "cached": result.cached_tokens,
        "output": int(result.output_ids.size),
        "finish": result.finish_reason,
        "TTFT": None if first is None else f"{first * 1e3:.1f} ms",
        "total": f"{seconds:.3f} s",
    }
    _say("  ".join(f"{name} {value}" for name, value in shown.items() if value is not None))


def _health(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
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
        _say(f"dsv41-client: {health.detail}")
    return OK if health.ok else FAILED


def _perf(arguments: argparse.Namespace) -> int:
    workload = perf.Workload(
        input_tokens=arguments.input_tokens,
        output_tokens=arguments.output_tokens,
        shared_prefix=arguments.shared_prefix,
        prompt=arguments.prompt,
        vocab_size=arguments.vocab_size,
        seed=secrets.randbits(32) if arguments.seed is None else arguments.seed,
    )
    levels = perf.parse_concurrency(arguments.concurrency)
    _check_folders(arguments.json, arguments.plot)
    if arguments.plot:
        require_matplotlib()
    show = Progress()
    measured = []
    with GrpcClient(arguments.url or _GRPC_ADDRESS, arguments.model) as client:
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


def _chat(arguments: argparse.Namespace) -> int:
    given = ("max_tokens", "temperature", "top_p", "seed", "reasoning_effort")
    options = {n: getattr(arguments, n) for n in given if getattr(arguments, n) is not None}
    turns = arguments.message
    if turns is None and not sys.stdin.isatty():
        turns = [sys.stdin.read().rstrip("\n")]
    with _client(arguments) as client:
        chat = Chat(
            client,
            system=arguments.system,
            thinking=arguments.thinking,
            timeout=arguments.timeout,
            **options,
        )
        finished = converse(chat, sys.stdin if turns is None else turns, say=_say)
    return OK if finished else INTERRUPTED


def _eval(arguments: argparse.Namespace) -> int:
    _check_folders(arguments.json)
    lengths = None if arguments.document_tokens is None else tuple(arguments.document_tokens)
    show = Progress()
    with GrpcClient(arguments.url or _GRPC_ADDRESS, arguments.model) as client:
        asked = Evaluation(
            task=arguments.task,
            limit=arguments.limit,
            seed=arguments.seed,
            concurrency=arguments.concurrency,
            thinking=arguments.thinking,
            document_tokens=lengths,
            max_tokens=arguments.max_tokens,
        )
        report, table = run_evaluation(client, asked, show)
    show(f"{report['n']} questions answered in {report['seconds']:.1f} s", last=True)
    print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(report, ensure_ascii=False, indent=1) + "\n")
    return OK


def _check_folders(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.absolute().parent.is_dir():
            raise ValueError(f"expected an existing folder for {path}, got none: make it first")


def _client(arguments: argparse.Namespace) -> GrpcClient | HttpClient:
    if arguments.protocol == "grpc":
        return GrpcClient(arguments.url or _GRPC_ADDRESS, arguments.model)
    return HttpClient(arguments.url or _HTTP_ADDRESS, arguments.model)


def _ids(arguments: argparse.Namespace) -> Int32Array | None:
    """The prompt's ids from --input-ids or --ids-file (.npy, or numbers in a text file)."""
    text, path = arguments.input_ids, arguments.ids_file
    if path is not None:
        try:
            if path.suffix == ".npy":
                loaded: Int32Array = np.load(path, allow_pickle=False)
                return loaded
            text = path.read_text()
        except OSError as error:
            raise ValueError(f"expected a readable file of token ids: {error}") from None
    if text is None:
        return None
    try:
        return np.array([int(word) for word in re.split(r"[\s,]+", text) if word], dtype=np.int64)
    except (ValueError, OverflowError):
        raise ValueError(
            f"expected token ids as whole numbers with spaces or commas, got {text[:60]!r}"
        ) from None


def _dashes(argv: Sequence[str]) -> list[str]:
    """--top_k=5 becomes --top-k=5; values are left as they are."""

    def canonical(word: str) -> str:
        if not word.startswith("--"):
            return word
        name, equals, value = word.partition("=")
        return name.replace("_", "-") + equals + value

    return [canonical(word) for word in argv]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsv41-client",
        description="Speak to a DeepSeek-V4.1 deployment on Triton Inference Server.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, description: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=description,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        added.set_defaults(run=run)
        added.add_argument("--model", default=DEFAULT_MODEL, help="the model's name on the server")
        return added

    generate = command("generate", _generate, "generate one answer and print it as it arrives")
    _add_transport(generate)
    prompt = generate.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--text", help="the prompt as text; the answer is printed as text")
    prompt.add_argument("--input-ids", help="the prompt as token ids: 5,6,7; so is the answer")
    prompt.add_argument("--ids-file", type=Path, help="a file of token ids: .npy or text")
    generate.add_argument("--max-tokens", type=int, help="most tokens to generate (16)")
    generate.add_argument("--temperature", type=float, help="0 is greedy")
    generate.add_argument("--top-k", type=int, help="0 is off")
    generate.add_argument("--top-p", type=float, help="1 is off")
    generate.add_argument("--min-p", type=float, help="0 is off")
    for name, off in _PENALTIES.items():
        generate.add_argument(f"--{name.replace('_', '-')}", type=float, help=f"{off} is off")
    generate.add_argument("--min-tokens", type=int, help="so many before an end token")
    generate.add_argument("--seed", type=int, help="of the random draws")
    generate.add_argument("--stop-words", action="append", help="text that ends the answer")
    generate.add_argument("--bad-words", action="append", help="text to avoid; again for more")
    generate.add_argument("--ignore-eos", action="store_true", default=None, help="go on")
    generate.add_argument("--logprobs", type=int, help="with --json: this many alternatives")
    generate.add_argument("--end-id", type=int, help="token that ends the answer, -1: none does")
    generate.add_argument("--request-id", help="name of the request in the server's log")
    generate.add_argument("--no-stream", action="store_true", help="ask for one whole answer")
    generate.add_argument("--json", action="store_true", help="print one JSON object instead")

    chat = command("chat", _chat, "talk with the model; history is kept from turn to turn")
    _add_transport(chat)
    chat.add_argument("--message", action="append", help="ask this instead; again for more turns")
    chat.add_argument("--system", help="how the assistant shall behave")
    chat.add_argument("--thinking", action="store_true", help="reason before answering")
    chat.add_argument("--reasoning-effort", help="low, high, xhigh, max or 1 to 100")
    chat.add_argument(
        "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, help="most tokens of an answer"
    )
    chat.add_argument("--temperature", type=float, help="0 is greedy")
    chat.add_argument("--top-p", type=float, help="1 is off")
    chat.add_argument("--seed", type=int, help="of the random draws")

    health = command("health", _health, "say whether the deployment serves")
    _add_transport(health)
    health.add_argument("--deep", action="store_true", help="really generate one token")

    load = command("perf", _perf, "measure latency and throughput with perf_analyzer over gRPC")
    load.add_argument("--url", help=f"host:port of the gRPC endpoint ({_GRPC_ADDRESS})")
    load.add_argument("--concurrency", default="1,2,4", help="4, 1,2,4, 1:8 or 1:8:2 users")
    load.add_argument("--requests", type=_positive, help="requests per level (8 per user)")
    load.add_argument("--input-tokens", type=int, default=128, help="of each prompt")
    load.add_argument("--output-tokens", type=int, default=32, help="of each answer")
    load.add_argument("--shared-prefix", type=int, default=0, help="tokens common to all prompts")
    load.add_argument("--prompt", choices=("ids", "text"), default="ids", help="kind of prompt")
    load.add_argument("--vocab-size", type=int, default=256, help="prompt ids are below this")
    load.add_argument("--seed", type=int, help="of the prompts; a new one each run if left out")
    load.add_argument("--json", type=Path, metavar="FILE", help="also write the JSON object here")
    load.add_argument("--plot", type=Path, metavar="FILE", help="throughput over interactivity")
    load.add_argument(
        "--perf-env", type=Path, default=perf.DEFAULT_ENVIRONMENT, help="perf_analyzer's place"
    )

    accuracy = command("eval", _eval, "ask TinyFlash's held-out questions and score the answers")
    accuracy.add_argument("--url", help=f"host:port of the gRPC endpoint ({_GRPC_ADDRESS})")
    accuracy.add_argument("--task", choices=("arithmetic", "retrieval"), required=True)
    accuracy.add_argument("--limit", type=_positive, default=200, help="number of questions")
    accuracy.add_argument("--seed", type=int, default=0, help="each seed draws other questions")
    accuracy.add_argument("--concurrency", type=_positive, default=8, help="questions at once")
    accuracy.add_argument("--thinking", action="store_true", help="reason before answering")
    accuracy.add_argument("--max-tokens", type=_positive, help="most tokens of an answer")
    accuracy.add_argument(
        "--document-tokens", type=int, nargs=2, metavar=("LEAST", "MOST"), help="of retrieval"
    )
    accuracy.add_argument("--json", type=Path, metavar="FILE", help="write the report here")
    return parser


def _add_transport(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--protocol", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--url", help=f"host:port ({_GRPC_ADDRESS} or {_HTTP_ADDRESS})")
    parser.add_argument("--timeout", type=float, help="seconds for everything; none if left out")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


if __name__ == "__main__":
    sys.exit(main())
