"""What is refused at once, before a request enters the queue. Safe from any thread."""

from __future__ import annotations

import numpy as np

from python_backend.generation.checks import check_sampling
from python_backend.request import Request, RequestError
from python_backend.scheduler.slots import MAX_END_IDS
from python_backend.settings import CoreLimits


def check_request(request: Request, limits: CoreLimits) -> None:
    """Raise RequestError for what this core can never serve."""
    _check_prompt(request, limits)
    _check_lengths(request, limits)
    check_sampling(request.sampling, limits.vocab_size)
    if len(request.end_ids) > MAX_END_IDS:
        raise RequestError(
            "too_many_end_ids",
            f"expected at most {MAX_END_IDS} end ids, got {len(request.end_ids)}; send fewer",
        )
    for end_id in request.end_ids:
        if not 0 <= end_id < limits.vocab_size:
            raise RequestError(
                "token_out_of_range",
                f"expected end ids from 0 to {limits.vocab_size - 1}, got {end_id}",
            )


def _check_prompt(request: Request, limits: CoreLimits) -> None:
    ids = request.input_ids
    if ids.dtype != np.int32 or ids.ndim != 1 or not ids.flags.c_contiguous:
        raise RequestError(
            "invalid_input_ids",
            f"expected input_ids as one contiguous int32 vector, got {ids.dtype} {ids.shape}",
        )
    if not len(ids):
        raise RequestError("empty_prompt", "expected at least one prompt token, got none")
    # Read as unsigned, negative ids are the largest of all: one pass instead of two.
    if int(ids.view(np.uint32).max()) >= limits.vocab_size:
        wrong = int(np.argmax(ids.view(np.uint32) >= limits.vocab_size))
        raise RequestError(
            "token_out_of_range",
            f"expected token ids from 0 to {limits.vocab_size - 1}, got {ids[wrong]} at position "
            f"{wrong}; use this model's tokenizer",
        )


def _check_lengths(request: Request, limits: CoreLimits) -> None:
    num_prompt_tokens, max_tokens = len(request.input_ids), request.max_tokens
    if max_tokens < 1:
        raise RequestError("invalid_max_tokens", f"expected max_tokens ≥ 1, got {max_tokens}")
    if request.sampling.min_tokens > max_tokens:
        raise RequestError(
            "invalid_sampling",
            f"expected min_tokens of at most max_tokens, got {request.sampling.min_tokens} and "
            f"{max_tokens}; raise max_tokens or lower min_tokens",
        )
    if num_prompt_tokens + max_tokens > limits.max_seq_len:
        raise RequestError(
            "too_long",
            f"expected prompt and max_tokens to be at most {limits.max_seq_len} tokens together, "
            f"got {num_prompt_tokens} + {max_tokens}; shorten the prompt or lower max_tokens",
        )
    needed, pages = limits.num_pages_for(num_prompt_tokens, max_tokens), limits.num_global_pages - 1
    if needed > pages:
        raise RequestError(
            "exceeds_cache",
            f"expected a request of at most {pages * limits.global_page_tokens} tokens, what the "
            f"whole cache holds, got {num_prompt_tokens} + {max_tokens}; shorten it or give the "
            "server more cache memory",
        )
