"""Settings of drafting, and the request's own switch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.config import ModelConfig
from python_backend import wire
from python_backend.drafting.rule import DraftRule
from python_backend.settings import ServeSettings, SettingsError

MEMORY = 1 << 30


def rule_of(config: ModelConfig, **options: Any) -> DraftRule | None:
    return ServeSettings.from_options(options).resolve(config, MEMORY).draft


def test_drafting_is_off_unless_asked_for(tiny_config: ModelConfig) -> None:
    assert rule_of(tiny_config) is None
    assert rule_of(tiny_config, speculative="true") == DraftRule(3, 0.1, by_cost=True)


def test_length_and_threshold(tiny_config: ModelConfig) -> None:
    asked = {"speculative": True, "num-speculative-tokens": "2", "speculative_threshold": "0.25"}
    assert rule_of(tiny_config, **asked) == DraftRule(2, 0.25, by_cost=True)
    off = rule_of(tiny_config, **asked, speculative_schedule="false")
    assert off == DraftRule(2, 0.25, by_cost=False)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_speculative_tokens": 4}, "of at most 3, the model's draft block, got 4"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens of at least 1, got 0"),
        ({"speculative_threshold": 1.5}, "from 0 (verify every draft) to 1, got 1.5"),
        ({"speculative": False, "num_speculative_tokens": 2}, "with speculative on only, got 2"),
        ({"speculative": "maybe"}, "expected speculative to be true or false, got 'maybe'"),
    ],
)
def test_what_cannot_work_is_refused(
    tiny_config: ModelConfig, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(SettingsError) as refusal:
        rule_of(tiny_config, **({"speculative": True} | options))
    assert sentence in str(refusal.value)


def test_a_model_without_stages_cannot_draft(tiny_config: ModelConfig) -> None:
    bare = tiny_config.with_changes(
        num_nextn_predict_layers=0,
        compress_ratios=tiny_config.compress_ratios[: tiny_config.num_hidden_layers],
    )
    assert rule_of(bare) is None
    with pytest.raises(SettingsError, match="draft stages, got one without"):
        rule_of(bare, speculative=True)


def test_a_request_may_turn_it_off() -> None:
    prompt = {"input_ids": np.array([[5, 6]], dtype=np.int32)}
    assert wire.read_request(prompt, {}).speculative
    without = prompt | {"speculative": np.array([[False]])}
    assert not wire.read_request(without, {}).speculative
