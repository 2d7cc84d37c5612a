"""From a judged body to requests of the deployment. What cannot be had is refused here, with the
reason; what is merely wrong about a value is the deployment's to say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from client.openai.errors import ApiError, refused
from client.openai.fields import ChatFields, CompletionFields, Message, Sampling
from client.openai.guides import guide_of, told_schema
from client.protocol import INVALID_ARGUMENT, GenerateRequest

# Passed on under the same name.
_SAME = (
    *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "logit_bias", "min_tokens", "stop_token_ids", "bad_words"),
    *("include_stop_str_in_output", "ignore_eos", "priority", "cache_salt"),
)
_COMPLETION_TOKENS = 16  # the API's default
_AS_MANY_AS_FIT = -1
# Between the API's names and the model's levels; the others are the same in both.
_EFFORTS = {"minimal": "low", "medium": "high"}


@dataclass(frozen=True)
class Asked:
    """What to send, one request for each prompt, and how the answers shall look.

    num_answers: to each prompt. reasons: an answer begins with reasoning. calls: tool calls are
    told apart from content. most_calls: later ones are left out, None is no limit.
    """

    requests: Sequence[GenerateRequest]
    num_answers: int
    stream: bool
    include_usage: bool
    log_probs: bool = False
    reasons: bool = False
    calls: bool = False
    most_calls: int | None = None


def chat_request(fields: ChatFields, id: str) -> Asked:
    """`id` names the request in the deployment's log. Raises ApiError."""
    reasons, effort = _reasoning(fields)
    tools = _tools(fields)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise refused("top_logprobs", "it needs logprobs true; set it")
    if None not in (fields.max_tokens, fields.max_completion_tokens):
        raise refused("max_tokens", "max_completion_tokens is the same; send one of them")
    log_probs = (fields.top_logprobs or 0) if fields.logprobs else None
    most_tokens = fields.max_completion_tokens or fields.max_tokens or _AS_MANY_AS_FIT
    request = _request(
        fields,
        most_tokens,
        log_probs,
        id,
        messages=_messages(fields),
        tools=tools or None,
        thinking=reasons or None,
        reasoning_effort=effort,
    )
    return Asked(
        requests=[request],
        num_answers=fields.n or 1,
        stream=bool(fields.stream),
        include_usage=_includes_usage(fields),
        log_probs=log_probs is not None,
        reasons=reasons,
        calls=bool(tools),
        most_calls=1 if fields.parallel_tool_calls is False else None,
    )


def completion_request(fields: CompletionFields, id: str) -> Asked:
    """As `chat_request`; requests of several prompts share the name."""
    if fields.echo and fields.logprobs is not None and (fields.n or 1) > 1:
        raise refused("n", "echo with logprobs has one answer; send the request again")
    if fields.best_of not in (None, fields.n or 1):
        raise refused("best_of", "nothing ranks answers here; use n")
    most_tokens = _COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    return Asked(
        requests=[
            _request(
                fields,
                most_tokens,
                fields.logprobs,
                id,
                echo=fields.echo,
                **{"text_input" if isinstance(prompt, str) else "input_ids": prompt},
            )
            for prompt in fields.prompt
        ],
        num_answers=fields.n or 1,
        stream=bool(fields.stream),
        include_usage=_includes_usage(fields),
        log_probs=fields.logprobs is not None,
    )


def _request(
    fields: Sampling, most_tokens: int, log_probs: int | None, id: str, **prompt: Any
) -> GenerateRequest:
    guide = guide_of(fields)
    try:
        return GenerateRequest(
            request_id=id,
            guided_decoding_guide_type=None if guide is None else guide.kind,
            guided_decoding_guide=None if guide is None else guide.text,
            max_tokens=most_tokens,
            stop_words=fields.stop,
            seed=None if fields.seed is None else fields.seed % 2**64,
            top_k=None if fields.top_k is None else max(fields.top_k, 0),
            num_return_sequences=fields.n,
            logprobs=log_probs,
            return_token_bytes=None if log_probs is None else True,
            **{name: getattr(fields, name) for name in _SAME},
            **prompt,
        )
    except ValueError as error:
        raise ApiError(400, str(error), code=INVALID_ARGUMENT) from None


def _includes_usage(fields: Sampling) -> bool:
    if fields.stream_options is None:
        return False
    if not fields.stream:
        raise refused("stream_options", "it needs stream true; leave it out")
    return fields.stream_options.include_usage


def _reasoning(fields: ChatFields) -> tuple[bool, str | None]:
    """Whether to reason, and the model's level of effort, None for its own."""
    effort, thinking = fields.reasoning_effort, fields.thinking
    wants = None if effort is None else effort != "none"
    if thinking is not None:
        enabled = thinking.type == "enabled"
        if wants not in (None, enabled):
            raise refused("thinking", f"reasoning_effort {effort} says otherwise; send one")
        wants = enabled
    if not wants or effort is None:
        return bool(wants), None
    return True, _EFFORTS.get(str(effort), str(effort))


def _tools(fields: ChatFields) -> list[Mapping[str, Any]]:
    """The tools that the prompt shall name."""
    choice = fields.tool_choice
    if choice is not None and not fields.tools and choice != "none":
        raise refused("tool_choice", "there are no tools; send tools or leave it out")
    if choice == "none":
        return []
    return [
        {
            "type": "function",
            "function": tool.function.model_dump(exclude_none=True, exclude={"strict"}),
        }
        for tool in fields.tools or ()
    ]


def _messages(fields: ChatFields) -> list[Mapping[str, Any]]:
    """The first system message, an empty one where there is none, tells the form of the answer."""
    messages = [_message(message) for message in fields.messages]
    schema = told_schema(fields)
    if schema is None:
        return messages
    if messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": ""})
    messages[0] = {**messages[0], "response_format": schema}
    return messages


def _message(message: Message) -> Mapping[str, Any]:
    """The form that the deployment renders: only fields that have a value."""
    sent: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": message.content,
        "reasoning_content": message.reasoning_content or message.reasoning,
        "tool_call_id": message.tool_call_id,
        "tool_calls": [
            call.model_dump(exclude={"index"}) for call in message.tool_calls or ()
        ] or None,
    }  # fmt: skip
    return {name: value for name, value in sent.items() if value is not None}
