"""The whole road in one command: checkpoint → engine → Triton server → streamed tokens.

    python -m examples.demo

Builds an engine from the golden TINY checkpoint, serves it with the real Triton server twice
(bounded replay on, then off) and streams the same prompt over gRPC and HTTP. The answers must be
the golden ones, token for token; the golden vectors come from an independent implementation.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from client import DeploymentError, GenerateRequest, GrpcClient, HttpClient
from client.stream import GenerateStream

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "tests" / "vectors" / "tiny"
RUN = ROOT / "runs" / "demo"
PORTS = {"http": 8400, "grpc": 8401, "metrics": 8402}
PROMPT_TOKENS = 20

Tokens = npt.NDArray[np.int32]


class DemoError(Exception):
    """The demonstration did not show what it promises."""


def main() -> int:
    started = time.monotonic()
    golden = load_file(CHECKPOINT / "golden_quant.safetensors")
    prompt = golden["tokens"].astype(np.int32)
    try:
        engine = build_engine()
        replayed = golden["greedy_from_20_replay"].astype(np.int32)
        # Hits in steps of 32 tokens: the golden prompt is shorter, so each protocol runs it cold.
        with served(engine, 2, "bounded replay on (the default)", "--global-page-tokens=32"):
            compare(prompt, replayed)
            show_prefix_hit(prompt, replayed)
        with served(engine, 3, "bounded replay off: the exact mode", "--no-swa-bounded-replay"):
            compare(prompt, golden["greedy_from_20"].astype(np.int32))
    except (DemoError, DeploymentError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    print(
        "\nThe two modes differ from the 19th token on, and both are right: with bounded replay the"
    )
    print(
        "decoder half of the model saw the prompt's last window only. The golden vectors have both."
    )
    print(f"Done in {time.monotonic() - started:.0f} s. Every token was the expected one.")
    print(f"Serve it yourself:  .venv/bin/dsv41-serve --engine {engine.relative_to(ROOT)}")
    print("Ask it:             .venv/bin/dsv41-client generate --input-ids 5,6,7")
    return 0


def build_engine() -> Path:
    title("1. An engine from a checkpoint")
    engine = RUN / "engine"
    shutil.rmtree(RUN, ignore_errors=True)
    RUN.mkdir(parents=True)
    classes = str(CHECKPOINT / "golden_quant.safetensors")
    command("dsv41-build", "engine", "--checkpoint_dir", str(CHECKPOINT), "--output_dir",
            str(engine), "--token_class", classes)  # fmt: skip
    command("dsv41-build", "inspect", "--engine", str(engine))
    return engine


@contextmanager
def served(engine: Path, number: int, what: str, *options: str) -> Iterator[None]:
    """The engine behind a real Triton server until the block ends."""
    title(f"{number}. Served by the Triton server, {what}")
    log = RUN / "server.log"
    ports = [f"--{name}-port={port}" for name, port in PORTS.items()]
    server = subprocess.Popen(
        [script("dsv41-serve"), "--engine", str(engine), "--log-file", str(log), *ports, *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            print("   ", line.rstrip())
            if "metrics" in line and "http://" in line:
                break
        else:
            raise DemoError(f"the server did not start; its log is {log}")
        yield
    finally:
        server.terminate()
        rest, _ = server.communicate(timeout=60)
        print("".join(f"    {line}\n" for line in rest.splitlines()), end="")
    if server.returncode:
        raise DemoError(f"the server stopped with status {server.returncode}; its log is {log}")


def compare(prompt: Tokens, expected: Tokens) -> None:
    """The first tokens of the golden prompt over both protocols, checked token by token."""
    request = GenerateRequest(input_ids=prompt[:PROMPT_TOKENS], max_tokens=len(expected), end_id=-1)
    print(f"\n    {PROMPT_TOKENS} prompt tokens, {len(expected)} to generate:")
    with GrpcClient(f"127.0.0.1:{PORTS['grpc']}") as grpc:
        check("gRPC", grpc.stream(request), expected)
    with HttpClient(f"127.0.0.1:{PORTS['http']}") as http:
        check("HTTP", http.stream(request), expected)


def check(name: str, stream: GenerateStream, expected: Tokens) -> None:
    print(f"    {name}  ", end="", flush=True)
    with stream:
        for chunk in stream:
            print(*chunk.output_ids, end=" ", flush=True)
        result = stream.result()
    print()
    if not np.array_equal(result.output_ids, expected):
        raise DemoError(f"{name}: expected {expected.tolist()}, got {result.output_ids.tolist()}")
    print(f"          equal to the golden tokens; {result.cached_tokens} prompt tokens were cached")


def show_prefix_hit(prompt: Tokens, answer: Tokens) -> None:
    """A second turn: everything said so far, and more."""
    turn = np.concatenate([prompt[:PROMPT_TOKENS], answer, prompt[PROMPT_TOKENS:]])
    with GrpcClient(f"127.0.0.1:{PORTS['grpc']}") as grpc:
        result = grpc.generate(GenerateRequest(input_ids=turn, max_tokens=4, end_id=-1))
    print(
        f"\n    A longer prompt on the same prefix: {result.num_input_tokens} tokens, of which\n"
        f"    {result.cached_tokens} came from the prefix cache (only the window before the hit "
        f"was run again)."
    )
    if not result.cached_tokens:
        raise DemoError("the second prompt shares its prefix with the first and hit nothing")


def command(name: str, *arguments: str) -> None:
    print(f"    $ {name} {' '.join(arguments[:1])} …", flush=True)
    done = subprocess.run([script(name), *arguments], text=True, capture_output=True)
    print("".join(f"    {line}\n" for line in done.stdout.splitlines()), end="")
    if done.returncode:
        raise DemoError(f"{name} failed: {done.stderr.strip()}")


def script(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
