"""Serve settings: what is derived, counted by hand, and what is refused, with its sentence."""

from __future__ import annotations

import math
from typing import Any

import pytest

from engine.config import ModelConfig
from python_backend.replay import ReplayRule
from python_backend.settings import CoreLimits, ServeSettings, SettingsError

GIB = 1 << 30


def resolve(config: ModelConfig, available_bytes: int = GIB, **settings: Any) -> CoreLimits:
    return ServeSettings.from_options(settings).resolve(config, available_bytes)


def test_defaults_follow_the_window(tiny_config: ModelConfig) -> None:
    """TINY: window 8, 1,024 positions, 4-grams."""
    bounds = resolve(tiny_config)
    assert (bounds.window, bounds.global_page_tokens, bounds.window_page_tokens) == (8, 16, 2)
    assert (bounds.max_batch_size, bounds.max_num_tokens, bounds.max_seq_len) == (64, 2048, 1024)
    assert bounds.replay == ReplayRule(8, 8, 8, 16)
    assert bounds.history_width == 3
    assert bounds.num_window_pages == 64 * (4 + 2) + 1024 + 1
    assert bounds.global_columns == 64
    assert bounds.window_columns == math.ceil((7 + 2048) / 2) + 1
    # Memory is plenty, so the pool is what 64 requests of 64 pages can fill, and the null page.
    assert bounds.num_global_pages == 64 * 64 + 1


def test_pages_are_what_the_bytes_hold(tiny_config: ModelConfig) -> None:
    """TINY by hand. A global page of 16 tokens: sources 2 and 4 hold 8 entries each, source 6
    holds 16: 32 entries of 36 (main, 64 dims) + 17 (index, 32 dims) bytes = 1,696. A window page of
    2 rows: 14 layers of 66 bytes = 1,848. A slot's tails: 2 sources · 8 rows · 128 floats."""
    window_pages = 4 * 6 + 16 + 1
    private = window_pages * 1848 + 4 * 2 * 8 * 128 * 4
    for num_pages in (2, 50):
        bounds = resolve(
            tiny_config,
            max_batch_size=4,
            max_num_tokens=32,
            kv_cache_memory_bytes=private + num_pages * 1696 + 1695,
        )
        assert bounds.num_window_pages == window_pages
        assert bounds.num_global_pages == num_pages
    with pytest.raises(SettingsError, match=f"at least {private + 2 * 1696} bytes"):
        resolve(
            tiny_config,
            max_batch_size=4,
            max_num_tokens=32,
            kv_cache_memory_bytes=private + 2 * 1696 - 1,
        )


@pytest.mark.parametrize(
    "asked", [{"kv_cache_memory_bytes": GIB + 1696}, {"num_global_pages": GIB // 1696 + 1}]
)
def test_caches_beyond_the_free_memory_are_refused(
    tiny_config: ModelConfig, asked: dict[str, int]
) -> None:
    """Pages are touched long after start-up, so too large a pool would end a serving process."""
    with pytest.raises(SettingsError, match=f"at most {GIB} bytes, the memory that is free, got"):
        resolve(tiny_config, GIB, **asked)
    name, count = next(iter(asked.items()))
    resolve(tiny_config, 2 * GIB, **{name: count})


def test_plain_values_take_more_bytes(tiny_config: ModelConfig) -> None:
    """Without cache quantisation in float64: entries of (64 + 32) · 8 bytes, rows of 64 · 8."""
    private = (4 * 6 + 16 + 1) * 2 * 14 * 64 * 8 + 4 * 2 * 8 * 128 * 8
    bounds = resolve(
        tiny_config,
        max_batch_size=4,
        max_num_tokens=32,
        dtype="float64",
        cache_quant=False,
        kv_cache_memory_bytes=private + 7 * 32 * 96 * 8,
    )
    assert bounds.num_global_pages == 7


def test_fraction_of_the_memory_at_hand(tiny_config: ModelConfig) -> None:
    half = resolve(tiny_config, 8_000_000, kv_cache_memory_fraction=0.5)
    same = resolve(tiny_config, kv_cache_memory_bytes=4_000_000)
    assert half.num_global_pages == same.num_global_pages < 64 * 64


def test_exact_mode(tiny_config: ModelConfig) -> None:
    """12 layers · 7 rows, and no decoder trimming."""
    bounds = resolve(tiny_config, swa_bounded_replay=False)
    assert bounds.replay == ReplayRule(8, 84, None, 16)


def test_replay_length_is_a_setting_of_its_own(tiny_config: ModelConfig) -> None:
    assert resolve(tiny_config, replay_length=24).replay == ReplayRule(8, 24, 24, 16)
    assert resolve(tiny_config, replay_length=2).replay == ReplayRule(8, 2, 2, 16)
    # Without a replayed row the last prompt row still makes the first token.
    assert resolve(tiny_config, replay_length=0).replay == ReplayRule(8, 0, 1, 16)
    with pytest.raises(SettingsError, match="replay_length of at least 0, got -1"):
        resolve(tiny_config, replay_length=-1)
    with pytest.raises(SettingsError, match="drop one of the two"):
        resolve(tiny_config, replay_length=24, swa_bounded_replay=False)


def test_names_and_text_as_options_give_them() -> None:
    settings = ServeSettings.from_options(
        {
            "max-num-tokens": "4096",
            "swa_bounded_replay": "False",
            "kv-cache-memory-fraction": "0.25",
            "dtype": "float64",
            "max_seq_len": None,
        }
    )
    assert settings == ServeSettings(
        max_num_tokens=4096,
        swa_bounded_replay=False,
        kv_cache_memory_fraction=0.25,
        dtype="float64",
    )


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"max_tokens_per_step": 1}, "expected one of the settings .*got 'max_tokens_per_step'"),
        ({"max-num-tokens": 1, "max_num_tokens": 2}, "max_num_tokens once, got it in both"),
        ({"max_num_tokens": "many"}, "max_num_tokens to be a whole number, got 'many'"),
        ({"max_num_tokens": 2048.5}, "max_num_tokens to be a whole number, got 2048.5"),
        ({"max_num_tokens": True}, "max_num_tokens to be a whole number, got True"),
        ({"max_batch_size": None}, "max_batch_size to be a whole number, got None"),
        ({"max_batch_size": 0}, "max_batch_size of at least 1, got 0"),
        ({"max_batch_size": -3}, "max_batch_size of at least 1, got -3"),
        ({"prefix_cache": "maybe"}, "prefix_cache to be true or false, got 'maybe'"),
        ({"kv_cache_memory_fraction": "nan"}, "kv_cache_memory_fraction to be a number"),
        ({"kv_cache_memory_fraction": 1.5}, "above 0 and at most 1, got 1.5"),
        ({"dtype": "float16"}, "one of float64, float32, bfloat16, got 'float16'"),
        ({"dtype": 32}, "dtype to be text, got 32"),
        ({"num_global_pages": 1}, "num_global_pages of at least 2, got 1"),
    ],
)
def test_bad_options_are_refused(options: dict[str, object], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        ServeSettings.from_options(options)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"max_num_tokens": 15}, "max_num_tokens of at least 16, two windows of 8.*got 15"),
        ({"max_num_tokens": 16}, "at least max_batch_size = 64.*got 16"),
        ({"max_seq_len": 1}, "max_seq_len of at least 2, .*, got 1"),
        ({"max_seq_len": 1025}, "max_seq_len of at most 1024"),
        ({"global_page_tokens": 15}, "global_page_tokens to be a multiple of 2"),
        (
            {"num_window_pages": 1408},
            r"at least 1409 \(pages of 2 rows for 64 requests with a window of 8 and 2048 rows a "
            r"step\), got 1408",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_at_start_up(
    tiny_config: ModelConfig, settings: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SettingsError, match=sentence):
        resolve(tiny_config, **settings)


def test_two_windows_of_budget_are_enough(tiny_config: ModelConfig) -> None:
    assert resolve(tiny_config, max_num_tokens=16, max_batch_size=16).max_num_tokens == 16


def test_window_pages_may_be_given_when_they_suffice(tiny_config: ModelConfig) -> None:
    """64 pages of 8 rows for prompts of any length: 8 · 3 + 256 / 8 + 1 = 57 are needed."""
    bounds = resolve(
        tiny_config.with_changes(max_position_embeddings=40_000),
        max_batch_size=8,
        max_num_tokens=256,
        window_page_tokens=8,
        num_window_pages=64,
    )
    assert (bounds.num_window_pages, bounds.max_seq_len) == (64, 40_000)
