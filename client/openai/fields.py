"""The fields of a request body, judged: types, ranges, and a sentence for what is wrong.

A field that is not here is refused. Those that are accepted and change nothing stand under
"ignored" below; docs/openai.md gives the reason of each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from client.openai.errors import ApiError

MOST_CHOICES = 128
MOST_PROMPTS = 128
MOST_ALTERNATIVES = 20

_INSTEAD = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "chat_template_kwargs": "use thinking or reasoning_effort",
    "guided_json": "use response_format",
    "guided_regex": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
    "image_url": "this model reads text only",
}
_PREFIX = "Input should be "

Body = TypeVar("Body", bound="Fields")


class Fields(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str], BeforeValidator(_one_or_more)]


class StreamOptions(Fields):
    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class StructuredOutputs(Fields):
    """One of these is the form of the answer; other servers have them under these names."""

    json_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Sampling(Fields):
    """What both endpoints take. None is the server's to choose."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Texts | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    # Beyond the API, under the names that other servers of open models use.
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: str | None = None
    # Ignored.
    user: str | None = None
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: Literal["auto", "default"] | None = None
    store: Literal[False] | None = None


def _prompts(value: Any) -> Any:
    """A text, token ids, or a list of either, as a list of either."""
    kinds = {type(item) for item in value} if isinstance(value, list) else {type(value)}
    if kinds == {int} or not isinstance(value, list):
        value = [value]
    if kinds not in ({str}, {int}, {list}) or len(value) > MOST_PROMPTS:
        raise ValueError(
            f"expected a text, a list of token ids, or a list of at most {MOST_PROMPTS} of either, "
            f"got {_shown(value)}"
        )
    return value


class CompletionFields(Sampling):
    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_prompts)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Literal[""] | None = None


class ToolFunction(Fields):
    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # ignored


class Tool(Fields):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Fields):
    name: str


class NamedTool(Fields):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Fields):
    name: str
    arguments: str


class ToolCall(Fields):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # ignored: of a streamed call that was kept as it came


def _text_of(content: Any) -> Any:
    """A list of text parts is their text, end to end."""
    if not isinstance(content, list):
        return content
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else part
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(
                f"expected content as text or parts of type text, got {_shown(kind)}; this model "
                "reads text only"
            )
    return "".join(part["text"] for part in content)


class Message(Fields):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, BeforeValidator(_text_of)] = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # Ignored: an answer of this or another server, sent back as it was.
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class JsonSchema(Fields):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None  # the schema always holds


class ResponseFormat(Fields):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def _effort(value: Any) -> Any:
    if value in _EFFORTS or value is None or (type(value) is int and 1 <= value <= 100):
        return value
    raise ValueError(
        f"expected {', '.join(_EFFORTS)} or a whole number from 1 to 100, got {_shown(value)}"
    )


class Thinking(Fields):
    type: Literal["enabled", "disabled"]


class ChatFields(Sampling):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    reasoning_effort: Annotated[str | int | None, BeforeValidator(_effort)] = None
    thinking: Thinking | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None


def read_body(kind: type[Body], body: bytes) -> Body:
    """Raises ApiError 400 with one sentence and the field as `param`."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from None


def _refusal(error: Mapping[str, Any]) -> ApiError:
    place = [str(part) for part in error["loc"] if not _is_branch(part)]
    where, kind, said = ".".join(place), error["type"], str(error["msg"])
    got = _shown(error["input"])
    if kind == "json_invalid":
        sentence = f"expected a JSON object, but {said.removeprefix('Invalid JSON: ')}"
    elif kind == "extra_forbidden":
        advice = _INSTEAD.get(place[-1], "remove it")
        sentence = f"expected only fields that this server has, got {where}; {advice}"
    elif kind == "missing":
        sentence = f"expected {where}, got none; send it"
    elif kind == "value_error":
        sentence = f"in {where}: {said.removeprefix('Value error, ')}"
    elif said.startswith(_PREFIX):
        sentence = f"expected {where or 'the body'} to be {said.removeprefix(_PREFIX)}, got {got}"
    else:
        sentence = f"expected another {where}: {said}, got {got}"
    return ApiError(400, sentence, param=where or None, code="invalid_argument")


def _is_branch(part: Any) -> bool:
    """The library names the branches of a union in the path to a field: list[str], NamedTool."""
    return isinstance(part, str) and (
        part in ("str", "int", "none", "NamedTool")
        or part.endswith("]")
        or part.startswith(("constrained-", "literal["))
    )


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
