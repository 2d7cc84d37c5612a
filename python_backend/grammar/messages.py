"""What the server and the process that tries guides out say to each other."""

from __future__ import annotations

from typing import NamedTuple

from llguidance import LLTokenizer

from python_backend.grammar.limits import COMPILE_SECONDS


class Setup(NamedTuple):
    """`end_id` stands for the end of a complete text, `reasoning_end` is the id of `</think>`.
    A guide may take so many `seconds` of processor time."""

    tokenizer_json: str
    vocab_size: int
    end_id: int
    reasoning_end: int | None
    seconds: float = COMPILE_SECONDS


class Tried(NamedTuple):
    """`grammar` as llguidance reads it, or why not. `num_bytes` and `seconds` of a processor are
    what it took. `late`: it had not ended when it should. `broken`: the guide may be good, but its
    fork ended in a way that nobody foresaw."""

    grammar: str
    problem: str
    num_bytes: int = 0
    seconds: float = 0.0
    late: bool = False
    broken: bool = False


def open_tokenizer(setup: Setup) -> LLTokenizer:
    """The library's view of the tokenizer; special tokens are no text."""
    return LLTokenizer(setup.tokenizer_json, n_vocab=setup.vocab_size, eos_token=setup.end_id)
