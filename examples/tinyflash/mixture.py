"""Training batches: conversations drawn by token share, tokenised, laid end to end.

A batch is ragged, as the network wants it: all tokens in one array, `query_start` the borders of
the conversations, so that each is a request of its own and sees nothing of its neighbours. A batch
is a function of (seed, index, sizes, stage) alone: training resumes at any index, and workers take
every n-th index without talking to each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import count
from random import Random
from types import MappingProxyType
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from examples.tinyflash import dialogue, tools
from examples.tinyflash.dialogue import Conversation
from examples.tinyflash.tokenizer import PAD_ID, encoder

Stage = Literal["short", "long"]
TaskName = Literal["arithmetic", "retrieval", "turns", "tools", "talk", "padding"]

# Shares of all tokens. A document's answers are a small part of its tokens, a problem's about half.
SHARES: Mapping[Stage, Mapping[TaskName, float]] = MappingProxyType(
    {
        "short": {
            "arithmetic": 0.35, "retrieval": 0.50, "turns": 0.08, "tools": 0.06, "talk": 0.01,
        },
        "long": {
            "arithmetic": 0.33, "retrieval": 0.55, "turns": 0.06, "tools": 0.05, "talk": 0.01,
        },
    }
)  # fmt: skip
MIN_DOCUMENT_TOKENS = 192
# A conversation is dropped when it does not fit; after this many in a row, and when less than the
# longest conversation is left, the rest is padding.
_MISFITS = 3


class Example(NamedTuple):
    """One conversation. `mask[t]`: the model writes token t, so predicting it counts."""

    tokens: npt.NDArray[np.int32]  # [n]
    mask: npt.NDArray[np.bool_]  # [n]


class Batch(NamedTuple):
    """Conversations end to end, R of them, T tokens in all.

    `mask[t]` asks for the loss of predicting token t from the tokens before it in its conversation;
    it is never set on a conversation's first token. The last conversation is padding when the
    others do not fill the batch; its mask is empty.
    """

    tokens: npt.NDArray[np.int32]  # [T]
    mask: npt.NDArray[np.bool_]  # [T]
    query_start: npt.NDArray[np.int32]  # [R + 1]
    tasks: tuple[TaskName, ...]  # [R]


def tokenise(conversation: Conversation) -> Example:
    """Ids and loss mask: set exactly on what the model writes, end-of-sentence included."""
    ids: list[int] = []
    lengths: list[int] = []
    segments = conversation.segments()
    for segment in segments:
        part = encoder().encode(segment.text)
        ids += part
        lengths.append(len(part))
    mask = np.repeat([segment.generated for segment in segments], lengths)
    return Example(np.array(ids, np.int32), mask)


def draw(task: TaskName, rng: Random, max_tokens: int) -> Conversation:
    """One conversation of a task. `max_tokens` bounds documents, whose lengths are log-uniform;
    other conversations are as long as they are."""
    if task == "arithmetic":
        return dialogue.one_problem(rng)
    if task == "retrieval":
        low = min(MIN_DOCUMENT_TOKENS, max_tokens)
        return dialogue.one_document(
            rng, int(low * math.exp(rng.random() * math.log(max_tokens / low)))
        )
    if task == "turns":
        return dialogue.several_turns(rng)
    return tools.tool_conversation(rng) if task == "tools" else dialogue.small_talk(rng)


def make_batch(seed: int, index: int, tokens_per_batch: int, seq_len: int, stage: Stage) -> Batch:
    """Batch `index` of a run: `tokens_per_batch` tokens in conversations of up to `seq_len`.

    Each next conversation is of the task that is furthest below its share. Raises ValueError when
    the sizes leave no room for the shortest conversations.
    """
    if not 512 <= seq_len <= tokens_per_batch:
        raise ValueError(
            f"expected 512 <= seq_len <= tokens_per_batch, got seq_len {seq_len} and "
            f"tokens_per_batch {tokens_per_batch}; raise them"
        )
    rng = Random(f"batch {seed} {index}")
    shares = SHARES[stage]
    given = dict.fromkeys(shares, 0)
    examples: list[Example] = []
    tasks: list[TaskName] = []
    room = tokens_per_batch
    misfits = 0
    while room >= seq_len or (misfits < _MISFITS and room > 0):
        limit = min(seq_len, room)
        task = min(shares, key=lambda name: given[name] / shares[name])
        if task == "retrieval" and limit < MIN_DOCUMENT_TOKENS:
            task = "arithmetic"
        example = tokenise(draw(task, rng, limit))
        if len(example.tokens) > limit:
            misfits += 1
            continue
        misfits = 0
        examples.append(example)
        tasks.append(task)
        given[task] += len(example.tokens)
        room -= len(example.tokens)
    if room:
        examples.append(Example(np.full(room, PAD_ID, np.int32), np.zeros(room, np.bool_)))
        tasks.append("padding")
    lengths = [len(example.tokens) for example in examples]
    return Batch(
        np.concatenate([example.tokens for example in examples]),
        np.concatenate([example.mask for example in examples]),
        np.cumsum([0, *lengths], dtype=np.int32),
        tuple(tasks),
    )


def batches(
    seed: int,
    tokens_per_batch: int,
    seq_len: int,
    stage: Stage,
    *,
    first: int = 0,
    step: int = 1,
) -> Iterator[Batch]:
    """Batches `first`, `first + step`, … without end. Worker w of n takes first = w, step = n."""
    for index in count(first, step):
        yield make_batch(seed, index, tokens_per_batch, seq_len, stage)
