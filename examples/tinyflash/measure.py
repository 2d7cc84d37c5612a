"""All runs behind docs/accuracy.md: every setting on the same held-out questions.

    dsv41-build engine --checkpoint_dir examples/tinyflash/checkpoint --output_dir runs/measured \\
        --max_batch_size 1536 --max_num_tokens 49152 --max_seq_len 9216
    python -m examples.tinyflash.measure --engine runs/measured --out benchmarks/tinyflash \\
        --device cuda

`--quantised nvfp4=DIR mxfp8=DIR` measures engines of the same model in these formats too.

Each run is one JSON file; files that exist are kept, so that an interrupted measurement goes on
where it was, unless another engine or other questions made them. Cold answers come first and leave
their prompts in the prefix cache; warm answers are to the same prompts again.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from client.commands.common import positive
from engine.config import ModelConfig
from engine.directory import Engine
from examples.tinyflash import compare, speculate
from examples.tinyflash import device as devices
from examples.tinyflash.ablations import ABLATIONS, ablated
from examples.tinyflash.evaluation import (
    ANSWER_TOKENS,
    DOCUMENT_TOKENS,
    TASKS,
    Answer,
    Report,
    digest,
    questions,
    reading,
    report,
)
from examples.tinyflash.in_process import InProcess, origin
from examples.tinyflash.retrieval import check_lengths
from examples.tinyflash.scoring import Question, Task

Cache = Literal["cold", "warm"]

# What an engine of each format says of its weights.
FORMATS = {
    "nvfp4": {"linears": "nvfp4", "experts": "nvfp4", "engram_rows": "nvfp4"},
    "nvfp4-w4a4": {
        "linears": "nvfp4 and nvfp4-w4a4",
        "experts": "nvfp4 and nvfp4-w4a4",
        "engram_rows": "nvfp4",
    },
    "nvfp4-experts": {"linears": "fp8", "experts": "fp4 and nvfp4", "engram_rows": "fp8"},
    "mxfp8": {"linears": "mxfp8", "experts": "mxfp8", "engram_rows": "mxfp8"},
}
CURVE_WINDOWS = (0, 0.25, 0.5, 1, 2, 4)
_KEPT_MISTAKES = 8


class Sizes(NamedTuple):
    """Numbers of questions, the seed that draws them, tokens of a document and of an answer."""

    arithmetic: int
    retrieval: int
    seed: int
    document_tokens: tuple[int, int] = DOCUMENT_TOKENS
    max_tokens: int = ANSWER_TOKENS

    def ask(self, task: Task) -> list[Question]:
        limit = self.arithmetic if task == "arithmetic" else self.retrieval
        lengths = self.document_tokens if task == "retrieval" else None
        return questions(task, limit, self.seed, lengths)


@dataclass(frozen=True)
class Job:
    """One model in one setting; `options` are serve settings, one report per state of the cache.

    `engine`: the model in another format, where it is not the measured engine that is asked.
    """

    task: Task
    setting: str
    options: dict[str, Any] = field(default_factory=dict)
    ablate: str | None = None
    caches: tuple[Cache, ...] = ("cold",)
    engine: Path | None = None

    @property
    def files(self) -> dict[Cache, str]:
        return {cache: file_name(self.task, self.setting, cache) for cache in self.caches}

    def run(self, engine: Path, sizes: Sizes, device: str) -> dict[str, Report]:
        """The reports by file name."""
        engine = self.engine or engine
        options = {"dtype": "float32", "swa_bounded_replay": True} | self.options
        answers: dict[Cache, list[Answer]] = {cache: [] for cache in self.caches}
        seconds = dict.fromkeys(self.caches, 0.0)
        with ablated(self.ablate):
            model = InProcess(engine, options, device)
            try:
                asked, prompts = _encoded(model, sizes, self.task)
                for first in range(0, len(prompts), model.max_batch_size):
                    some = prompts[first : first + model.max_batch_size]
                    for cache in self.caches:
                        started = time.monotonic()
                        answers[cache] += model.answers(some, max_tokens=sizes.max_tokens)
                        seconds[cache] += time.monotonic() - started
            finally:
                model.close()
        settings = options | origin(engine, device)
        settings |= {"ablate": self.ablate, "max_tokens": sizes.max_tokens}
        return {
            name: _without_details(
                report(
                    asked,
                    answers[cache],
                    seed=sizes.seed,
                    settings=settings | {"warm": cache == "warm"},
                    seconds=seconds[cache],
                )
            )
            for cache, name in self.files.items()
        }


@dataclass(frozen=True)
class AcceptanceJob:
    """Drafts of word problems, network alone, in one dtype."""

    dtype: str

    @property
    def files(self) -> dict[Cache, str]:
        return {"cold": f"acceptance.{self.dtype}.json"}

    def run(self, engine: Path, sizes: Sizes, device: str) -> dict[str, Report]:
        made = speculate.acceptance(
            engine, limit=sizes.arithmetic, seed=sizes.seed, max_tokens=sizes.max_tokens,
            dtype=self.dtype, device=device,
        )  # fmt: skip
        return {self.files["cold"]: made}


def file_name(task: str, setting: str, cache: Cache) -> str:
    return f"{task}.{setting}.{cache}.json"


def replay_setting(config: ModelConfig, windows: float) -> tuple[str, int]:
    """Name and rows of a replay of so many windows."""
    rows = int(windows * config.sliding_window)
    return f"replay-{rows}", rows


def jobs(config: ModelConfig, quantised: Mapping[str, Path]) -> list[Job | AcceptanceJob]:
    """Every run, the longest first so that none of them is left alone at the end.

    `quantised`: engines by the name of their format, asked in the served setting.
    """
    both: tuple[Cache, ...] = ("cold", "warm")
    made: list[Job | AcceptanceJob] = [AcceptanceJob("float64")]
    for task in reversed(TASKS):
        made.append(Job(task, "exact", {"swa_bounded_replay": False}, caches=both))
        for windows in sorted(CURVE_WINDOWS, reverse=True):
            name, rows = replay_setting(config, windows)
            made.append(Job(task, name, {"replay_length": rows}, caches=both))
        served = {"replay_length": replay_setting(config, 1)[1]}
        for name, other in quantised.items():
            made.append(Job(task, name, served, engine=other))
        made += [Job(task, f"no-{name}", ablate=name) for name in ABLATIONS]
    made += [Job("arithmetic", "float64", {"dtype": "float64"}), AcceptanceJob("float32")]
    return made


def missing(
    engine: Path, out: Path, sizes: Sizes, quantised: Mapping[str, Path]
) -> list[Job | AcceptanceJob]:
    """The runs that have not all their files in `out`.

    Raises ValueError for questions that cannot be drawn, for a folder that cannot be written, for a
    quantised engine of another model, and for a file that holds no results or those of another
    engine or other questions: a page must not mix them.
    """
    if min(sizes.arithmetic, sizes.retrieval) < 2:
        raise ValueError(
            f"expected at least 2 questions of each kind, got {sizes.arithmetic} and "
            f"{sizes.retrieval}; raise the numbers"
        )
    check_lengths(*sizes.document_tokens)
    _check_folder(out)
    config = Engine.open(engine).config
    for name, other in quantised.items():
        _check_quantised(name, Engine.open(other), config)
    todo = []
    for job in jobs(config, quantised):
        paths = [out / name for name in job.files.values()]
        for path in filter(Path.exists, paths):
            _check_kept(path, job, engine, sizes)
        if not all(map(Path.exists, paths)):
            todo.append(job)
    return todo


def _check_folder(out: Path) -> None:
    there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise ValueError(
            f"expected a folder of results that can be written, got {out}; give --out another"
        )


def _check_quantised(name: str, engine: Engine, config: ModelConfig) -> None:
    if engine.config != config:
        raise ValueError(
            f"expected the configuration of the measured engine in {engine.path}, got another; "
            "build both from one checkpoint"
        )
    if engine.quantization != FORMATS[name]:
        raise ValueError(
            f"expected weights {FORMATS[name]} in {engine.path} for {name}, got "
            f"{dict(engine.quantization)}; give each format its own engine"
        )


def _check_kept(path: Path, job: Job | AcceptanceJob, engine: Path, sizes: Sizes) -> None:
    task: Task
    if isinstance(job, Job):
        task, engine = job.task, job.engine or engine
        made = compare.read(path)[1]
    else:
        task, made = "arithmetic", speculate.read(path)
    asked = _questions(sizes, task)
    wanted = {
        "engine": origin(engine, "cpu")["engine"],
        "seed": sizes.seed,
        "n": len(asked),
        "asked": digest([question.prompt for question in asked]),
        "max_tokens": sizes.max_tokens,
    }
    with reading(path, "results of a measurement", "remove the file"):
        settings = made["settings"]
        found = {
            "engine": settings["engine"],
            "seed": made["seed"],
            "n": made["n"],
            "asked": made["asked"],
            "max_tokens": settings.get("max_tokens", sizes.max_tokens),
        }
    if found != wanted:
        raise ValueError(
            f"expected results of {wanted} in {path}, got {found}; give --out another folder or "
            "remove the file"
        )


def measure(
    some: Sequence[Job | AcceptanceJob],
    engine: Path,
    out: Path,
    sizes: Sizes,
    *,
    device: str,
    workers: int,
) -> Iterator[tuple[Job | AcceptanceJob, str | None, float]]:
    """Run `some` jobs: each when it has ended, its error if it failed, its seconds."""
    out.mkdir(parents=True, exist_ok=True)
    one = partial(_run, engine=engine, out=out, sizes=sizes, device=device)
    if workers == 1:
        yield from map(one, some)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap_unordered(one, some)


def _run(
    job: Job | AcceptanceJob, *, engine: Path, out: Path, sizes: Sizes, device: str
) -> tuple[Job | AcceptanceJob, str | None, float]:
    if device != "cpu":
        torch.set_num_threads(1)
    started = time.monotonic()
    error = None
    try:
        for name, made in job.run(engine, sizes, device).items():
            partial_file = out / f"{name}.partial"
            partial_file.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n")
            partial_file.rename(out / name)
    except Exception as problem:  # the other runs are worth having
        error = f"{type(problem).__name__}: {problem}"
    return job, error, time.monotonic() - started


@lru_cache(maxsize=len(TASKS))
def _questions(sizes: Sizes, task: Task) -> list[Question]:
    return sizes.ask(task)


_PROMPTS: dict[tuple[Sizes, Task], list[Any]] = {}


def _encoded(model: InProcess, sizes: Sizes, task: Task) -> tuple[list[Question], list[Any]]:
    """Questions and their ids, once per process: every model has the same tokenizer."""
    asked = _questions(sizes, task)
    if (sizes, task) not in _PROMPTS:
        _PROMPTS[sizes, task] = [model.encode(question.prompt) for question in asked]
    return asked, _PROMPTS[sizes, task]


def _without_details(made: Report) -> Report:
    """A report small enough to commit: of its records only the first mistakes."""
    mistakes = [record for record in made["records"] if not record["correct"]]
    return made | {"records": mistakes[:_KEPT_MISTAKES]}


def _named_engine(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if name not in FORMATS or not path:
        raise argparse.ArgumentTypeError(
            f"expected FORMAT=DIR with one of {', '.join(FORMATS)}, got {text}"
        )
    return name, Path(path)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tinyflash.measure",
        description="Measure everything that docs/accuracy.md claims.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--engine", type=Path, required=True, help="engine directory with a tokenizer")
    add("--quantised", type=_named_engine, nargs="+", default=[], metavar="FORMAT=DIR",
        help="engines of the same model with weights in these formats")  # fmt: skip
    add("--out", type=Path, required=True, help="directory of the results; those there are kept")
    add("--arithmetic", type=int, default=1319, help="number of word problems")
    add("--retrieval", type=int, default=500, help="number of documents")
    add("--document-tokens", type=int, nargs=2, default=DOCUMENT_TOKENS, help="of retrieval")
    add("--seed", type=int, default=1, help="each seed draws other questions")
    add("--device", choices=devices.DEVICES, default="cpu", help="what computes")
    add("--workers", type=positive, default=1, help="processes that share the device")
    options = parser.parse_args(argv)
    sizes = Sizes(
        options.arithmetic, options.retrieval, options.seed, tuple(options.document_tokens)
    )
    try:
        devices.check(options.device)
        todo = missing(options.engine, options.out, sizes, dict(options.quantised))
        failed = 0
        for done, (job, error, seconds) in enumerate(
            measure(
                todo,
                options.engine,
                options.out,
                sizes,
                device=options.device,
                workers=options.workers,
            ),
            1,
        ):
            failed += error is not None
            what = ", ".join(job.files.values())
            print(f"{done}/{len(todo)} {what}: {error or 'done'} ({seconds:.0f} s)", flush=True)
    except (ValueError, OSError) as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("measure: interrupted; the same command goes on", file=sys.stderr)
        return 130
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
