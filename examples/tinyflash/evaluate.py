"""Accuracy of an engine on held-out questions, inside one process.

    python -m examples.tinyflash.evaluate --engine DIR --task arithmetic --limit 1319 \\
        --json base.json
    python -m examples.tinyflash.evaluate --engine DIR --task arithmetic --limit 1319 \\
        --no-swa-bounded-replay --json exact.json --compare base.json

Asks the questions that `dsv41-client eval` asks, on the same serving core, without a server and on
a GPU where there is one. `--warm` asks each question after its prompt was put into the prefix
cache, so that every answer follows a hit and its replay. `--ablate` is a diagnostic.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.tinyflash import compare
from examples.tinyflash.ablations import ABLATIONS, ablated
from examples.tinyflash.device import DEVICES
from examples.tinyflash.evaluation import (
    ANSWER_TOKENS,
    DOCUMENT_TOKENS,
    TASKS,
    Answer,
    Report,
    digest,
    questions,
    report,
    table,
)
from examples.tinyflash.in_process import InProcess, Int32Array, origin


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        compare.check_outputs(arguments.json, arguments.plot)
        others = [compare.read(path) for path in arguments.compare]
        made = evaluate(arguments, [report for _, report in others])
        print(table(made))
        if arguments.json:
            arguments.json.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n")
        runs = [*others, (arguments.json.stem if arguments.json else "this run", made)]
        if others:
            print(f"\n{compare.table(runs)}")
        if arguments.plot:
            compare.plot(runs, arguments.plot)
    except (ValueError, OSError) as error:  # every refusal of engine, settings, questions is one
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("evaluate: interrupted", file=sys.stderr)
        return 130
    return 0


def evaluate(arguments: argparse.Namespace, others: Sequence[Report] = ()) -> Report:
    """Ask and score. Raises ValueError with one sentence for what cannot be asked, and when one of
    the `others` answers other questions."""
    lengths = None if arguments.document_tokens is None else tuple(arguments.document_tokens)
    asked = questions(arguments.task, arguments.limit, arguments.seed, lengths)
    for other in others:
        prompts_asked = digest([question.prompt for question in asked])
        compare.check_questions(other, arguments.task, prompts_asked)
    options: dict[str, Any] = {
        "dtype": arguments.dtype,
        "swa_bounded_replay": not arguments.no_swa_bounded_replay,
        "replay_length": arguments.replay_length,
    }
    with ablated(arguments.ablate):
        model = InProcess(arguments.engine, options, arguments.device)
        try:
            prompts = [model.encode(q.prompt, thinking=arguments.thinking) for q in asked]
            started = time.monotonic()
            answers = list(
                _answers(model, prompts, max_tokens=arguments.max_tokens, warm=arguments.warm)
            )
            seconds = time.monotonic() - started
        finally:
            model.close()
    settings = (
        options
        | origin(arguments.engine, arguments.device)
        | {
            "thinking": arguments.thinking,
            "warm": arguments.warm,
            "ablate": arguments.ablate,
        }
    )
    return report(asked, answers, seed=arguments.seed, settings=settings, seconds=seconds)


def _answers(
    model: InProcess, prompts: Sequence[Int32Array], *, max_tokens: int, warm: bool
) -> Iterator[Answer]:
    """All at once; with `warm`, as many at a time as certainly find their prompts again."""
    size = model.max_batch_size if warm else len(prompts)
    done = 0
    for first in range(0, len(prompts), size):
        some = prompts[first : first + size]
        if warm:
            deque(model.answers(some, max_tokens=1), maxlen=0)
        for answer in model.answers(some, max_tokens=max_tokens):
            yield answer
            done += 1
            if done % 50 == 0:
                print(f"{done} of {len(prompts)} answered", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m examples.tinyflash.evaluate",
        description="Ask an engine held-out questions inside this process, and score the answers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--engine", type=Path, required=True, help="engine directory with a tokenizer")
    add("--task", choices=TASKS, required=True)
    add("--limit", type=int, default=200, help="number of questions")
    add("--seed", type=int, default=0, help="each seed draws other questions")
    add("--document-tokens", type=int, nargs=2, metavar=("LEAST", "MOST"),
        help="of retrieval, {} to {}".format(*DOCUMENT_TOKENS))  # fmt: skip
    add("--max-tokens", type=int, default=ANSWER_TOKENS, help="most tokens of an answer")
    add("--thinking", action="store_true", help="reason before answering")
    add("--device", choices=DEVICES, default="cpu")
    add("--dtype", default="float32", help="float32, bfloat16 or float64")
    add("--no-swa-bounded-replay", action="store_true", help="the exact mode")
    add("--replay-length", type=int, help="rows replayed, from 0 on; one window if left out")
    add("--warm", action="store_true", help="ask each question after a prefix hit on its prompt")
    add("--ablate", choices=tuple(ABLATIONS), help="diagnostic: without this mechanism")
    add("--json", type=Path, metavar="FILE", help="write the report here")
    add("--compare", type=Path, nargs="+", default=[], metavar="REPORT",
        help="reports on the same questions; differences are from the first")  # fmt: skip
    add("--plot", type=Path, metavar="FILE", help="draw the accuracies of all these runs")
    return parser


if __name__ == "__main__":
    sys.exit(main())
