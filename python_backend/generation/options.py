"""What a request may say about its answer, read from the wire.

Words are text here and become tokens in `resolve`, which needs the tokenizer.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from python_backend.generation.stop_strings import MAX_STOP_BYTES, MAX_STOP_STRINGS, StopStrings
from python_backend.grammar.guide import Guide, GuideError, read_guide
from python_backend.request import SamplingParams

Array = npt.NDArray[Any]
Encode = Callable[[str], Sequence[int]]

_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
)


MAX_SEQUENCES = 128
_MANY = "num_return_sequences"


class OptionError(ValueError):
    """Options that cannot be used."""


@dataclass(frozen=True)
class GenerationOptions:
    """`sampling` lacks what stands in `bad_words` and `bias_words` as text."""

    sampling: SamplingParams
    bad_words: tuple[str, ...] = ()
    bias_words: tuple[tuple[str, float], ...] = ()
    stop_strings: tuple[str, ...] = ()
    include_stop: bool = False
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    num_sequences: int = 1
    guide: Guide | None = None

    def resolve(self, encode: Encode) -> SamplingParams:
        """Words as tokens. A bad word is refused both where a text begins with it and behind a
        space; every token of a bias word is moved."""
        words = {tuple(encode(form)) for word in self.bad_words for form in (word, f" {word}")}
        bias = dict(self.sampling.logit_bias)
        for word, value in self.bias_words:
            for id in encode(word):
                bias[id] = bias.get(id, 0.0) + value
        return replace(
            self.sampling, bad_words=tuple(sorted(words)), logit_bias=tuple(sorted(bias.items()))
        )

    def end_ids(self, own: frozenset[int]) -> frozenset[int]:
        """The tokens that end the answer, `own` being those that end it by themselves."""
        return self.stop_token_ids | (frozenset() if self.ignore_eos else own)

    def end_of_guide(
        self, sampling: SamplingParams, end_ids: frozenset[int], own: frozenset[int], most: int
    ) -> tuple[SamplingParams, frozenset[int]]:
        """A guide's text must be able to end: where nothing else ends an answer of at most `most`
        tokens, the model's own end tokens do, once the guide allows nothing else."""
        if self.guide is None or end_ids:
            return sampling, end_ids
        return replace(sampling, min_tokens=most), own

    def watch(self) -> StopStrings | None:
        """A watch for the stop strings, None for none."""
        if not self.stop_strings:
            return None
        return StopStrings(self.stop_strings, include=self.include_stop)


@dataclass(frozen=True)
class Shown:
    """What a response carries beside its text."""

    prompt: bool = False
    prompt_log_probs: bool = False
    num_input_tokens: bool = True
    num_output_tokens: bool = True
    finish_reason: bool = True
    stop_reason: bool = False
    log_probs: bool = False
    cumulative_logprob: bool = False
    token_bytes: bool = False


def read_options(
    texts: Mapping[str, Sequence[str]], values: Mapping[str, Array], defaults: SamplingParams
) -> GenerationOptions:
    """From texts and tensors [n] by name. Raises OptionError; plain numbers are the core's to
    judge."""
    sampling = replace(
        defaults,
        **{name: values[name].item() for name in _SAMPLING if name in values},
        # Drawn where none was sent, so that equal prompts may get different answers.
        seed=values["seed"].item() if "seed" in values else secrets.randbits(64),
        logit_bias=_logit_bias(texts["logit_bias"][0]) if "logit_bias" in texts else (),
        logprobs=_logprobs(values),
        prompt_logprobs=_prompt_logprobs(values),
    )
    num_sequences = int(values[_MANY].item()) if _MANY in values else 1
    if not 1 <= num_sequences <= MAX_SEQUENCES:
        raise OptionError(f"expected {_MANY} from 1 to {MAX_SEQUENCES}, got {num_sequences}")
    return GenerationOptions(
        sampling=sampling,
        bad_words=tuple(word for word in texts.get("bad_words", ()) if word),
        bias_words=_bias_words(texts, values),
        stop_strings=_stop_strings(texts.get("stop_words", ())),
        include_stop=_flag(values, "include_stop_str_in_output"),
        stop_token_ids=frozenset(values.get("stop_token_ids", np.empty(0, np.int32)).tolist()),
        ignore_eos=_flag(values, "ignore_eos"),
        num_sequences=num_sequences,
        guide=_guide(texts, values),
    )


def read_shown(values: Mapping[str, Array]) -> Shown:
    return Shown(
        prompt=_shows_prompt(values),
        prompt_log_probs=_prompt_logprobs(values) is not None,
        num_input_tokens=_flag(values, "return_num_input_tokens", True),
        num_output_tokens=_flag(values, "return_num_output_tokens", True),
        finish_reason=_flag(values, "return_finish_reason", True),
        stop_reason=_flag(values, "return_stop_reason"),
        log_probs=_shows_log_probs(values),
        cumulative_logprob=_flag(values, "return_cumulative_logprob"),
        token_bytes=_flag(values, "return_token_bytes"),
    )


def _flag(values: Mapping[str, Array], name: str, default: bool = False) -> bool:
    return bool(values[name].item()) if name in values else default


def _shows_log_probs(values: Mapping[str, Array]) -> bool:
    return _flag(values, "return_log_probs") or "logprobs" in values


def _guide(texts: Mapping[str, Sequence[str]], values: Mapping[str, Array]) -> Guide | None:
    try:
        return read_guide(texts, after_reasoning=_flag(values, "thinking"))
    except GuideError as error:
        raise OptionError(str(error)) from None


def _logprobs(values: Mapping[str, Array]) -> int | None:
    if "logprobs" in values:
        return int(values["logprobs"].item())
    asked = _flag(values, "return_log_probs") or _flag(values, "return_cumulative_logprob")
    return 0 if asked else None


def _prompt_logprobs(values: Mapping[str, Array]) -> int | None:
    """`echo` shows of the prompt what `logprobs` shows of the answer."""
    if "prompt_logprobs" in values:
        return int(values["prompt_logprobs"].item())
    return _logprobs(values) if _flag(values, "echo") and _shows_log_probs(values) else None


def _shows_prompt(values: Mapping[str, Array]) -> bool:
    excludes = _flag(values, "exclude_input_in_output", not _flag(values, "echo"))
    if excludes and _flag(values, "echo"):
        raise OptionError(
            "expected one of echo and exclude_input_in_output to be true, got both; drop one"
        )
    return not excludes


def _stop_strings(words: Sequence[str]) -> tuple[str, ...]:
    words = [word for word in words if word]
    if len(words) > MAX_STOP_STRINGS:
        raise OptionError(
            f"expected at most {MAX_STOP_STRINGS} stop_words, got {len(words)}; send fewer"
        )
    for word in words:
        size = len(word.encode("utf-8"))
        if size > MAX_STOP_BYTES:
            raise OptionError(
                f"expected stop_words of at most {MAX_STOP_BYTES} bytes, got {size}; shorten it"
            )
    return tuple(words)


def _bias_words(
    texts: Mapping[str, Sequence[str]], values: Mapping[str, Array]
) -> tuple[tuple[str, float], ...]:
    words = texts.get("embedding_bias_words", ())
    weights = values.get("embedding_bias_weights", np.empty(0, np.float32)).tolist()
    if len(words) != len(weights):
        raise OptionError(
            "expected as many embedding_bias_weights as embedding_bias_words, got "
            f"{len(weights)} and {len(words)}; send one for each"
        )
    return tuple((word, weight) for word, weight in zip(words, weights, strict=True) if word)


def _logit_bias(text: str) -> tuple[tuple[int, float], ...]:
    """From a JSON object of token ids and numbers."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OptionError(
            f"expected logit_bias as a JSON object, but {error}; correct the JSON"
        ) from None
    if not isinstance(value, dict):
        raise OptionError(
            f'expected logit_bias as a JSON object, got {text[:40]!r}; send {{"token id": number}}'
        )
    bias = {}
    for key, number in value.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10) or (
            isinstance(number, bool) or not isinstance(number, int | float)
        ):
            raise OptionError(
                f"expected logit_bias to have numbers by token id, got {key[:20]!r}: "
                f"{str(number)[:20]}; correct it"
            )
        bias[int(key)] = float(number)
    return tuple(sorted(bias.items()))
