"""TinyFlash on the GPU's executor against the float64 reference, token by token.

The reference answers held-out questions greedily on its own; the others are led along its
answers and asked for their choice behind every token: prompts through prefill, answers through
decode steps, in the batches that the scheduler makes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from builder.checkpoint import Checkpoint
from engine.config import ModelConfig
from engine.network import Network, load_weights
from engine.network.device import moved
from examples.tinyflash.evaluation import ANSWER_TOKENS, Task, questions
from examples.tinyflash.scoring import Question, compare, is_correct
from examples.tinyflash.tokenizer import EOS_ID
from python_backend.core import EngineCore
from python_backend.executor.cuda_executor import CudaExecutor
from python_backend.executor.pools import pools_of
from python_backend.executor.torch_executor import PagedExecutor, TorchExecutor
from python_backend.generation.rows import LogitRows
from python_backend.generation.sampler import Choice
from python_backend.request import Delta, Request, SamplingParams
from python_backend.settings import CoreLimits, ServeSettings
from python_backend.step_plan import StepPlan, StepResult
from python_backend.text.chat_input import ChatRequest
from python_backend.text.tokenizer import TextTokenizer

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "tinyflash" / "checkpoint"
SEED = 4711
_MEMORY = 8 << 30
# Prompt and answer, at the most.
_LONGEST: dict[Task, int] = {"arithmetic": 1024, "retrieval": 9216}

Int32Array = npt.NDArray[np.int32]
Answers = dict[int, list[int]]
Place = tuple[int, int]  # question, place in its answer


class Led(PagedExecutor):
    """Keeps the logits of every choice, and makes the choices of `lead` where it has them."""

    lead: Mapping[int, Sequence[int]] = {}
    logits: dict[Place, torch.Tensor]
    _questions: dict[int, int]

    def run(self, plan: StepPlan) -> StepResult:
        seeds = plan.sampling.seed.tolist()
        self._questions = dict(zip(plan.slots.tolist(), seeds, strict=True))
        return super().run(plan)

    def _choose(self, logits: torch.Tensor, rows: LogitRows) -> Choice:
        own = super()._choose(logits, rows)
        kept = logits.to(torch.float32, copy=True)  # a graph's result lives until its next replay
        tokens = own.tokens.copy()
        places = zip(rows.slots.tolist(), rows.output_index.tolist(), strict=True)
        for row, (slot, index) in enumerate(places):
            question = self._questions[slot]
            self.logits[question, index] = kept[row]
            if question in self.lead:
                tokens[row] = self.lead[question][index]
        return own._replace(tokens=tokens)


class LedTorch(Led, TorchExecutor):
    """The reference's."""


class LedCuda(Led, CudaExecutor):
    """The GPU's."""


def limits_of(config: ModelConfig, task: Task, count: int, *, drafts: int) -> CoreLimits:
    longest = _LONGEST[task]
    settings = ServeSettings(
        max_batch_size=count,
        max_num_tokens=4096,
        max_seq_len=longest,
        num_global_pages=1 + count * longest // (2 * config.sliding_window),
        speculative=drafts > 0,
        num_speculative_tokens=drafts or None,
    )
    return settings.resolve(config, _MEMORY)


def network_of(dtype: torch.dtype, device: str, *, packed: bool) -> Network:
    checkpoint = Checkpoint.open(CHECKPOINT)
    classes, _ = checkpoint.token_class(None)
    weights = load_weights(checkpoint.config, checkpoint.source, classes, dtype, packed=packed)
    return Network(checkpoint.config, moved(weights, device))


def executor_of(
    kind: type[Led], network: Network, limits: CoreLimits, device: str, **options: Any
) -> Led:
    pools = pools_of(network.config, limits, network.dtype, device)
    given = (network, pools, limits) if kind is LedCuda else (network, pools)
    executor: Led = kind(*given, device=device, **options)
    executor.logits = {}
    return executor


def answer(executor: Led, limits: CoreLimits, prompts: Sequence[Int32Array]) -> Answers:
    """Greedy answers to all prompts at once, by question; its end token is the last of each."""
    core, made = EngineCore(executor, limits), Answers()

    def receiver(question: int) -> Callable[[Delta], None]:
        made[question] = []

        def take(delta: Delta) -> None:
            if delta.error is not None:
                raise delta.error
            made[question] += delta.output_ids.tolist()

        return take

    for question, prompt in enumerate(prompts):
        core.add_request(
            Request(
                request_id=str(question),
                input_ids=prompt,
                max_tokens=ANSWER_TOKENS,
                sampling=SamplingParams(seed=question),
                end_ids=frozenset({EOS_ID}),
                on_delta=receiver(question),
            )
        )
    while core.has_work:
        core.step()
    return made


def prompt_of(question: Question, text: TextTokenizer) -> Int32Array:
    chat = ChatRequest([{"role": "user", "content": question.prompt}])
    return text.encode_rendered(chat.render())


def right(some: Sequence[Question], answers: Answers, text: TextTokenizer) -> list[bool]:
    """Whether each answer, its end token left out, is right."""

    def said(tokens: Sequence[int]) -> str:
        return text.detokenizer().feed(np.array(tokens[:-1], dtype=np.int32), last=True)

    return [is_correct(one, said(answers[i])) for i, one in enumerate(some)]


def agreement(device: str, task: Task, count: int) -> list[dict[str, Any]]:
    """One row for each way to compute: the share of equal choices, and what the others are.

    Documents are about their long prompts: graphs and drafts are compared on word problems only.
    """
    started = time.monotonic()
    network = network_of(torch.float64, device, packed=False)
    config = network.config
    text = TextTokenizer.from_file(
        CHECKPOINT / "tokenizer.json", config.vocab_size, config.bos_token_id
    )
    some = questions(task, count, SEED)
    prompts = [prompt_of(one, text) for one in some]
    limits = limits_of(config, task, count, drafts=0)
    reference = executor_of(LedTorch, network, limits, device)
    truth = answer(reference, limits, prompts)
    correct = right(some, truth, text)
    rows: list[dict[str, Any]] = [
        {
            "row": "agreement",
            "task": task,
            "dtype": "float64",
            "questions": count,
            "tokens": sum(map(len, truth.values())),
            "right": sum(correct),
            "seconds": round(time.monotonic() - started, 1),
        }
    ]
    ways = [(torch.bfloat16, True, 0), (torch.float32, True, 0)]
    if task == "arithmetic":
        ways[1:1] = [(torch.bfloat16, False, 0), (torch.bfloat16, True, config.dspark_block_size)]
    for dtype, graphs, block in ways:
        started = time.monotonic()
        graphs = graphs and device != "cpu"
        mine = network_of(dtype, device, packed=True)
        bounds = limits_of(mine.config, task, count, drafts=block)
        led = executor_of(LedCuda, mine, bounds, device, graphs=graphs)
        led.lead = {i: [*tokens, *[EOS_ID] * (1 + block)] for i, tokens in truth.items()}
        assert answer(led, bounds, prompts) == truth
        row = {"row": "agreement", "task": task, "dtype": str(dtype).removeprefix("torch.")}
        row |= {"graphs": graphs, "drafts": block} | compared(reference.logits, led.logits, truth)
        row["num_graphs"] = led.num_graphs if isinstance(led, LedCuda) else 0
        if graphs:
            free = executor_of(LedCuda, mine, bounds, device, graphs=graphs)
            own = right(some, answer(free, bounds, prompts), text)
            row |= {"right": sum(own), "paired": compare(correct, own)._asdict()}
        rows.append(row | {"seconds": round(time.monotonic() - started, 1)})
    return rows


def compared(
    reference: Mapping[Place, torch.Tensor], led: Mapping[Place, torch.Tensor], truth: Answers
) -> dict[str, Any]:
    """A difference is a near tie where the reference's own logits of the two tokens differ by less
    than twice the largest error of a logit in that row."""
    places = [(q, i) for q, tokens in truth.items() for i in range(len(tokens))]
    expected = torch.stack([reference[place] for place in places])
    found = torch.stack([led[place] for place in places])
    first, second = expected.topk(2, dim=-1).values.unbind(-1)
    chosen = expected.argmax(-1)
    other = found.argmax(-1)
    differs = other != chosen
    gap = first - expected.gather(-1, other[:, None]).squeeze(-1)
    error = (found - expected).abs().amax(-1)
    gaps = gap[differs].sort(descending=True).values
    return {
        "tokens": len(places),
        "agreement": round(1 - float(differs.double().mean()), 6),
        "differing": int(differs.sum()),
        "near_ties": int((gap[differs] < 2 * error[differs]).sum()),
        "largest_gaps": [round(float(x), 3) for x in gaps[:5]],
        "median_margin": round(float((first - second).median()), 3),
        "logit_error": float(f"{float((found - expected).norm() / expected.norm()):.3e}"),
    }
