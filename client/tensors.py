"""Requests and answers as named tensors, [1, n]: one request, n elements.

Both transports build their bytes from `input_tensors` and read them back through
`chunk_from_outputs`, so that a name, a type or a rule is written once.
"""

from __future__ import annotations

import json
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
    TensorSpec("return_token_bytes", "BOOL", np.bool_),
    TensorSpec("exclude_input_in_output", "BOOL", np.bool_),
    TensorSpec("end_id", "INT32", np.int32),
)
_TEXT_LISTS = ("bad_words", "stop_words")
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
        if value is not None:
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
    ids = np.atleast_1d(np.asarray(outputs.get("output_ids", ()), dtype=np.int32))
    log_probs = outputs.get("output_log_probs")
    top_ids, top = outputs.get("top_log_prob_ids"), outputs.get("top_log_probs")
    shape = (ids.size, -1) if ids.size else (0, 0)
    spelled, top_spelled = outputs.get("output_token_bytes"), outputs.get("top_token_bytes")
    return GenerateChunk(
        text_output=_text(outputs.get("text_output")) or "",
        output_ids=ids,
        finish_reason=FinishReason(reason) if reason else None,
        num_input_tokens=_number(outputs.get("num_input_tokens")),
        num_output_tokens=_number(outputs.get("num_output_tokens")),
        cached_tokens=_number(outputs.get("cached_tokens")),
        log_probs=None if log_probs is None else np.array(log_probs, np.float32).reshape(-1),
        top_log_prob_ids=None if top_ids is None else np.array(top_ids, np.int32).reshape(shape),
        top_log_probs=None if top is None else np.array(top, np.float32).reshape(shape),
        token_bytes=None if spelled is None else _from_hex(spelled),
        top_token_bytes=None if top_spelled is None else _from_hex(top_spelled),
    )


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


def _from_hex(values: Any) -> list[bytes]:
    """JSON shows a vector of one element without its brackets."""
    return [
        bytes.fromhex(_text(v) or "") for v in (values if isinstance(values, list) else [values])
    ]


def _number(value: Any) -> int | None:
    return None if value is None else int(np.atleast_1d(value)[0])
