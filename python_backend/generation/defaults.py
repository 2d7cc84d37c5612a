"""What a request gets that leaves a value out: the checkpoint's generation_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from python_backend.generation.checks import check_sampling
from python_backend.request import RequestError, SamplingParams

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty")


class DefaultsError(ValueError):
    """A generation_config.json that cannot be used."""


@dataclass(frozen=True)
class Defaults:
    """`max_tokens` None: the server's own."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None


NO_DEFAULTS = Defaults()


def generation_defaults(config: Mapping[str, Any], vocab_size: int) -> Defaults:
    """From the fields of the file that mean something here; null is as if it was left out, and
    `do_sample` false is greedy whatever the temperature.

    Raises DefaultsError for a value that a request could not have either.
    """
    values: dict[str, Any] = {}
    for name in (*_FLOATS, "top_k", "max_new_tokens"):
        value = config.get(name)
        if value is None:
            continue
        kinds = (int, float) if name in _FLOATS else (int,)
        if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
            raise DefaultsError(f"expected {name} to be a number, got {value!r}")
        values[name] = float(value) if name in _FLOATS else value
    if config.get("do_sample") is False:
        values.pop("temperature", None)
    max_tokens = values.pop("max_new_tokens", None)
    if max_tokens is not None and max_tokens < 1:
        raise DefaultsError(f"expected max_new_tokens of at least 1, got {max_tokens}")
    sampling = replace(SamplingParams(), **values)
    try:
        check_sampling(sampling, vocab_size)
    except RequestError as error:
        raise DefaultsError(str(error).partition("] ")[2]) from None
    return Defaults(sampling, max_tokens)
