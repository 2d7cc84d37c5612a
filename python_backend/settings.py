"""Serve settings: what an operator may choose, checked, and the numbers that follow from it.

`ServeSettings` is what was asked (options, a YAML mapping, or parameters of a Triton model).
`ServeSettings.resolve` combines it with the model's dims and the memory at hand into
`CoreLimits`, the only thing that the scheduler, the pools and an executor's memory are built from:
one place where page counts come from, so start-up and admission cannot disagree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine.cache_sizes import (
    default_global_page_tokens,
    default_window_page_rows,
    global_page_bytes,
    page_granule,
    tail_bytes,
    window_page_bytes,
)
from engine.config import ModelConfig
from python_backend.drafting.rule import DraftRule
from python_backend.kv.window_pool import pages_for, pages_per_request
from python_backend.replay import ReplayRule

DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}
EXECUTORS = ("torch", "plan")
DEVICES = ("cpu", "cuda")
DEFAULT_SURVIVAL = 0.1
MAX_JUDGED_LOGITS = 1 << 25
DEFAULT_QUEUED_REQUESTS = 1024
DEFAULT_QUEUED_TOKENS = 16_777_216  # 64 MiB of token ids


class SettingsError(ValueError):
    """Settings that cannot work; the message says what to change."""


@dataclass(frozen=True)
class CoreLimits:
    """The numbers that a core runs with. Page counts include the null page of each pool.

    Tokens and rows are the same unit: `max_num_tokens` rows a step, `window_page_tokens` rows of a
    window page. `history_width` is the number of token ids before a row that Engram layers hash.
    """

    vocab_size: int
    window: int
    history_width: int
    max_num_tokens: int
    max_batch_size: int
    max_seq_len: int
    global_page_tokens: int
    window_page_tokens: int
    num_global_pages: int
    num_window_pages: int
    replay: ReplayRule
    prefix_cache: bool
    draft: DraftRule | None = None  # None: nobody drafts
    max_queued_requests: int = DEFAULT_QUEUED_REQUESTS
    max_queued_tokens: int = DEFAULT_QUEUED_TOKENS
    step_seconds: float | None = None  # that prompts add to a step; None: up to max_num_tokens

    @property
    def max_judged_rows(self) -> int:
        """Prompt rows whose logits one step may make: as many as 128 MiB of float32 hold."""
        return max(1, MAX_JUDGED_LOGITS // self.vocab_size)

    @property
    def most_drafts(self) -> int:
        """Drafts that one request may verify in a step."""
        return 0 if self.draft is None else self.draft.most

    @property
    def global_columns(self) -> int:
        """Columns of the global page table: a request of `max_seq_len` tokens."""
        return -(-self.max_seq_len // self.global_page_tokens)

    @property
    def window_columns(self) -> int:
        """Columns of the window table's ring: a request that has a whole step to itself."""
        return pages_per_request(self.window, self.window_page_tokens, self.max_num_tokens)

    def num_pages_for(self, num_prompt_tokens: int, max_tokens: int) -> int:
        """Global pages of a whole request. Its last token is never run, so it needs no place."""
        return -(-(num_prompt_tokens + max_tokens - 1) // self.global_page_tokens)

    def longest_answer(self, num_prompt_tokens: int) -> int:
        """The largest `max_tokens` that this prompt leaves; below 1 when it leaves none."""
        held = (self.num_global_pages - 1) * self.global_page_tokens + 1
        return min(self.max_seq_len, held) - num_prompt_tokens


@dataclass(frozen=True)
class ServeSettings:
    """What an operator may set. None means "derived", as said beside each field."""

    dtype: str = "float32"
    executor: str = "torch"  # or "plan": the engine's TensorRT plans, on a GPU
    device: str = "cpu"  # of the torch executor: or "cuda"
    cuda_graphs: bool = True  # on a GPU: replay steps of few sizes as CUDA graphs
    compile_kernels: bool = True  # on a GPU: those that the engine lacks; False refuses them
    engram_on_host: bool = False  # on a GPU: leave the Engram tables in pinned host memory
    cache_quant: bool = True  # packed FP4/FP8 cache records, as the model was trained
    max_batch_size: int = 64  # requests running at once
    max_num_tokens: int = 2048  # rows of one step: decode rows, prefill chunks and replayed rows
    max_seq_len: int | None = None  # prompt and output; None: the model's limit
    kv_cache_memory_bytes: int | None = None  # all pools together; None: by fraction
    kv_cache_memory_fraction: float = 0.5  # of the memory at hand, never more than can be used
    global_page_tokens: int | None = None  # the granule of prefix hits; None: 2 windows
    window_page_tokens: int | None = None  # None: a quarter of the window
    num_global_pages: int | None = None  # with the null page; None: what the memory holds
    num_window_pages: int | None = None  # with the null page; None: what always suffices
    prefix_cache: bool = True
    swa_bounded_replay: bool = True
    replay_length: int | None = None  # rows replayed after a hit, from 0 on; None: one window
    speculative: bool = False  # draft tokens with the model's DSpark stages and verify them
    max_queued_requests: int = DEFAULT_QUEUED_REQUESTS  # that wait; more are refused
    max_queued_tokens: int = DEFAULT_QUEUED_TOKENS  # theirs, prompts and max_tokens together
    kv_events: str | None = None  # a ZeroMQ endpoint for events of the prefix cache
    num_speculative_tokens: int | None = None  # verified at most a step; None: a whole block
    speculative_threshold: float = DEFAULT_SURVIVAL  # least P(accepted) of a draft to verify
    speculative_schedule: bool = True  # of those, verify as many as the measured cost of rows pays

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise SettingsError(
                f"expected dtype to be one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}"
            )
        if self.executor not in EXECUTORS:
            raise SettingsError(
                f"expected executor to be one of {', '.join(EXECUTORS)}, got {self.executor!r}"
            )
        if self.device not in DEVICES:
            raise SettingsError(
                f"expected device to be one of {', '.join(DEVICES)}, got {self.device!r}"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name == "replay_length" else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise SettingsError(f"expected {field.name} of at least {least}, got {value}")
        if self.num_global_pages == 1:
            raise SettingsError(
                "expected num_global_pages of at least 2, got 1, which is the null page"
            )
        if not 0.0 < self.kv_cache_memory_fraction <= 1.0:
            raise SettingsError(
                "expected kv_cache_memory_fraction above 0 and at most 1, got "
                f"{self.kv_cache_memory_fraction}"
            )
        if not 0.0 <= self.speculative_threshold <= 1.0:
            raise SettingsError(
                "expected speculative_threshold from 0 (verify every draft) to 1, got "
                f"{self.speculative_threshold}"
            )
        if self.num_speculative_tokens is not None and not self.speculative:
            raise SettingsError(
                f"expected num_speculative_tokens with speculative on only, got "
                f"{self.num_speculative_tokens}; turn it on or drop the number"
            )
        if self.replay_length is not None and not self.swa_bounded_replay:
            raise SettingsError(
                f"expected no replay_length with swa_bounded_replay off, got {self.replay_length}; "
                "the exact mode replays what exactness needs, drop one of the two"
            )

    @staticmethod
    def from_options(options: Mapping[str, Any]) -> ServeSettings:
        """Settings from names with - or _, values typed or as text ("true", "2048").

        Raises SettingsError for an unknown name, a name given twice or a value of another type.
        """
        known = {field.name: str(field.type) for field in fields(ServeSettings)}
        values: dict[str, Any] = {}
        for option, value in options.items():
            name = option.replace("-", "_")
            if name not in known:
                raise SettingsError(
                    f"expected one of the settings {', '.join(known)}, got {option!r}"
                )
            if name in values:
                raise SettingsError(f"expected {name} once, got it in both spellings; drop one")
            values[name] = _read(name, known[name], value)
        return ServeSettings(**values)

    def resolve(self, config: ModelConfig, available_bytes: int) -> CoreLimits:
        """The limits of a core of this model with `available_bytes` of memory for its state.

        Raises SettingsError when the settings cannot serve the model.
        """
        window = config.sliding_window
        page_tokens = self.global_page_tokens or default_global_page_tokens(config)
        if page_tokens % page_granule(config):
            raise SettingsError(
                f"expected global_page_tokens to be a multiple of {page_granule(config)}, so that "
                f"no compressed entry straddles pages, got {page_tokens}"
            )
        page_rows = self.window_page_tokens or default_window_page_rows(config)
        max_seq_len = self.max_seq_len or config.max_position_embeddings
        if max_seq_len < 2:
            raise SettingsError(
                f"expected max_seq_len of at least 2, a prompt and an answer of a token, got "
                f"{max_seq_len}"
            )
        if max_seq_len > config.max_position_embeddings:
            raise SettingsError(
                f"expected max_seq_len of at most {config.max_position_embeddings}, the model's "
                f"max_position_embeddings, got {max_seq_len}"
            )
        self._check_token_budget(window)
        num_window_pages = self._window_pages(window, page_rows)
        private_bytes, page_bytes = self._cache_bytes(
            config, page_tokens, page_rows, num_window_pages
        )
        num_global_pages = self.num_global_pages or self._global_pages(
            available_bytes,
            private_bytes,
            page_bytes,
            most=self.max_batch_size * -(-max_seq_len // page_tokens) + 1,
        )
        total_bytes = private_bytes + num_global_pages * page_bytes
        if total_bytes > available_bytes:
            raise SettingsError(
                f"expected caches of at most {available_bytes} bytes, the memory that is free, got "
                f"{total_bytes} ({private_bytes} for the windows of {self.max_batch_size} requests "
                f"and {self.max_num_tokens} rows a step, {num_global_pages} global pages of "
                f"{page_bytes}); lower kv_cache_memory_bytes, num_global_pages, max_batch_size or "
                "max_num_tokens"
            )
        return CoreLimits(
            vocab_size=config.vocab_size,
            window=window,
            history_width=config.engram_max_ngram_size - 1,
            max_num_tokens=self.max_num_tokens,
            max_batch_size=self.max_batch_size,
            max_seq_len=max_seq_len,
            global_page_tokens=page_tokens,
            window_page_tokens=page_rows,
            num_global_pages=num_global_pages,
            num_window_pages=num_window_pages,
            replay=self._replay_rule(config, page_tokens),
            prefix_cache=self.prefix_cache,
            draft=self._draft_rule(config),
            max_queued_requests=self.max_queued_requests,
            max_queued_tokens=self.max_queued_tokens,
        )

    def _draft_rule(self, config: ModelConfig) -> DraftRule | None:
        if not self.speculative:
            return None
        if not config.num_nextn_predict_layers:
            raise SettingsError(
                "expected speculative with a model that has draft stages, got one without "
                "(num_nextn_predict_layers is 0); leave it out"
            )
        block = config.dspark_block_size
        most = block if self.num_speculative_tokens is None else self.num_speculative_tokens
        if most > block:
            raise SettingsError(
                f"expected num_speculative_tokens of at most {block}, the model's draft block, "
                f"got {most}"
            )
        return DraftRule(most, self.speculative_threshold, by_cost=self.speculative_schedule)

    def _check_token_budget(self, window: int) -> None:
        if self.max_num_tokens < 2 * window:
            raise SettingsError(
                f"expected max_num_tokens of at least {2 * window}, two windows of {window}, so "
                f"that a replay leaves room for new tokens, got {self.max_num_tokens}; raise it"
            )
        if self.max_num_tokens < self.max_batch_size:
            raise SettingsError(
                f"expected max_num_tokens of at least max_batch_size = {self.max_batch_size}, so "
                f"that every running request can decode, got {self.max_num_tokens}; raise it or "
                "lower max_batch_size"
            )

    def _window_pages(self, window: int, page_rows: int) -> int:
        needed = pages_for(window, page_rows, self.max_batch_size, self.max_num_tokens)
        if self.num_window_pages is not None and self.num_window_pages < needed:
            raise SettingsError(
                f"expected num_window_pages of at least {needed} (pages of {page_rows} rows for "
                f"{self.max_batch_size} requests with a window of {window} and "
                f"{self.max_num_tokens} rows a step), got {self.num_window_pages}; raise it, or "
                "lower max_batch_size or max_num_tokens"
            )
        return self.num_window_pages or needed

    def _replay_rule(self, config: ModelConfig, page_tokens: int) -> ReplayRule:
        window = config.sliding_window
        if self.swa_bounded_replay:
            length = window if self.replay_length is None else self.replay_length
            tail = max(length, 1)
        else:
            length, tail = max(config.exact_replay_length, window), None
        return ReplayRule(
            window=window,
            replay_length=length,
            decoder_tail=tail,
            global_page_tokens=page_tokens,
        )

    def _cache_bytes(
        self, config: ModelConfig, page_tokens: int, page_rows: int, num_window_pages: int
    ) -> tuple[int, int]:
        """Bytes of all private state, and of one global page."""
        value_bytes = None if self.cache_quant else DTYPE_BYTES[self.dtype]
        window_bytes = num_window_pages * window_page_bytes(
            config, page_rows, value_bytes=value_bytes
        )
        slot_bytes = tail_bytes(config, value_bytes=max(4, DTYPE_BYTES[self.dtype]))
        page_bytes = global_page_bytes(config, page_tokens, value_bytes=value_bytes)
        return window_bytes + self.max_batch_size * slot_bytes, page_bytes

    def _global_pages(
        self, available_bytes: int, private_bytes: int, page_bytes: int, *, most: int
    ) -> int:
        """What the budget holds beside the private state. By fraction, at most what
        `max_batch_size` requests of full length can fill."""
        budget = self.kv_cache_memory_bytes or int(available_bytes * self.kv_cache_memory_fraction)
        num_pages = (budget - private_bytes) // page_bytes
        if num_pages < 2:
            raise SettingsError(
                f"expected at least {private_bytes + 2 * page_bytes} bytes for the caches "
                f"({private_bytes} for the windows of {self.max_batch_size} requests and "
                f"{self.max_num_tokens} rows a step, {page_bytes} a global page), got {budget}; "
                "give more memory, or lower max_batch_size or max_num_tokens"
            )
        return num_pages if self.kv_cache_memory_bytes else min(num_pages, most)


def _read(name: str, kind: str, value: Any) -> Any:
    """`value` as the field's type; text is converted, nothing else is."""
    optional = kind.endswith(" | None")
    kind = kind.removesuffix(" | None")
    if value is None and optional:
        return None
    read: Any
    if kind == "bool":
        read = {"true": True, "false": False}.get(str(value).lower())
    elif kind == "int":
        read = _read_number(int, value)
    elif kind == "float":
        read = _read_number(float, value)
    else:
        read = value if isinstance(value, str) else None
    if read is None:
        raise SettingsError(f"expected {name} to be {_KINDS[kind]}, got {value!r}")
    return read


_KINDS = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text"}


def _read_number(kind: type[int] | type[float], value: Any) -> int | float | None:
    accepted = (int, str) if kind is int else (int, float, str)
    if isinstance(value, bool) or not isinstance(value, accepted):
        return None
    try:
        number = kind(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None
