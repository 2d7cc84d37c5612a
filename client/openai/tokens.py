"""Tokens and their log probabilities, and counts of tokens, in the API's forms."""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from typing import Any, NamedTuple

from client.protocol import GenerateChunk, PromptTokens


class Token(NamedTuple):
    """One token and its alternatives, most probable first; a prompt's first has neither."""

    spelled: bytes
    log_prob: float | None
    top: list[tuple[bytes, float]]


def tokens_of(chunk: GenerateChunk) -> list[Token]:
    """The prompt's tokens, where they are shown, and the chunk's; none where no log probabilities
    came."""
    tokens = []
    if chunk.prompt is not None and chunk.prompt.token_bytes:
        first, *others = chunk.prompt.token_bytes
        tokens = [Token(first, None, []), *_tokens(others, chunk.prompt)]
    return tokens + _tokens(chunk.token_bytes or [], chunk)


def _tokens(spelled: list[bytes], said: GenerateChunk | PromptTokens) -> list[Token]:
    if said.log_probs is None:
        return []
    tops = [[]] * len(spelled) if said.top_log_probs is None else said.top_log_probs.tolist()
    names = iter(said.top_token_bytes or ())
    return [
        Token(own, log_prob, [(next(names), value) for value in top])
        for own, log_prob, top in zip(spelled, said.log_probs.tolist(), tops, strict=True)
    ]


def text_of(spelled: bytes) -> str:
    """A token as text; bytes that are no character by themselves as \\xNN."""
    return spelled.decode("utf-8", errors="backslashreplace")


def chat_log_probs(tokens: list[Token]) -> dict[str, Any]:
    def entry(spelled: bytes, log_prob: float | None) -> dict[str, Any]:
        return {"token": text_of(spelled), "logprob": log_prob, "bytes": list(spelled)}

    return {
        "content": [
            {
                **entry(token.spelled, token.log_prob),
                "top_logprobs": [entry(*alternative) for alternative in token.top],
            }
            for token in tokens
        ],
        "refusal": None,
    }


class CompletionLogProbs:
    """The completions' form, whose offsets count characters from the text's beginning."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = 0

    def of(self, tokens: list[Token]) -> dict[str, Any]:
        """The chosen token is among the alternatives, as the API has it."""
        return {
            "tokens": [text_of(token.spelled) for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            "top_logprobs": [
                None
                if token.log_prob is None
                else {text_of(spelled): value for spelled, value in token.top}
                | {text_of(token.spelled): token.log_prob}
                for token in tokens
            ],
            "text_offset": list(self._offsets(tokens)),
        }

    def _offsets(self, tokens: list[Token]) -> Iterator[int]:
        for token in tokens:
            yield self._offset
            self._offset += len(self._decoder.decode(token.spelled))


class Counts:
    """Tokens of one HTTP request, over all its prompts and choices."""

    def __init__(self) -> None:
        self.prompt = self.cached = self.output = self.accepted = 0

    def add(self, chunk: GenerateChunk) -> None:
        """Every chunk once. Of several answers to one prompt the first counts it."""
        if not chunk.sequence_index:
            self.cached += chunk.cached_tokens or 0
            self.prompt += chunk.num_input_tokens or 0
        self.output += int(chunk.output_ids.size)
        self.accepted += chunk.num_accepted_drafts or 0

    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.output,
            "total_tokens": self.prompt + self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"accepted_prediction_tokens": self.accepted},
        }
