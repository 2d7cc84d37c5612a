"""The form of an answer as the API asks for it, and as the deployment has it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from client.openai.errors import ApiError, refused
from client.openai.fields import ChatFields, Sampling


class Guide(NamedTuple):
    """As guided_decoding_guide_type and guided_decoding_guide."""

    kind: str
    text: str | None


def guide_of(fields: Sampling) -> Guide | None:
    """From response_format or structured_outputs; None for an answer of any form. Raises ApiError
    for both at once, and beside tools that may be called."""
    found = [
        guide
        for guide in (
            _of_response_format(fields) if isinstance(fields, ChatFields) else None,
            _of_structured_outputs(fields),
        )
        if guide is not None
    ]
    if len(found) > 1:
        raise refused("structured_outputs", "response_format says another form; send one of them")
    if not found:
        return None
    if isinstance(fields, ChatFields) and fields.tools and fields.tool_choice != "none":
        raise refused(
            "tools", "an answer of a given form calls none; send tool_choice none or no form"
        )
    return found[0]


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
