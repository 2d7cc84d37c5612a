"""The whole road in one command: checkpoint → engine → Triton server → answers as they stream.

    python -m examples.demo

Builds an engine from the trained TinyFlash checkpoint, serves it with the real Triton server and
asks questions whose answers are known; the model has seen none of the first three. How many rows it
ran again after a prefix hit, and how many tokens were drafted ahead, the server's metrics say.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import textwrap
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple

from client import Chat, DeploymentError, GrpcClient
from examples.tinyflash import retrieval
from examples.tinyflash.arithmetic import heldout_arithmetic
from examples.tinyflash.dialogue import phrases
from examples.tinyflash.evaluation import aligned
from examples.tinyflash.scoring import final_number, stated_value

ROOT = Path(__file__).resolve().parent.parent
CHECKPOINT = ROOT / "examples" / "tinyflash" / "checkpoint"
RUN = ROOT / "runs" / "demo"
PORTS = {"http": 8400, "grpc": 8401, "metrics": 8402}
DOCUMENT_TOKENS = 3000
SEED = "demonstration"
METRICS_SECONDS = 5.0
COUNTERS = {
    "prompt": "prompt_tokens",
    "cached": "prefix_cache_hits",
    "replayed": "replayed_rows",
    "output": "generation_tokens",
    "accepted": "spec_decode_num_accepted_tokens",
}
INDENT = "    "


class DemoError(Exception):
    """The demonstration did not show what it promises."""


class Asked(NamedTuple):
    """One question: what is sent, what the screen shows of it, and how its answer is judged."""

    title: str
    prompt: str
    shown: str
    expected: str
    found: Callable[[str], str | None]  # what an answer says


class Turn(NamedTuple):
    """What happened. Times in seconds; counts are tokens, as the server says."""

    title: str
    is_right: bool
    prompt: int
    cached: int
    replayed: int
    output: int
    accepted: int  # of the output: drafts that the model agreed with
    first_token: float
    rest: float  # from the first token to the last


def main() -> int:
    started = time.monotonic()
    try:
        engine = build_engine(RUN / "engine")
        with served(engine):
            turns = converse(f"127.0.0.1:{PORTS['grpc']}", metrics_url(), DOCUMENT_TOKENS)
        title("4. What happened")
        print(table(turns))
        print(second_turn(turns[1], turns[2]))
    except (DemoError, DeploymentError, OSError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; the server is stopped", file=sys.stderr)
        return 130
    num_right = sum(turn.is_right for turn in turns)
    print(
        f"\n{num_right} of {len(turns)} answers are right. Done in "
        f"{time.monotonic() - started:.0f} s.\n\n"
        f"Serve it yourself:  .venv/bin/dsv41-serve --engine {engine.relative_to(ROOT)} "
        "--speculative\n"
        "Talk with it:       .venv/bin/dsv41-client chat\n"
        "Judge it:           .venv/bin/dsv41-client eval --task arithmetic --limit 100"
    )
    return 0 if num_right == len(turns) else 1


def build_engine(engine: Path) -> Path:
    title("1. An engine from a checkpoint")
    shutil.rmtree(engine.parent, ignore_errors=True)
    engine.parent.mkdir(parents=True)
    command("dsv41-build", "engine", f"--checkpoint_dir={CHECKPOINT}", f"--output_dir={engine}")
    return engine


@contextmanager
def served(engine: Path) -> Iterator[None]:
    """The engine behind a real Triton server until the block ends."""
    title("2. Served by the Triton server")
    log = engine.parent / "server.log"
    options = ["--speculative", *(f"--{name}-port={port}" for name, port in PORTS.items())]
    server = subprocess.Popen(
        [script("dsv41-serve"), "--engine", str(engine), "--log-file", str(log), *options],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        for line in server.stdout:
            print(INDENT + line.rstrip(), flush=True)
            if "metrics" in line and "http://" in line:
                break
        else:
            raise DemoError(f"the server did not start; its log is {log}")
        yield
    finally:
        server.terminate()
        server.communicate(timeout=60)
    if server.returncode:
        raise DemoError(f"the server stopped with status {server.returncode}; its log is {log}")


def converse(url: str, metrics: str, document_tokens: int) -> list[Turn]:
    """Three conversations over gRPC, the second one with a second turn; answers are streamed."""
    title("3. Questions")
    problem, found, again, talk = questions(document_tokens)
    with GrpcClient(url) as client:
        reader = Chat(client)
        turns = [(Chat(client), problem), (reader, found), (reader, again), (Chat(client), talk)]
        return [ask(chat, asked, metrics) for chat, asked in turns]


def questions(document_tokens: int) -> tuple[Asked, Asked, Asked, Asked]:
    """A word problem, two facts in one document, and a word about the model itself."""
    rng = Random(SEED)
    (problem, *_) = heldout_arithmetic(1, 0)
    text, facts = retrieval.document(rng, document_tokens, 2, held_out=True)
    first, second = (retrieval.question(rng, fact) for fact in facts)
    words = text.text.split()
    excerpt = f"{' '.join(words[:30])} … ({len(words) - 60} words) … {' '.join(words[-30:])}"
    talk = next(t for t in phrases()["small_talk"] if "What can you do?" in t["user"])
    return (
        Asked("word problem", problem.prompt, problem.prompt, problem.answer, final_number),
        Asked("fact in a document", f"{text.text}\n\n{first}", f"{excerpt}\n\n{first}",
              facts[0].value, stated_value),
        Asked("another, same document", second, second, facts[1].value, stated_value),
        Asked("about itself", "What can you do?", "What can you do?", talk["assistant"], str),
    )  # fmt: skip


def ask(chat: Chat, asked: Asked, metrics: str) -> Turn:
    """One turn on the screen: the question, the answer as it comes, and whether it is right."""
    before = counted(metrics)
    print(f"\n{INDENT}{asked.title}")
    for paragraph in asked.shown.split("\n"):
        print("\n".join(f"  > {line}".rstrip() for line in textwrap.wrap(paragraph, 92) or [""]))
    print(f"\n{INDENT}", end="", flush=True)
    asked_at = time.perf_counter()
    with chat.ask(asked.prompt) as answer:
        for chunk in answer:
            print(chunk.text_output.replace("\n", f"\n{INDENT}"), end="", flush=True)
        ended = time.perf_counter()
    result = answer.result()
    found = asked.found(result.text_output)
    is_right = found == asked.expected
    wrong = f"WRONG: expected {asked.expected}, got {found or 'no answer of that form'}"
    print(f"\n\n{INDENT}→ {'right' if is_right else wrong}")
    output = int(result.output_ids.size)
    after = counted(metrics, output=before["output"] + output)
    first = answer.time_to_first_token
    assert first is not None
    return Turn(
        title=asked.title,
        is_right=is_right,
        prompt=result.num_input_tokens or 0,
        cached=result.cached_tokens or 0,
        replayed=after["replayed"] - before["replayed"],
        output=output,
        accepted=after["accepted"] - before["accepted"],
        first_token=first,
        rest=ended - asked_at - first,
    )


def counted(metrics: str, *, output: int = 0) -> dict[str, int]:
    """The server's token counters by kind, once they show at least `output` tokens of answers."""
    deadline = time.monotonic() + METRICS_SECONDS
    while time.monotonic() < deadline:
        with urllib.request.urlopen(metrics, timeout=METRICS_SECONDS) as response:
            body = response.read().decode()
        found = dict(re.findall(r"^dsv41_(\w+)_total (\S+)$", body, re.MULTILINE))
        totals = {kind: int(float(found[name])) for kind, name in COUNTERS.items() if name in found}
        if totals.get("output", -1) >= output:
            return totals
        time.sleep(0.05)
    raise DemoError(f"{metrics} did not show {output} tokens of answers")


def table(turns: list[Turn]) -> str:
    counts = ("prompt", "cached", "replayed", "answer", "drafted")
    rows: list[tuple[str, ...]] = [("question", *counts, "first token", "tokens/s", "")]
    for turn in turns:
        rate = (turn.output - 1) / turn.rest if turn.output > 1 else 0.0
        rows.append(
            (
                turn.title,
                f"{turn.prompt:,}",
                f"{turn.cached:,}",
                f"{turn.replayed:,}",
                f"{turn.output:,}",
                f"{turn.accepted:,}",
                f"{turn.first_token:.2f} s",
                f"{rate:.1f}",
                "right" if turn.is_right else "WRONG",
            )
        )
    return "\n".join(INDENT + line for line in aligned(rows))


def second_turn(first: Turn, second: Turn) -> str:
    """What the prefix cache saved. Raises DemoError when it saved nothing."""
    if not second.cached:
        raise DemoError("the second turn repeats the first one's document and hit nothing")
    return "\n" + textwrap.fill(
        f"The second turn about the document found {second.cached:,} of its {second.prompt:,} "
        f"prompt tokens in the prefix cache and ran the last {second.replayed} of these again "
        f"(bounded replay). Its first token came after {second.first_token:.2f} s, the "
        f"first turn's after {first.first_token:.2f} s.",
        96,
        initial_indent=INDENT,
        subsequent_indent=INDENT,
    )


def metrics_url() -> str:
    return f"http://127.0.0.1:{PORTS['metrics']}/metrics"


def command(name: str, *arguments: str) -> None:
    print(f"{INDENT}$ {name} {' '.join(arguments[:1])} …", flush=True)
    done = subprocess.run([script(name), *arguments], text=True, capture_output=True)
    print("".join(f"{INDENT}{line}\n" for line in done.stdout.splitlines()), end="")
    if done.returncode:
        raise DemoError(f"{name} failed: {done.stderr.strip()}")


def script(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
