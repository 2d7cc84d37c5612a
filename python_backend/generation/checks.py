"""Which sampling options can be served. No torch."""

from __future__ import annotations

import math

from python_backend.request import RequestError, SamplingParams

MAX_LOGPROBS = 20
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 32
_MOST = 1 << 31


def check_sampling(sampling: SamplingParams, vocab_size: int) -> None:
    """Raise RequestError `invalid_sampling` for what cannot be served."""
    finite = math.isfinite
    _expect(
        finite(sampling.temperature) and sampling.temperature >= 0,
        "a finite temperature ≥ 0 (0 is greedy)",
        sampling.temperature,
    )
    _expect(0 <= sampling.top_k < _MOST, "top_k from 0 (off) to 2^31 − 1", sampling.top_k)
    _expect(0 < sampling.top_p <= 1, "top_p above 0 and at most 1 (off)", sampling.top_p)
    _expect(0 <= sampling.min_p <= 1, "min_p from 0 (off) to 1", sampling.min_p)
    _expect(0 <= sampling.seed < 1 << 64, "a seed from 0 to 2^64 − 1", sampling.seed)
    penalty = sampling.repetition_penalty
    _expect(finite(penalty) and penalty > 0, "a repetition_penalty above 0 (1 is off)", penalty)
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        _expect(-100 <= value <= 100, f"{name} from −100 to 100 (0 is off)", value)
    _expect(0 <= sampling.min_tokens < _MOST, "min_tokens ≥ 0", sampling.min_tokens)
    for name in ("logprobs", "prompt_logprobs"):
        value = getattr(sampling, name)
        _expect(
            value is None or 0 <= value <= MAX_LOGPROBS, f"{name} from 0 to {MAX_LOGPROBS}", value
        )
    _check_lists(sampling, vocab_size)


def _check_lists(sampling: SamplingParams, vocab_size: int) -> None:
    bias, words = sampling.logit_bias, sampling.bad_words
    _expect(len(bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} biased tokens", len(bias))
    _expect(len(words) <= MAX_BAD_WORDS, f"at most {MAX_BAD_WORDS} forms of bad words", len(words))
    ids = f"token ids from 0 to {vocab_size - 1}"
    for id, value in bias:
        _expect(0 <= id < vocab_size, f"logit_bias of {ids}", id)
        _expect(-100 <= value <= 100, "a logit_bias from −100 to 100", value)
    for word in words:
        _expect(
            1 <= len(word) <= MAX_BAD_WORD_TOKENS,
            f"bad words of 1 to {MAX_BAD_WORD_TOKENS} tokens",
            len(word),
        )
        for id in word:
            _expect(0 <= id < vocab_size, f"bad words of {ids}", id)


def _expect(holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise RequestError("invalid_sampling", f"expected {expected}, got {got}")
