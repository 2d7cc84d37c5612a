"""Grammars of TinyFlash's tokenizer for tests, and answers drawn from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from python_backend.generation.rows import LogitRows
from python_backend.grammar.bitmask import Words
from python_backend.grammar.grammar import Grammar
from python_backend.grammar.masks import GrammarMasks
from python_backend.grammar.messages import Setup
from python_backend.text.tokenizer import TextTokenizer

CHECKPOINT = Path(__file__).resolve().parents[2] / "examples" / "tinyflash" / "checkpoint"
VOCAB, END = 4096, 1


def tinyflash_text() -> TextTokenizer:
    return TextTokenizer.from_file(CHECKPOINT / "tokenizer.json", VOCAB, 0)


def setup_of(text: TextTokenizer, vocab_size: int = VOCAB, seconds: float = 20.0) -> Setup:
    return Setup(text.to_json(), vocab_size, END, text.token_id("</think>"), seconds)


def rows_of(slots: list[int], drafts: list[list[int]] | None = None) -> LogitRows:
    """Rows of the slots, each behind its drafts."""
    drafts = drafts or [[] for _ in slots]
    return LogitRows.of_step(
        np.array(slots, dtype=np.int64),
        np.zeros(len(slots), dtype=np.int64),
        np.array([token for one in drafts for token in one], dtype=np.int32),
        np.array([len(one) for one in drafts], dtype=np.int64),
    )


def tokens_of(mask: Words) -> list[int]:
    """One row's tokens."""
    found: list[int] = np.flatnonzero(
        np.unpackbits(mask.view(np.uint8), bitorder="little")
    ).tolist()
    return found


def accepts(grammar: Grammar, text: TextTokenizer, answer: str) -> bool:
    """Whether the whole answer is a complete text."""
    matcher = grammar.matcher()
    ids = text.encode_word(answer)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def drawn_ids(grammar: Grammar, rng: np.random.Generator, most: int = 400) -> list[int] | None:
    """A random walk through what is allowed, None when it does not end."""
    masks = GrammarMasks(VOCAB, END, 1)
    masks.begin(0, grammar, np.empty(0, np.int32))
    ids: list[int] = []
    while len(ids) < most:
        token = int(rng.choice(tokens_of(masks.masks(rows_of([0]))[0])))
        if token == END:
            return ids
        ids.append(token)
        masks.append(np.array([0]), np.array([[token]], dtype=np.int32), np.array([1]))
    return None


def text_of(ids: list[int], text: TextTokenizer) -> str:
    """What an answer of these tokens says."""
    return text.detokenizer().feed(np.array(ids, dtype=np.int32), last=True)


def drawn_answer(
    grammar: Grammar, text: TextTokenizer, rng: np.random.Generator, most: int = 400
) -> str | None:
    """The text of a random walk, None when it does not end."""
    ids = drawn_ids(grammar, rng, most)
    return None if ids is None else text_of(ids, text)
