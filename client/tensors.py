"""Requests and answers as named tensors, [1, n]: one request, n elements.

Both transports build their bytes from `input_tensors` and read them back through
`chunk_from_outputs`, so that a name, a type or a rule is written once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from client.protocol import (
    PROTOCOL_ERROR,
    DeploymentError,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    PromptTokens,
)


@dataclass(frozen=True)
class TensorSpec:
    """Name, the server's type name and the numpy type of one tensor."""

    name: str
    datatype: str
    dtype: type[np.generic]


INPUTS = (
    TensorSpec("text_input", "BYTES", np.object_),
    TensorSpec("input_ids", "INT32", np.int32),
    TensorSpec("messages", "BYTES", np.object_),
    TensorSpec("tools", "BYTES", np.object_),
    TensorSpec("thinking", "BOOL", np.bool_),
    TensorSpec("reasoning_effort", "BYTES", np.object_),
    TensorSpec("max_tokens", "INT32", np.int32),
    TensorSpec("temperature", "FP32", np.float32),
    TensorSpec("top_k", "INT32", np.int32),
    TensorSpec("top_p", "FP32", np.float32),
    TensorSpec("min_p", "FP32", np.float32),
    TensorSpec("seed", "UINT64", np.uint64),
    TensorSpec("repetition_penalty", "FP32", np.float32),
    TensorSpec("presence_penalty", "FP32", np.float32),
    TensorSpec("frequency_penalty", "FP32", np.float32),
    TensorSpec("logit_bias", "BYTES", np.object_),
    TensorSpec("bad_words", "BYTES", np.object_),
    TensorSpec("min_tokens", "INT32", np.int32),
    TensorSpec("stop_words", "BYTES", np.object_),
    TensorSpec("include_stop_str_in_output", "BOOL", np.bool_),
    TensorSpec("stop_token_ids", "INT32", np.int32),
    TensorSpec("ignore_eos", "BOOL", np.bool_),
    TensorSpec("logprobs", "INT32", np.int32),
    TensorSpec("prompt_logprobs", "INT32", np.int32),
    TensorSpec("echo", "BOOL", np.bool_),
    TensorSpec("num_return_sequences", "INT32", np.int32),
    TensorSpec("return_token_bytes", "BOOL", np.bool_),
    TensorSpec("exclude_input_in_output", "BOOL", np.bool_),
    TensorSpec("guided_decoding_guide_type", "BYTES", np.object_),
    TensorSpec("guided_decoding_guide", "BYTES", np.object_),
    TensorSpec("speculative", "BOOL", np.bool_),
    TensorSpec("priority", "INT32", np.int32),
    TensorSpec("cache_salt", "BYTES", np.object_),
    TensorSpec("session_id", "BYTES", np.object_),
    TensorSpec("end_id", "INT32", np.int32),
)
_TEXT_LISTS = ("bad_words", "stop_words")
_LISTS = (*_TEXT_LISTS, "stop_token_ids")  # an empty one is none
STREAM = TensorSpec("stream", "BOOL", np.bool_)


def input_tensors(
    request: GenerateRequest, *, stream: bool
) -> list[tuple[TensorSpec, npt.NDArray[Any]]]:
    """The request as named tensors of shape [1, n]; text is UTF-8 bytes in an object array.

    Raises ValueError for a value that its tensor cannot hold: a server that reads JSON would wrap
    it around without a word.
    """
    tensors: list[tuple[TensorSpec, npt.NDArray[Any]]] = []
    for spec in INPUTS:
        value = getattr(request, spec.name)
        if value is not None and not (spec.name in _LISTS and len(value) == 0):
            tensors.append((spec, _tensor(spec, value)))
    tensors.append((STREAM, np.array([[stream]], dtype=np.bool_)))
    return tensors


def chunk_from_outputs(outputs: Mapping[str, Any]) -> GenerateChunk:
    """A chunk from named values: for text `bytes`, `str` or a list of them, for numbers integers
    or flat arrays.

    Raises DeploymentError `protocol_error` for a finish reason that this client does not know.
    """
    reason = _text(outputs.get("finish_reason"))
    if reason and reason not in tuple(FinishReason):
        raise DeploymentError(
            PROTOCOL_ERROR,
            f"expected a finish_reason of {', '.join(FinishReason)}, got {reason!r}: "
            "use a client and a server of the same version",
        )
    ids = _ids(outputs.get("output_ids", ()))
    return GenerateChunk(
        text_output=_text(outputs.get("text_output")) or "",
        output_ids=ids,
        finish_reason=FinishReason(reason) if reason else None,
        num_input_tokens=_number(outputs.get("num_input_tokens")),
        num_output_tokens=_number(outputs.get("num_output_tokens")),
        num_accepted_drafts=_number(outputs.get("num_accepted_drafts")),
        cached_tokens=_number(outputs.get("cached_tokens")),
        log_probs=_numbers(outputs.get("output_log_probs")),
        **_alternatives(outputs, "top_log_prob", ids.size),
        token_bytes=_from_hex(outputs.get("output_token_bytes")),
        top_token_bytes=_from_hex(outputs.get("top_token_bytes")),
        sequence_index=_number(outputs.get("sequence_index")),
        prompt=_prompt(outputs) if "prompt_ids" in outputs else None,
    )


def _prompt(outputs: Mapping[str, Any]) -> PromptTokens:
    ids = _ids(outputs["prompt_ids"])
    log_probs = _numbers(outputs.get("prompt_log_probs", ()))
    assert log_probs is not None
    return PromptTokens(
        ids=ids,
        log_probs=log_probs,
        **_alternatives(outputs, "top_prompt_log_prob", log_probs.size),
        token_bytes=_from_hex(outputs.get("prompt_token_bytes")),
        top_token_bytes=_from_hex(outputs.get("top_prompt_token_bytes")),
    )


def _alternatives(outputs: Mapping[str, Any], name: str, count: int) -> dict[str, Any]:
    """Laid end to end on the wire, [count, K] here."""
    ids, log_probs = outputs.get(f"{name}_ids"), _numbers(outputs.get(f"{name}s"))
    if ids is None or log_probs is None:
        return {}
    shape = (count, -1) if count else (0, 0)
    return {
        "top_log_prob_ids": _ids(ids).reshape(shape),
        "top_log_probs": log_probs.reshape(shape),
    }


def _tensor(spec: TensorSpec, value: Any) -> npt.NDArray[Any]:
    if spec.dtype is np.object_:
        texts = value if spec.name in _TEXT_LISTS else [_as_text(spec.name, value)]
        try:
            return np.array([[text.encode("utf-8") for text in texts]], dtype=np.object_)
        except UnicodeEncodeError as error:
            raise ValueError(
                f"expected {spec.name} to be valid Unicode, got a lone surrogate at character "
                f"{error.start}: remove it"
            ) from None
    if isinstance(value, np.ndarray):
        return value.reshape(1, -1)
    if np.issubdtype(spec.dtype, np.integer):
        limits = np.iinfo(spec.dtype)  # type: ignore[type-var]
        if int(value) != value or not limits.min <= value <= limits.max:
            raise ValueError(
                f"expected {spec.name} as a whole number from {limits.min} to {limits.max}, "
                f"got {value}"
            )
    if spec.dtype is np.float32:
        most = float(np.finfo(np.float32).max)
        if math.isfinite(value) and abs(value) > most:
            raise ValueError(
                f"expected {spec.name} as a number from {-most} to {most}, got {value}"
            )
    return np.array([[value]], dtype=spec.dtype)


def _as_text(name: str, value: Any) -> str:
    """Text as it is, an effort's number in digits, lists of objects as JSON."""
    if isinstance(value, str | int):
        return str(value)
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"expected {name} that JSON can hold, but {error}") from None


def _text(value: Any) -> str | None:
    if isinstance(value, list):
        value = value[0]
    return value.decode("utf-8") if isinstance(value, bytes) else value


def _ids(values: Any) -> npt.NDArray[np.int32]:
    """JSON shows a vector of one element without its brackets."""
    return np.atleast_1d(np.asarray(values, dtype=np.int32))


def _numbers(values: Any) -> npt.NDArray[np.float32] | None:
    return None if values is None else np.array(values, np.float32).reshape(-1)


def _from_hex(values: Any) -> list[bytes] | None:
    if values is None:
        return None
    spelled = values if isinstance(values, list) else [values]
    return [bytes.fromhex(_text(value) or "") for value in spelled]


def _number(value: Any) -> int | None:
    return None if value is None else int(np.atleast_1d(value)[0])
