"""Load and latency: runs the real perf_analyzer against a deployment, one concurrency at a time.

perf_analyzer lives in an environment of its own, made on first use (`scripts/setup_perf.sh`). It
sends the requests and stamps the responses; what the stamps mean is in `client.perf_profile`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from client.perf_profile import Level, read_profile, summarise
from client.protocol import DeploymentError, GenerateRequest, Int32Array
from client.tensors import input_tensors

if TYPE_CHECKING:
    from client.grpc import GrpcClient

_CHECKOUT = Path(__file__).resolve().parent.parent
SETUP_SCRIPT = _CHECKOUT / "scripts" / "setup_perf.sh"
DEFAULT_ENVIRONMENT = _CHECKOUT / ".venv-perf"
SETUP_FAILED = "perf_setup_failed"
LOAD_FAILED = "load_failed"
_PROBE_WORDS = 64

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Workload:
    """What each request is. All prompts of a run differ after their shared prefix.

    input_tokens, output_tokens: of one request; no end token cuts the output short.
    shared_prefix: tokens that all prompts begin with; the warm-up puts them in the prefix cache.
    prompt: "ids" draws token ids from [0, vocab_size); "text" draws words, as many as the server's
    tokenizer turns into about `input_tokens` tokens.
    """

    input_tokens: int = 128
    output_tokens: int = 32
    shared_prefix: int = 0
    prompt: str = "ids"
    vocab_size: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.input_tokens, self.output_tokens, self.vocab_size) < 1:
            raise ValueError("expected input tokens, output tokens and vocab size of at least 1")
        if not 0 <= self.shared_prefix < self.input_tokens:
            raise ValueError(
                f"expected a shared prefix from 0 to {self.input_tokens - 1} (one token less than "
                f"the prompt), got {self.shared_prefix}"
            )


def parse_concurrency(text: str) -> list[int]:
    """Reads 4, 1,2,4, 1:8 or 1:8:2 (start, end, step) as a list. Raises ValueError."""
    try:
        if ":" in text:
            start, end, *step = (int(part) for part in text.split(":"))
            levels = list(range(start, end + 1, *step))
        else:
            levels = [int(part) for part in text.split(",")]
        if not levels or min(levels) < 1:
            raise ValueError
    except (ValueError, TypeError):  # TypeError: more than three parts
        raise ValueError(
            f"expected concurrencies of at least 1 as 4, 1,2,4, 1:8 or 1:8:2, got {text!r}"
        ) from None
    return levels


def find_perf_analyzer(environment: Path, progress: Progress) -> tuple[Path, dict[str, str]]:
    """The program and the environment variables it needs; makes its environment when missing.

    Raises DeploymentError `perf_setup_failed` with what the set-up said.
    """
    if not SETUP_SCRIPT.exists():
        raise DeploymentError(
            SETUP_FAILED,
            "expected scripts/setup_perf.sh beside the client package: run perf from a checkout",
        )
    with subprocess.Popen(
        [str(SETUP_SCRIPT), str(environment)],
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as setup:
        said = ""
        for line in setup.stdout or ():
            said = line.strip()
            progress(said)
    if setup.returncode:
        raise DeploymentError(SETUP_FAILED, said or "the set-up of perf_analyzer failed")
    libraries = (environment / ".perf-stamp").read_text().strip()
    return environment / "bin" / "perf_analyzer", {"LD_LIBRARY_PATH": libraries}


def measure(
    client: GrpcClient,
    workload: Workload,
    levels: Sequence[int],
    *,
    requests: int | None,
    environment: Path = DEFAULT_ENVIRONMENT,
    progress: Progress,
) -> Iterator[Level]:
    """Yields each concurrency as it is measured.

    requests: how many at each level; None is 8 times the concurrency.
    Raises DeploymentError when the server, the load generator or its set-up fails.
    """
    program, variables = find_perf_analyzer(environment, progress)
    prompts = _Prompts(workload, client)
    progress("warm-up: one request")
    client.generate(prompts.make())
    for concurrency in levels:
        count = requests or 8 * concurrency
        with tempfile.TemporaryDirectory(prefix="dsv41-perf-") as folder:
            data, profile = Path(folder, "input.json"), Path(folder, "profile.json")
            # The generator's slots take every concurrency-th prompt and run unevenly: twice as
            # many as requests, so that none comes back as a prefix hit.
            entries = [_entry(prompts.make()) for _ in range(2 * count)]
            data.write_text(json.dumps({"data": entries}))
            command = [str(program), "-m", client.model, "-u", client.url, "-i", "grpc"]
            command += ["--streaming", "--async", "--input-data", str(data)]
            command += ["--concurrency-range", str(concurrency), "--request-count", str(count)]
            command += ["--profile-export-file", str(profile)]
            before = client.taken_requests()
            for seconds in _run(command, os.environ | variables):
                sent = min(client.taken_requests() - before, count)
                progress(
                    f"concurrency {concurrency}: {sent}/{count} requests sent, {seconds:.0f} s"
                )
            yield summarise(read_profile(profile), concurrency)


class _Prompts:
    """An endless supply of requests of one workload, no two alike."""

    def __init__(self, workload: Workload, client: GrpcClient) -> None:
        self._workload = workload
        self._rng = np.random.default_rng(workload.seed)
        if workload.prompt == "text":
            probe = GenerateRequest(text_input=self._words(_PROBE_WORDS), max_tokens=1)
            tokens = client.generate(probe).num_input_tokens or _PROBE_WORDS
            self._words_per_token = _PROBE_WORDS / tokens
            self._text_prefix = self._text(workload.shared_prefix)
        else:
            self._prefix = self._ids(workload.shared_prefix)

    def make(self) -> GenerateRequest:
        load = self._workload
        own = load.input_tokens - load.shared_prefix
        if load.prompt == "text":
            text = self._text_prefix + self._text(own)
            return GenerateRequest(text_input=text, max_tokens=load.output_tokens, end_id=-1)
        ids = np.concatenate([self._prefix, self._ids(own)])
        return GenerateRequest(input_ids=ids, max_tokens=load.output_tokens, end_id=-1)

    def _ids(self, count: int) -> Int32Array:
        return self._rng.integers(0, self._workload.vocab_size, count, dtype=np.int32)

    def _text(self, tokens: int) -> str:
        return self._words(max(1, round(tokens * self._words_per_token)) if tokens else 0)

    def _words(self, count: int) -> str:
        letters = self._rng.integers(ord("a"), ord("z") + 1, (count, 5), dtype=np.uint8)
        letters[:, -1] = ord(" ")
        return letters.tobytes().decode("ascii")


def _entry(request: GenerateRequest) -> dict[str, Any]:
    """One request in perf_analyzer's input format; its shapes have no batch dimension."""
    entry = {}
    for spec, array in input_tensors(request, stream=True):
        flat = array.ravel()
        content = [flat[0].decode()] if spec.datatype == "BYTES" else flat.tolist()
        entry[spec.name] = {"content": content, "shape": [flat.size]}
    return entry


def _run(command: Sequence[str], variables: dict[str, str]) -> Iterator[float]:
    """Runs the load to its end; yields the seconds since its start about once a second."""
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        # A session of its own: an interrupt from the keyboard reaches this process, which ends it.
        load = subprocess.Popen(
            command, env=variables, stdout=output, stderr=output, text=True, start_new_session=True
        )
        try:
            while True:
                try:
                    load.wait(1.0)
                    break
                except subprocess.TimeoutExpired:
                    yield time.monotonic() - began
        finally:
            if load.poll() is None:
                load.kill()
                load.wait()
        if load.returncode:
            output.seek(0)
            lines = [line.strip() for line in output if line.strip()] or ["it said nothing"]
            reason = next((line for line in lines if "error" in line.lower()), lines[-1])
            raise DeploymentError(
                LOAD_FAILED, f"perf_analyzer ended with {load.returncode}: {reason}"
            )


def table(levels: Sequence[Level]) -> str:
    """A table for people; the units are in its head."""

    def three(values: dict[str, float]) -> str:
        return " / ".join(f"{v:.1f}" for v in values.values()) or "-"

    head = (
        "users",
        "requests",
        "TTFT ms p50/p90/p99",
        "ITL ms p50/p90/p99",
        "tokens/s",
        "requests/s",
        "tokens/s/user",
        "input",
        "cached",
    )
    rows = [
        (
            str(level.concurrency),
            str(level.requests),
            three(level.ttft_ms),
            three(level.itl_ms),
            f"{level.output_tokens_per_second:.1f}",
            f"{level.requests_per_second:.2f}",
            "-" if level.interactivity is None else f"{level.interactivity:.1f}",
            f"{level.input_tokens:.0f}",
            f"{level.cached_tokens:.0f}",
        )
        for level in levels
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (head, *rows)
    )


def report(client: GrpcClient, workload: Workload, levels: Sequence[Level]) -> dict[str, Any]:
    """The object that is printed last and written by --json."""
    return {
        "benchmark": "dsv41-client perf",
        "load_generator": "perf_analyzer 2.51.0",
        "url": client.url,
        "model": client.model,
        "workload": asdict(workload),
        "levels": [asdict(level) for level in levels],
    }
