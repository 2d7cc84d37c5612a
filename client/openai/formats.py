"""Answers in the API's form, as they come or whole. A format takes the chunks of its answers in
order and knows neither where they come from nor how they are sent."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any, Protocol

from client.openai.answer_reader import AnswerReader
from client.openai.requests import Asked
from client.openai.tokens import CompletionLogProbs, Token, chat_log_probs, tokens_of
from client.protocol import FinishReason, GenerateChunk


class Choice(Protocol):
    """One answer among those of a response, by its index."""

    def take(self, chunk: GenerateChunk) -> dict[str, Any] | None:
        """What a streamed response carries of this chunk; None when it has nothing to show."""
        ...

    def whole(self) -> dict[str, Any]:
        """The answer, after its last chunk."""
        ...


class Format:
    """The response around its choices."""

    def __init__(self, id: str, model: str, asked: Asked, *, chat: bool) -> None:
        self.asked = asked
        self._id = id
        self._chat = chat
        self._model = model
        self._created = int(time.time())

    def choice(self, index: int) -> Choice:
        kind = _ChatChoice if self._chat else _CompletionChoice
        return kind(index, self.asked)

    def whole(self, choices: list[Choice], usage: dict[str, Any]) -> bytes:
        """The body of an answer that is not streamed."""
        made = {**self._head(""), "choices": [c.whole() for c in choices], "usage": usage}
        return json.dumps(made, ensure_ascii=False, separators=(",", ":")).encode("utf-8")

    def event(self, choice: dict[str, Any]) -> dict[str, Any]:
        """One streamed response; with usage asked for, all but the last say that they have none."""
        none = {"usage": None} if self.asked.include_usage else {}
        return {**self._head(".chunk"), "choices": [choice], **none}

    def usage_event(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._head(".chunk"), "choices": [], "usage": usage}

    def _head(self, chunk: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": f"chat.completion{chunk}" if self._chat else "text_completion",
            "created": self._created,
            "model": self._model,
        }


class _ChatChoice:
    def __init__(self, index: int, asked: Asked) -> None:
        self._index = index
        self._asked = asked
        self._reader = AnswerReader(reasons=asked.reasons, calls=asked.calls)
        self._begun = False
        self._text = {"reasoning": "", "content": ""}
        self._calls: list[dict[str, Any]] = []
        self._tokens: list[Token] = []
        self._finish: str | None = None

    def take(self, chunk: GenerateChunk) -> dict[str, Any] | None:
        last = chunk.finish_reason is not None
        delta = self._delta(chunk.text_output, last=last)
        tokens = tokens_of(chunk) if self._asked.log_probs else []
        self._tokens += tokens
        if last:
            called = chunk.finish_reason is FinishReason.STOP and self._calls
            self._finish = "tool_calls" if called else chunk.finish_reason
        if not self._begun:
            self._begun = True
            delta = {"role": "assistant", "content": "", **delta}
        elif not (delta or tokens or last):
            return None
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": chat_log_probs(tokens) if tokens else None,
            "finish_reason": self._finish,
        }

    def whole(self) -> dict[str, Any]:
        text = self._text
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text["content"] or (None if self._calls else ""),
            "refusal": None,
        }
        if self._asked.reasons:
            message["reasoning_content"] = text["reasoning"]
        if self._calls:
            message["tool_calls"] = self._calls
        return {
            "index": self._index,
            "message": message,
            "logprobs": chat_log_probs(self._tokens) if self._asked.log_probs else None,
            "finish_reason": self._finish,
        }

    def _delta(self, text: str, *, last: bool) -> dict[str, Any]:
        """What is new, also kept for the whole. Fragments of one call are one entry."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for piece in self._reader.feed(text, last=last):
            if piece.call < 0:
                name = "reasoning_content" if piece.kind == "reasoning" else "content"
                delta[name] = delta.get(name, "") + piece.text
                self._text[piece.kind] += piece.text
            elif self._asked.most_calls is not None and piece.call >= self._asked.most_calls:
                continue
            elif piece.kind == "name":
                made = {"id": f"call_{secrets.token_hex(12)}", "type": "function"}
                self._calls.append({**made, "function": {"name": piece.text, "arguments": ""}})
                function = {"name": piece.text, "arguments": ""}
                calls[piece.call] = {"index": piece.call, **made, "function": function}
            else:
                self._calls[piece.call]["function"]["arguments"] += piece.text
                entry = calls.setdefault(
                    piece.call, {"index": piece.call, "function": {"arguments": ""}}
                )
                entry["function"]["arguments"] += piece.text
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta


class _CompletionChoice:
    def __init__(self, index: int, asked: Asked) -> None:
        self._index = index
        self._asked = asked
        self._log_probs = CompletionLogProbs()
        self._text: list[str] = []
        self._tokens: list[Token] = []
        self._finish: str | None = None

    def take(self, chunk: GenerateChunk) -> dict[str, Any] | None:
        self._finish = chunk.finish_reason
        tokens = tokens_of(chunk) if self._asked.log_probs else []
        if not self._asked.stream:
            self._text.append(chunk.text_output)
            self._tokens += tokens
            return None
        if not (chunk.text_output or tokens or self._finish):
            return None
        return self._shown(chunk.text_output, tokens)

    def whole(self) -> dict[str, Any]:
        return self._shown("".join(self._text), self._tokens)

    def _shown(self, text: str, tokens: list[Token]) -> dict[str, Any]:
        return {
            "index": self._index,
            "text": text,
            "logprobs": self._log_probs.of(tokens) if self._asked.log_probs else None,
            "finish_reason": self._finish,
        }
