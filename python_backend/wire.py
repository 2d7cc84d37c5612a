"""What travels on the wire: names, types and shapes of the model's tensors, read and judged here.

Knows nothing of the Triton server's Python module: inputs are numpy arrays by name, so that every
rule runs in plain tests. config.pbtxt repeats the two tables below, and a test compares them. The
names are those of TensorRT-LLM's Triton models. Shapes are [1, n]: one request, n elements.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

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
from python_backend.text.chat_input import ChatError, ChatRequest

Int32Array = npt.NDArray[np.int32]
Array = npt.NDArray[Any]

# The codes that start an error message; docs/operations.md says what to do about each.
INVALID_ARGUMENT = "invalid_argument"
OVER_CAPACITY = "over_capacity"
UNAVAILABLE = "unavailable"
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
    "exceeds_cache": OVER_CAPACITY,
    "queue_full": UNAVAILABLE,
    "shutting_down": UNAVAILABLE,
    CANCELLED: CANCELLED,
    "core_failed": INTERNAL,
    "executor_failed": INTERNAL,
    INTERNAL: INTERNAL,
}
DEFAULT_MAX_TOKENS = 16
AS_MANY_AS_FIT = -1
NO_END_ID = -1
_PROMPTS = ("text_input", "input_ids", "messages")
_CHAT_OPTIONS = ("tools", "thinking", "reasoning_effort")


class Tensor(NamedTuple):
    """`kind` is the server's type name without TYPE_; `size` counts elements, −1 is any number.

    An input with `neutral` values is accepted for the sake of existing clients, with these values
    only: it would change the answer and this version cannot do it.
    """

    name: str
    kind: str
    size: int = 1
    neutral: tuple[Any, ...] = ()


INPUTS = (
    Tensor("text_input", "STRING"),
    Tensor("input_ids", "INT32", -1),
    Tensor("messages", "STRING"),
    Tensor("tools", "STRING"),
    Tensor("thinking", "BOOL"),
    Tensor("reasoning_effort", "STRING"),
    Tensor("max_tokens", "INT32"),
    Tensor("stream", "BOOL"),
    Tensor("speculative", "BOOL"),
    Tensor("temperature", "FP32"),
    Tensor("top_k", "INT32"),
    Tensor("top_p", "FP32"),
    Tensor("min_p", "FP32"),
    Tensor("seed", "UINT64"),
    Tensor("repetition_penalty", "FP32"),
    Tensor("presence_penalty", "FP32"),
    Tensor("frequency_penalty", "FP32"),
    Tensor("logit_bias", "STRING"),
    Tensor("embedding_bias_words", "STRING", -1),
    Tensor("embedding_bias_weights", "FP32", -1),
    Tensor("bad_words", "STRING", -1),
    Tensor("min_tokens", "INT32"),
    Tensor("stop_words", "STRING", -1),
    Tensor("include_stop_str_in_output", "BOOL"),
    Tensor("stop_token_ids", "INT32", -1),
    Tensor("ignore_eos", "BOOL"),
    Tensor("end_id", "INT32"),
    Tensor("pad_id", "INT32"),
    Tensor("num_return_sequences", "INT32"),
    Tensor("return_log_probs", "BOOL"),
    Tensor("logprobs", "INT32"),
    Tensor("prompt_logprobs", "INT32"),
    Tensor("echo", "BOOL"),
    Tensor("return_num_input_tokens", "BOOL"),
    Tensor("return_num_output_tokens", "BOOL"),
    Tensor("return_finish_reason", "BOOL"),
    Tensor("return_stop_reason", "BOOL"),
    Tensor("return_cumulative_logprob", "BOOL"),
    Tensor("return_token_bytes", "BOOL"),
    Tensor("exclude_input_in_output", "BOOL"),
    Tensor("beam_width", "INT32", neutral=(1,)),
    Tensor("length_penalty", "FP32", neutral=(1.0,)),
    Tensor("guided_decoding_guide_type", "STRING", neutral=("",)),
    Tensor("guided_decoding_guide", "STRING", neutral=("",)),
    Tensor("return_context_logits", "BOOL", neutral=(False,)),
    Tensor("return_generation_logits", "BOOL", neutral=(False,)),
    Tensor("return_perf_metrics", "BOOL", neutral=(False,)),
    Tensor("sampling_param_best_of", "INT32", neutral=(1,)),
    Tensor("streaming", "BOOL"),
    Tensor("stop", "STRING", -1),
    Tensor("random_seed", "UINT64"),
    Tensor("min_length", "INT32"),
    Tensor("sampling_param_temperature", "FP32"),
    Tensor("sampling_param_top_k", "INT32"),
    Tensor("sampling_param_top_p", "FP32"),
    Tensor("sampling_param_frequency_penalty", "FP32"),
    Tensor("sampling_param_presence_penalty", "FP32"),
    Tensor("sampling_param_max_tokens", "INT32"),
    Tensor("sampling_param_stop", "STRING", -1),
    Tensor("sampling_param_seed", "UINT64"),
    Tensor("sampling_param_exclude_input_from_output", "BOOL"),
    Tensor("sampling_param_return_perf_metrics", "BOOL", neutral=(False,)),
)
_ALIASES = {
    "streaming": "stream",
    "stop": "stop_words",
    "random_seed": "seed",
    "min_length": "min_tokens",
    "sampling_param_temperature": "temperature",
    "sampling_param_top_k": "top_k",
    "sampling_param_top_p": "top_p",
    "sampling_param_frequency_penalty": "frequency_penalty",
    "sampling_param_presence_penalty": "presence_penalty",
    "sampling_param_max_tokens": "max_tokens",
    "sampling_param_stop": "stop_words",
    "sampling_param_seed": "seed",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
}
OUTPUTS = (
    Tensor("text_output", "STRING"),
    Tensor("output_ids", "INT32", -1),
    Tensor("sequence_index", "INT32"),
    Tensor("finish_reason", "STRING"),
    Tensor("stop_reason", "STRING"),
    Tensor("num_input_tokens", "INT32"),
    Tensor("num_output_tokens", "INT32"),
    Tensor("cached_tokens", "INT32"),
    Tensor("output_log_probs", "FP32", -1),
    Tensor("top_log_prob_ids", "INT32", -1),
    Tensor("top_log_probs", "FP32", -1),
    Tensor("output_token_bytes", "STRING", -1),
    Tensor("top_token_bytes", "STRING", -1),
    Tensor("prompt_ids", "INT32", -1),
    Tensor("prompt_log_probs", "FP32", -1),
    Tensor("top_prompt_log_prob_ids", "INT32", -1),
    Tensor("top_prompt_log_probs", "FP32", -1),
    Tensor("prompt_token_bytes", "STRING", -1),
    Tensor("top_prompt_token_bytes", "STRING", -1),
    Tensor("cum_log_probs", "FP32"),
    Tensor("cumulative_logprob", "FP32"),
)
_NUMPY: dict[str, type[np.generic]] = {
    "STRING": np.object_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
}
_BY_NAME = {tensor.name: tensor for tensor in INPUTS}
# The server hands JSON fields that are no inputs on as parameters; its own `id` is among them.
_KNOWN_PARAMETERS = frozenset({"id"})


@dataclass(frozen=True)
class WireRequest:
    """One request as it was sent: exactly one of `text`, `input_ids` and `chat` is given.

    `input_ids` is the server's own buffer, which is gone when its call returns. Values are judged
    by the core, which every road to it passes. `max_tokens` AS_MANY_AS_FIT: the server, which
    knows how long the prompt is, takes what is left. `end_ids` None means the model's own end
    tokens; an empty set means that no token ends it.
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
    for name, value in values.items():
        _check_neutral(_BY_NAME[name], value)
    for alias, name in _ALIASES.items():
        if alias in values:
            _use_alias(values, alias, name)
    given = [name for name in _PROMPTS if name in values]
    if len(given) != 1:
        raise _invalid(
            f"expected exactly one of {', '.join(_PROMPTS)}, got {' and '.join(given) or 'none'}; "
            "send the prompt once"
        )

    def scalar(name: str, default: Any) -> Any:
        return values[name].item() if name in values else default

    text = _text("text_input", values["text_input"].item()) if "text_input" in values else None
    if text == "":  # a begin token alone is no prompt
        raise _invalid("expected a prompt of at least one token, got an empty text")
    try:
        options, shown = read_options(_texts(values), values, defaults.sampling), read_shown(values)
    except OptionError as error:
        raise _invalid(str(error)) from None
    return WireRequest(
        text=text,
        input_ids=values.get("input_ids"),
        chat=_chat(values),
        max_tokens=scalar("max_tokens", defaults.max_tokens or DEFAULT_MAX_TOKENS),
        stream=bool(scalar("stream", False)),
        speculative=bool(scalar("speculative", True)),
        options=options,
        shown=shown,
        end_ids=_end_ids(scalar("end_id", None)),
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
    dtype = np.dtype(_NUMPY[spec.kind])
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
    for element in elements.tolist():
        value = _text(spec.name, element) if spec.kind == "STRING" else element
        if value not in spec.neutral:
            raise _invalid(
                f"expected {spec.name} to be {' or '.join(repr(v) for v in spec.neutral)} or not "
                f"sent, got {value!r}; this version has no other"
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


def _use_alias(values: dict[str, Array], alias: str, name: str) -> None:
    value = values.pop(alias)
    if name in values and not np.array_equal(values[name], value):
        raise _invalid(
            f"expected one {name}, got {name} {_shown(values[name])} and {alias} "
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
