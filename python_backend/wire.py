"""What travels on the wire, read and judged: the values of one request's tensors and parameters.

Knows nothing of the Triton server's Python module: inputs are numpy arrays by name, so that every
rule runs in plain tests. Shapes are [1, n]: one request, n elements.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from python_backend.generation.defaults import NO_DEFAULTS, Defaults
from python_backend.generation.options import (
    GenerationOptions,
    OptionError,
    Shown,
    read_options,
    read_shown,
)
from python_backend.request import RequestError
from python_backend.tensors import ALIASES, INPUTS, NUMPY_TYPES, Tensor
from python_backend.text.chat_input import ChatError, ChatRequest

Int32Array = npt.NDArray[np.int32]
Array = npt.NDArray[Any]

# The codes that start an error message; docs/operations.md says what to do about each.
INVALID_ARGUMENT = "invalid_argument"
OVER_CAPACITY = "over_capacity"
UNAVAILABLE = "unavailable"
DEADLINE_EXCEEDED = "deadline_exceeded"
CANCELLED = "cancelled"
INTERNAL = "internal"
_WIRE_CODES = {
    INVALID_ARGUMENT: INVALID_ARGUMENT,
    "duplicate_request_id": INVALID_ARGUMENT,
    "empty_prompt": INVALID_ARGUMENT,
    "invalid_input_ids": INVALID_ARGUMENT,
    "invalid_max_tokens": INVALID_ARGUMENT,
    "invalid_sampling": INVALID_ARGUMENT,
    "token_out_of_range": INVALID_ARGUMENT,
    "too_long": INVALID_ARGUMENT,
    "too_many_end_ids": INVALID_ARGUMENT,
    "invalid_grammar": INVALID_ARGUMENT,
    "grammar_exhausted": INVALID_ARGUMENT,
    "grammar_queue_full": UNAVAILABLE,
    "exceeds_cache": OVER_CAPACITY,
    "too_many_sequences": OVER_CAPACITY,
    "queue_full": UNAVAILABLE,
    "shutting_down": UNAVAILABLE,
    CANCELLED: CANCELLED,
    DEADLINE_EXCEEDED: DEADLINE_EXCEEDED,
    "core_failed": INTERNAL,
    "executor_failed": INTERNAL,
    INTERNAL: INTERNAL,
}
DEFAULT_MAX_TOKENS = 16
AS_MANY_AS_FIT = -1
NO_END_ID = -1
RESET_PREFIX_CACHE = "reset_prefix_cache"
MAX_NAME = 256
_PROMPTS = ("text_input", "input_ids", "messages")
_CHAT_OPTIONS = ("tools", "thinking", "reasoning_effort")


_BY_NAME = {tensor.name: tensor for tensor in INPUTS}
# Inputs that may come as parameters of the request as well.
_PARAMETERS = ("priority", "timeout", "session_id", "cache_salt")
# The server hands JSON fields that are no inputs on as parameters; its own `id` is among them.
_KNOWN_PARAMETERS = frozenset({"id", *_PARAMETERS})


@dataclass(frozen=True)
class WireRequest:
    """One request as it was sent: exactly one of `text`, `input_ids` and `chat` is given.

    `input_ids` is the server's own buffer, which is gone when its call returns. Values are judged
    by the core, which every road to it passes. `max_tokens` AS_MANY_AS_FIT: the server, which
    knows how long the prompt is, takes what is left. `end_ids` None means the model's own end
    tokens; an empty set means that no token ends it. `timeout` in seconds, None for none.
    """

    text: str | None
    input_ids: Int32Array | None
    chat: ChatRequest | None
    max_tokens: int
    stream: bool
    speculative: bool
    options: GenerationOptions
    shown: Shown
    end_ids: frozenset[int] | None
    priority: int
    timeout: float | None
    session_id: str
    cache_salt: bytes


def read_control(inputs: Mapping[str, Array]) -> str | None:
    """What an operator orders instead of an answer; None for a request for an answer."""
    if "control" not in inputs:
        return None
    order = _text("control", _elements("control", inputs["control"]).item())
    if len(inputs) > 1 or order != RESET_PREFIX_CACHE:
        raise _invalid(
            f"expected control {RESET_PREFIX_CACHE} and no other input, got {order[:40]!r} and "
            f"{len(inputs) - 1} other inputs"
        )
    return order


def read_request(
    inputs: Mapping[str, Array], parameters: Mapping[str, Any], defaults: Defaults = NO_DEFAULTS
) -> WireRequest:
    """Judge the tensors of one call; what it does not set is from `defaults`.

    Raises RequestError `invalid_argument` with one sentence.
    """
    for name in parameters:
        if name not in _KNOWN_PARAMETERS:
            raise _unknown(name)
    values = {name: _elements(name, array) for name, array in inputs.items()}
    for name in _PARAMETERS:
        if name in parameters:
            _use(values, name, _parameter(name, parameters[name]), f"the parameter {name}")
    for name, value in values.items():
        _check_neutral(_BY_NAME[name], value)
    for alias, name in ALIASES.items():
        if alias in values:
            _use(values, name, values.pop(alias), alias)
    given = [name for name in _PROMPTS if name in values]
    if len(given) != 1:
        raise _invalid(
            f"expected exactly one of {', '.join(_PROMPTS)}, got {' and '.join(given) or 'none'}; "
            "send the prompt once"
        )

    def scalar(name: str, default: Any) -> Any:
        return values[name].item() if name in values else default

    def short(name: str) -> str:
        value = _text(name, scalar(name, b""))
        if len(value) > MAX_NAME:
            raise _invalid(f"expected {name} of at most {MAX_NAME} characters, got {len(value)}")
        return value

    text = _text("text_input", values["text_input"].item()) if "text_input" in values else None
    if text == "":  # a begin token alone is no prompt
        raise _invalid("expected a prompt of at least one token, got an empty text")
    try:
        options, shown = read_options(_texts(values), values, defaults.sampling), read_shown(values)
    except OptionError as error:
        raise _invalid(str(error)) from None
    max_tokens = scalar("max_tokens", defaults.max_tokens or DEFAULT_MAX_TOKENS)
    min_tokens = options.sampling.min_tokens
    if shown.prompt and max_tokens == 0 and min_tokens > 0:  # for the core it asks for one token
        raise _invalid(
            f"expected min_tokens of at most max_tokens, got {min_tokens} and 0; raise max_tokens "
            "or leave min_tokens out"
        )
    return WireRequest(
        text=text,
        input_ids=values.get("input_ids"),
        chat=_chat(values),
        max_tokens=max_tokens,
        stream=bool(scalar("stream", False)),
        speculative=bool(scalar("speculative", True)),
        options=options,
        shown=shown,
        end_ids=_end_ids(scalar("end_id", None)),
        priority=scalar("priority", 0),
        timeout=scalar("timeout", 0) / 1e6 or None,
        session_id=short("session_id"),
        cache_salt=short("cache_salt").encode(),
    )


def to_wire(error: RequestError) -> RequestError:
    """The same sentence under one of the few codes that clients act on."""
    code = _WIRE_CODES.get(error.code, INTERNAL)
    return error if code == error.code else RequestError(code, str(error).partition("] ")[2])


def _elements(name: str, array: Array) -> Array:
    """The elements of one request's tensor, [n]; a view of the buffer that arrived."""
    spec = _BY_NAME.get(name)
    if spec is None:
        raise _unknown(name)
    dtype = np.dtype(NUMPY_TYPES[spec.kind])
    if array.dtype != dtype:
        raise _invalid(f"expected {name} as {spec.kind}, got {array.dtype}; convert it")
    wanted = "[1, n]" if spec.size < 0 else "[1, 1]"
    if array.ndim == 2 and array.shape[0] > 1:
        raise _invalid(
            f"expected one request per call, {name} of shape {wanted}, got {list(array.shape)}; "
            "send the requests one by one, the server batches them itself"
        )
    if array.ndim != 2 or array.shape[0] != 1 or (spec.size > 0 and array.shape[1] != spec.size):
        raise _invalid(f"expected {name} of shape {wanted}, got {list(array.shape)}")
    elements: Array = array[0]
    return elements


def _check_neutral(spec: Tensor, elements: Array) -> None:
    if not spec.neutral:
        return
    for value in elements.tolist():
        if value not in spec.neutral:
            raise _invalid(
                f"expected {spec.name} to be {' or '.join(repr(v) for v in spec.neutral)} or not "
                f"sent, got {value!r}; {spec.instead}"
            )


def _chat(values: Mapping[str, Array]) -> ChatRequest | None:
    if "messages" not in values:
        for name in _CHAT_OPTIONS:
            if name in values:
                raise _invalid(f"expected {name} with messages only, got it without; leave it out")
        return None

    def text(name: str) -> str | None:
        return _text(name, values[name].item()) if name in values else None

    try:
        return ChatRequest.read(
            text("messages") or "",
            tools=text("tools"),
            thinking=bool(values["thinking"].item()) if "thinking" in values else False,
            reasoning_effort=text("reasoning_effort"),
        )
    except ChatError as error:
        raise _invalid(str(error)) from None


def _parameter(name: str, value: Any) -> Array:
    """A parameter as the elements of its input's tensor."""
    kind = _BY_NAME[name].kind
    if kind == "STRING" and isinstance(value, str):
        return np.array([value.encode()], dtype=np.object_)
    if kind != "STRING" and type(value) is int:
        limits = np.iinfo(NUMPY_TYPES[kind])
        if limits.min <= value <= limits.max:
            return np.array([value], dtype=NUMPY_TYPES[kind])
    raise _invalid(f"expected the parameter {name} as {kind}, got {str(value)[:40]}")


def _use(values: dict[str, Array], name: str, value: Array, source: str) -> None:
    """Take what came by another way as the input `name`, unless that came as well and differs."""
    if name in values and not np.array_equal(values[name], value):
        raise _invalid(
            f"expected one {name}, got {name} {_shown(values[name])} and {source} "
            f"{_shown(value)}; send one of them"
        )
    values[name] = value


def _shown(value: Array) -> str:
    return str(value.item() if value.size == 1 else value.tolist())[:60]


def _texts(values: Mapping[str, Array]) -> dict[str, list[str]]:
    """Every text of the request, by name."""
    return {
        name: [_text(name, element) for element in value.tolist()]
        for name, value in values.items()
        if _BY_NAME[name].kind == "STRING"
    }


def _end_ids(end_id: int | None) -> frozenset[int] | None:
    if end_id is None:
        return None
    return frozenset() if end_id == NO_END_ID else frozenset({end_id})


def _text(name: str, value: bytes | str) -> str:
    if isinstance(value, str):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _invalid(
            f"expected {name} as UTF-8, got byte 0x{value[error.start]:02x} at {error.start}; "
            "encode the text as UTF-8"
        ) from None


def _unknown(name: str) -> RequestError:
    close = difflib.get_close_matches(name, _BY_NAME, n=1)
    hint = f"; did you mean {close[0]}?" if close else "; see the model's documentation"
    return _invalid(f"expected inputs that the model has, got {name!r}{hint}")


def _invalid(sentence: str) -> RequestError:
    return RequestError(INVALID_ARGUMENT, sentence)
