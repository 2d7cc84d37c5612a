"""A request as the scheduler sees it: its tokens, and what of them the prefix cache knows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from python_backend.kv.block_hash import BlockChain
from python_backend.kv.prefix_cache import ROOT, ChainLink
from python_backend.metrics.latency import Moments
from python_backend.request import Request

Int32Array = npt.NDArray[np.int32]

NO_SLOT = -1


class TrackedRequest:
    """`tokens` has room for prompt and outputs. While the request runs, its newest outputs stand
    in the slot table only; `num_tokens` tokens are valid here. `chain` is None when the request
    takes no part in prefix caching.

    `cached_tokens` is the hit of the first admission: a resume must not change what was reported.
    `num_judged` prompt tokens have had their log probability delivered, the first one counted as
    judged: nothing stands before it.
    """

    __slots__ = (
        "arrival",
        "cached_tokens",
        "chain",
        "link",
        "moments",
        "num_admissions",
        "num_judged",
        "num_prompt_tokens",
        "num_tokens",
        "request",
        "slot",
        "tokens",
    )

    def __init__(self, request: Request, chain: BlockChain | None, arrived: float = 0.0) -> None:
        self.request = request
        self.arrival: int | None = None  # its number, once it is queued
        self.moments = Moments(arrived)
        self.num_prompt_tokens = self.num_tokens = len(request.input_ids)
        self.tokens: Int32Array = np.empty(self.token_limit, dtype=np.int32)
        self.tokens[: self.num_tokens] = request.input_ids
        self.chain = chain
        self.link: ChainLink = ROOT
        self.slot = NO_SLOT
        self.cached_tokens = 0
        self.num_admissions = 0
        self.num_judged = 1

    @property
    def wants_prompt_judged(self) -> bool:
        """All of its prompt runs through the decoder, and the prefix cache is not asked."""
        return self.request.sampling.prompt_logprobs is not None

    @property
    def is_judging(self) -> bool:
        """Log probabilities of its prompt are still to come."""
        return self.wants_prompt_judged and self.num_judged < self.num_prompt_tokens

    @property
    def token_limit(self) -> int:
        return self.num_prompt_tokens + self.request.max_tokens

    def blocks(self, count: int, page_tokens: int) -> Int32Array:
        """The first `count` full blocks, int32 [count, page_tokens], a view."""
        return self.tokens[: count * page_tokens].reshape(count, page_tokens)
