"""What an answer follows."""

from __future__ import annotations

from llguidance import LLMatcher


class Grammar:
    """A guide compiled for one answer. `end_id` stands for the end of a complete text."""

    def __init__(self, prototype: LLMatcher, num_bytes: int, end_id: int) -> None:
        self._prototype = prototype
        self.num_bytes = num_bytes
        self.end_id = end_id

    def matcher(self) -> LLMatcher:
        """At the start of the answer."""
        return self._prototype.deep_copy()  # which shares the lexer
