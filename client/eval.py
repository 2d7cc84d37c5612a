"""Accuracy of a deployment: asks TinyFlash's held-out questions and scores the answers.

The questions, their scoring and the report belong to `examples/tinyflash` of a checkout, which is
imported when it is needed; the installed client alone has none.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from client.protocol import GenerateRequest

if TYPE_CHECKING:
    from client.grpc import GrpcClient

Progress = Callable[[str], None]

_CHECKOUT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Evaluation:
    """What to ask: `limit` questions of `task`, drawn by `seed`, greedy.

    document_tokens: least and most tokens of a retrieval question; None: the task's own.
    max_tokens: most tokens of an answer; None: the task's own.
    """

    task: str
    limit: int
    seed: int
    concurrency: int = 8
    thinking: bool = False
    document_tokens: tuple[int, int] | None = None
    max_tokens: int | None = None


def held_out() -> Any:
    """The module `examples.tinyflash.evaluation`. Raises ValueError where there is none."""
    if (_CHECKOUT / "examples" / "tinyflash").is_dir() and str(_CHECKOUT) not in sys.path:
        sys.path.append(str(_CHECKOUT))
    try:
        return importlib.import_module("examples.tinyflash.evaluation")
    except ImportError as error:
        raise ValueError(
            "expected the held-out questions in examples/tinyflash beside the client, got "
            f"{error}; run eval from a checkout of the project, in its environment"
        ) from None


def run(client: GrpcClient, asked: Evaluation, progress: Progress) -> tuple[dict[str, Any], str]:
    """The report, ready for JSON, and its table.

    Raises DeploymentError as soon as one question gets no answer: the rest would be another set.
    ValueError for a set that cannot be made.
    """
    module = held_out()
    questions = module.questions(asked.task, asked.limit, asked.seed, asked.document_tokens)
    max_tokens = asked.max_tokens or module.ANSWER_TOKENS

    def answer(question: Any) -> Any:
        result = client.generate(
            GenerateRequest(
                messages=[{"role": "user", "content": question.prompt}],
                thinking=asked.thinking or None,
                max_tokens=max_tokens,
                temperature=0.0,
            )
        )
        return module.Answer(
            text=result.text_output,
            finish_reason=str(result.finish_reason),
            num_input_tokens=result.num_input_tokens,
            cached_tokens=result.cached_tokens,
            num_output_tokens=result.num_output_tokens,
        )

    started = time.monotonic()
    pool = ThreadPoolExecutor(asked.concurrency, thread_name_prefix="eval")
    try:
        futures = [pool.submit(answer, question) for question in questions]
        for done, future in enumerate(as_completed(futures), 1):
            future.result()
            rate = done / (time.monotonic() - started)
            progress(f"{done} of {len(futures)} questions answered, {rate:.1f}/s")
    finally:
        # After a failure the running calls end when the caller closes the client.
        pool.shutdown(wait=False, cancel_futures=True)
    made = module.report(
        questions,
        [future.result() for future in futures],
        seed=asked.seed,
        settings={"thinking": asked.thinking, "concurrency": asked.concurrency},
        seconds=time.monotonic() - started,
    )
    return made, module.table(made)
