"""A chat request as it comes from outside: JSON, judged before anything renders it.

Messages have the fields that `python_backend.text.chat` describes, and no others: a field that
would be ignored is refused, as everywhere on the wire. Every refusal is a ChatError with one
sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from engine.chat_sections import ChatSections
from python_backend.text import chat

# 855,040 tokens, the longest prompt of the released model, are about 4 MB of text.
MAX_JSON_BYTES = 16 * 2**20

_FIELDS = {
    "system": {"role", "content", "response_format"},
    "user": {"role", "content"},
    "assistant": {"role", "content", "reasoning_content", "tool_calls"},
    "tool": {"role", "content", "tool_call_id"},
}


class ChatError(ValueError):
    """A chat request that cannot be rendered."""


@dataclass(frozen=True)
class ChatRequest:
    """A conversation that ends where the assistant answers, and how to render it."""

    messages: Sequence[chat.Message]
    tools: Sequence[chat.Tool] = ()
    thinking: bool = False
    effort: int = chat.DEFAULT_EFFORT

    @staticmethod
    def read(
        messages: str, *, tools: str | None, thinking: bool, reasoning_effort: str | None
    ) -> ChatRequest:
        """From the wire: `messages` and `tools` as JSON lists, the effort a level or a number.

        Raises ChatError.
        """
        if reasoning_effort is not None and not thinking:
            raise ChatError(
                f"expected no reasoning_effort without thinking, got {reasoning_effort!r}; set "
                "thinking to true or leave it out"
            )
        return ChatRequest(
            _messages(_json_list("messages", messages)),
            () if tools is None else _tools(_json_list("tools", tools)),
            thinking,
            chat.DEFAULT_EFFORT if reasoning_effort is None else _effort(reasoning_effort),
        )

    def render(self, sections: ChatSections = chat.OWN_SECTIONS) -> str:
        """The prompt, special strings included. Those inside a content are special too, as in the
        released encoder. Raises ChatError for turns in an order that cannot be rendered."""
        mode: chat.Mode = "thinking" if self.thinking else "chat"
        try:
            return chat.render(
                self.messages, mode=mode, effort=self.effort, tools=self.tools, sections=sections
            )
        except RecursionError:
            raise _too_deep("arguments and tools") from None
        except ValueError as error:
            raise ChatError(str(error)) from None


def _json_list(name: str, text: str) -> list[Any]:
    size = len(text.encode("utf-8"))
    if size > MAX_JSON_BYTES:
        raise ChatError(
            f"expected {name} of at most {MAX_JSON_BYTES} bytes, got {size}; shorten the "
            "conversation"
        )
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise _too_deep(name) from None
    except UnicodeEncodeError:
        raise ChatError(
            f"expected {name} of valid Unicode, got a lone surrogate; remove the \\ud800 … \\udfff"
        ) from None
    except ValueError as error:
        raise ChatError(f"expected {name} as a JSON list, but {error}; correct the JSON") from None
    if not isinstance(value, list) or not value:
        kind = "an empty list" if value == [] else _kind(value)
        raise ChatError(
            f"expected {name} as a JSON list of at least one object, got {kind}; send a list"
        )
    return value


def _too_deep(name: str) -> ChatError:
    return ChatError(f"expected {name} as JSON, got one nested too deeply; flatten it")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _messages(values: list[Any]) -> list[chat.Message]:
    call_ids: set[str] = set()
    for index, message in enumerate(values):
        where = f"messages[{index}]"
        role = _object(where, message).get("role")
        if not isinstance(role, str) or role not in _FIELDS:
            raise ChatError(
                f'expected {where}.role to be "system", "user", "assistant" or "tool", got '
                f"{_shown(role)}; rename it"
            )
        _only(where, message, _FIELDS[role], f"{role} message")
        if role == "assistant":
            call_ids = _assistant(where, message)
        else:
            _string(f"{where}.content", message.get("content"))
        if message.get("response_format") is not None:
            _object(f"{where}.response_format", message["response_format"])
        if role == "tool" and _string(f"{where}.tool_call_id", message.get("tool_call_id")) not in (
            call_ids
        ):
            raise ChatError(
                f"expected {where}.tool_call_id to be the id of a call in the assistant message "
                f"before it, got {_shown(message['tool_call_id'])}; use the id of that call"
            )
    if values[-1]["role"] == "assistant":
        raise ChatError(
            "expected the last message to be the user's, the system's or a tool's, got an "
            "assistant message; add what it shall answer"
        )
    return values


def _assistant(where: str, message: Mapping[str, Any]) -> set[str]:
    """The ids of its calls."""
    if message.get("reasoning_content") is not None:
        _string(f"{where}.reasoning_content", message["reasoning_content"])
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise ChatError(f"expected {where}.tool_calls as a list, got {_kind(calls)}; send a list")
    if message.get("content") is not None or not calls:
        _string(f"{where}.content", message.get("content"))
    return {_call(f"{where}.tool_calls[{place}]", call) for place, call in enumerate(calls)}


def _call(where: str, call: Any) -> str:
    _only(where, _object(where, call), {"id", "type", "function"}, "tool call")
    function = _object(f"{where}.function", call.get("function"))
    _only(f"{where}.function", function, {"name", "arguments"}, "called function")
    _string(f"{where}.function.name", function.get("name"))
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        raise ChatError(
            f"expected {where}.function.arguments as a JSON object, got "
            f"{_shown(function.get('arguments'))}; send the arguments by name"
        )
    return _string(f"{where}.id", call.get("id"))


def _tools(values: list[Any]) -> list[chat.Tool]:
    names: dict[str, int] = {}
    for index, tool in enumerate(values):
        where = f"tools[{index}]"
        if _object(where, tool).get("type") != "function":
            raise ChatError(
                f'expected {where}.type to be "function", got {_shown(tool.get("type"))}; this '
                "version has no other"
            )
        function = _object(f"{where}.function", tool.get("function"))
        name = _string(f"{where}.function.name", function.get("name"))
        if names.setdefault(name, index) != index:
            raise ChatError(
                f"expected tools of different names, got {_shown(name)} in {where} and in "
                f"tools[{names[name]}]; rename one"
            )
    return values


def _effort(text: str) -> int:
    """A level's name, or a whole number from 1 to 100."""
    level = chat.EFFORT_LEVELS.get(text)
    if level is not None:
        return level
    if text.isascii() and text.isdecimal() and len(text) <= 3 and 1 <= int(text) <= 100:
        return int(text)
    raise ChatError(
        f"expected reasoning_effort to be {', '.join(chat.EFFORT_LEVELS)} or a whole number from 1 "
        f"to 100, got {_shown(text)}; choose one"
    )


def _object(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ChatError(f"expected {where} as a JSON object, got {_kind(value)}; send an object")
    return value


def _string(where: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ChatError(f"expected {where} as a string, got {_kind(value)}; send text")
    return value


def _only(where: str, value: Mapping[str, Any], known: set[str], what: str) -> None:
    unknown = [name for name in value if name not in known]
    if unknown:
        raise ChatError(
            f"expected {where} with the fields of a {what} ({', '.join(sorted(known))}), got "
            f"{_shown(unknown[0])}; remove it"
        )


def _kind(value: Any) -> str:
    """What came, in JSON's words."""
    if value is None:
        return "nothing"
    kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}
    return kinds.get(type(value), "a number")


def _shown(value: Any) -> str:
    """A value of the request, short enough for a sentence."""
    if isinstance(value, str):
        return json.dumps(value[:40], ensure_ascii=False)
    return _kind(value)
