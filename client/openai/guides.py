"""The form of an answer as the API asks for it, and as the deployment has it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from client.openai.errors import ApiError, refused
from client.openai.fields import ChatFields, NamedTool, Sampling
from client.openai.forced_calls import grammar_of_calls


class Guide(NamedTuple):
    """As guided_decoding_guide_type and guided_decoding_guide."""

    kind: str
    text: str | None


def guide_of(fields: Sampling) -> Guide | None:
    """From response_format, structured_outputs or a tool_choice that forces calls; None for an
    answer of any form. Raises ApiError for two of them."""
    chat = fields if isinstance(fields, ChatFields) else None
    found = [
        guide
        for guide in (
            None if chat is None else _of_response_format(chat),
            _of_structured_outputs(fields),
        )
        if guide is not None
    ]
    if len(found) > 1:
        raise refused("structured_outputs", "response_format says another form; send one of them")
    if chat is None or not chat.tools or chat.tool_choice == "none":
        return found[0] if found else None
    if found:
        raise refused(
            "tools", "an answer of a given form calls none; send tool_choice none or no form"
        )
    return _of_tool_choice(chat)


def told_schema(fields: ChatFields) -> Mapping[str, Any] | None:
    """The schema that response_format asks for, which the model's prompt has a place for."""
    form = fields.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object" or form.json_schema is None:
        return {"type": "object"}
    return form.json_schema.schema_


def _of_tool_choice(fields: ChatFields) -> Guide | None:
    choice = fields.tool_choice
    if choice is None or (isinstance(choice, str) and choice != "required"):
        return None
    functions = [tool.function for tool in fields.tools or ()]
    only_one = fields.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        name = choice.function.name
        functions = [function for function in functions if function.name == name][:1]
        only_one = True
        if not functions:
            raise refused("tool_choice", f"no tool is named {name[:60]!r}; name one of tools")
    return Guide("grammar", grammar_of_calls(functions, only_one=only_one))


def _of_response_format(fields: ChatFields) -> Guide | None:
    form = fields.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Guide("json", None)
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise ApiError(
            400,
            "expected response_format.json_schema.schema, got none; send it or use json_object",
            param="response_format.json_schema",
            code="invalid_argument",
        )
    return Guide("json_schema", _json(form.json_schema.schema_))


def _of_structured_outputs(fields: Sampling) -> Guide | None:
    asked = fields.structured_outputs
    if asked is None:
        return None
    guides = [
        guide
        for guide in (
            None if asked.json_ is None else Guide("json_schema", _json(asked.json_)),
            None if asked.regex is None else Guide("regex", asked.regex),
            None if asked.choice is None else Guide("choice", _json(asked.choice)),
            None if asked.grammar is None else Guide("grammar", asked.grammar),
        )
        if guide is not None
    ]
    if len(guides) != 1:
        raise refused("structured_outputs", "it needs one of json, regex, choice and grammar")
    return guides[0]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
