"""Configurations: three spellings of one model, and each way of being wrong."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from engine.config import ConfigError
from engine.config_reader import read_config, read_config_file

# The released flat file, as published.
FLAT: dict[str, Any] = {
    "vocab_size": 129280,
    "dim": 5120,
    "n_layers": 40,
    "n_heads": 64,
    "head_dim": 512,
    "rope_head_dim": 64,
    "q_lora_rank": 1280,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "window_size": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layers": [2, 8, 14, 20],
    "index_source_layers": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 512,
    "candidate_source_layer": 20,
    "candidate_topk_blocks": 2048,
    "candidate_block_size": 8,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_factor": 16,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_seq_len": 65536,
    "norm_eps": 1e-20,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "n_routed_experts": 384,
    "n_activated_experts": 6,
    "n_shared_experts": 1,
    "moe_inter_dim": 2304,
    "score_func": "sqrtsoftplus",
    "route_scale": 1.5,
    "swiglu_limit": 10.0,
    "engram_layer_ids": [1, 14],
    "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4,
    "engram_n_heads": 8,
    "engram_head_dim": 256,
    "engram_vocab_size": 16000000,
    "engram_compressed_vocab_size": 99092,
    "engram_pad_id": 2,
    "n_mtp_layers": 3,
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39],
    "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128,
    "dspark_n_activated_experts": 3,
    "dtype": "fp8",
    "expert_dtype": "fp4",
    "scale_fmt": "ue8m0",
    "vision_n_layers": 32,
    "vision_dim": 1024,
}


@pytest.fixture
def raw(tiny_dir: Path) -> dict[str, Any]:
    """The golden checkpoint's nested file, free to be changed."""
    result: dict[str, Any] = json.loads((tiny_dir / "config.json").read_text())
    return result


def refused(raw: dict[str, Any], *mentions: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config(raw)
    message = str(caught.value)
    assert "\n" not in message
    for mention in mentions:
        assert mention in message


def test_flat_spelling_reads_the_published_values() -> None:
    config, warnings = read_config(FLAT)
    assert (config.hidden_size, config.sliding_window, config.decoder_start) == (5120, 128, 20)
    assert config.max_position_embeddings == 1048576
    assert config.dspark_num_experts_per_tok == 3
    assert config.pair_source_layer_ids == (2, 8, 14)
    assert [config.index_source(layer) for layer in (3, 19, 23, 24, 39)] == [2, 14, 20, 24, 36]
    assert len(warnings) == 1
    assert "vision" in warnings[0]


def test_yarn_frequencies_of_the_published_values() -> None:
    config, _ = read_config(FLAT)
    frequencies = config.inv_freq(20)
    published = {
        0: 1.0,
        14: 0.00528685632,
        15: 0.00363553858,
        16: 0.002265625,
        20: 0.000296977778,
        24: 1.953125e-05,
        25: 5.37231267e-06,
        31: 5.68052904e-07,
    }
    for k, value in published.items():
        assert frequencies[k] == pytest.approx(value, rel=1e-8)
    assert config.inv_freq(0)[31] == pytest.approx(10000.0 ** (-62 / 64), rel=1e-12)


def test_nested_and_own_spelling_are_one_configuration(raw: dict[str, Any]) -> None:
    config, warnings = read_config(raw)
    assert warnings == []
    assert (config.vocab_size, config.moe_intermediate_size) == (512, 64)
    assert read_config(config.to_dict()) == (config, [])
    assert read_config(json.loads(json.dumps(config.to_dict()))) == (config, [])


def test_top_level_tokens_reach_the_configuration(raw: dict[str, Any]) -> None:
    raw |= {"bos_token_id": 7, "eos_token_id": 8, "pad_token_id": 9, "image_token_id": 11}
    config, _ = read_config(raw)
    assert (config.bos_token_id, config.eos_token_id) == (7, 8)
    assert (config.pad_token_id, config.image_token_id) == (9, 11)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_key_value_heads", 8),
        ("scoring_func", "softmax"),
        ("score_func", "sigmoid"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("tie_word_embeddings", True),
        ("first_k_dense_replace", 3),
        ("num_hash_layers", 3),
        ("n_group", 8),
        ("rope_interleave", False),
        ("moe_layer_freq", 2),
        # Names that nothing here knows, but that say what they change.
        ("attn_logit_softcap", 30.0),
        ("num_dense_layers", 2),
        ("residual_multiplier", 0.22),
        ("rope_parameters", {"rope_type": "yarn"}),
        ("layer_types", ["sliding_attention"]),
    ],
)
def test_variant_with_a_meaning_is_refused(raw: dict[str, Any], key: str, value: object) -> None:
    raw["text_config"][key] = value
    refused(raw, key)


def test_variant_at_the_top_level_is_refused_too(raw: dict[str, Any]) -> None:
    raw["tie_word_embeddings"] = True
    refused(raw, "tie_word_embeddings")


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_dense_layers", 0), ("attn_logit_softcap", None), ("favourite_colour", "blue")],
)
def test_key_without_a_meaning_warns(raw: dict[str, Any], key: str, value: object) -> None:
    expected, _ = read_config(copy.deepcopy(raw))
    raw["text_config"][key] = value
    config, warnings = read_config(raw)
    assert config == expected
    assert len(warnings) == 1
    assert key in warnings[0]


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        ({"rope_type": "linear"}, ("rope_type", "linear")),
        ({"type": "longrope"}, ("rope_type", "longrope")),
        ({"mscale": 1.0}, ("mscale",)),
        ({"factor": "16"}, ("factor",)),
    ],
)
def test_other_rotary_embeddings_are_refused(
    raw: dict[str, Any], change: dict[str, Any], mentions: tuple[str, ...]
) -> None:
    raw["text_config"]["rope_scaling"] |= change
    refused(raw, *mentions)


def test_rope_type_may_be_spelled_type(raw: dict[str, Any]) -> None:
    scaling = raw["text_config"]["rope_scaling"]
    scaling["type"] = scaling.pop("rope_type")
    assert read_config(raw)[0].rope_factor == 16.0
    del scaling["type"]
    refused(raw, "rope_type")


@pytest.mark.parametrize(
    ("change", "mention"),
    [
        ({"weight_block_size": [128, 128]}, "weight_block_size"),
        ({"quant_method": "awq"}, "quant_method"),
        ({"moe_quant_algo": "NVFP4"}, "moe_quant_algo"),
        ({"scale_fmt": "float32"}, "scale_fmt"),
        ({"activation_scheme": "static"}, "activation_scheme"),
    ],
)
def test_other_quantisation_is_refused(
    raw: dict[str, Any], change: dict[str, Any], mention: str
) -> None:
    released = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [32, 32],
        "scale_fmt": "ue8m0",
        "expert_dtype": "fp4",
        "modules_to_not_convert": ["head"],
    }
    raw["quantization_config"] = released
    assert read_config(raw)[1] == []
    raw["quantization_config"] = released | change
    refused(raw, mention)


@pytest.mark.parametrize(
    ("change", "mentions"),
    [
        ({"compress_ratios": [0, 0, 2, 2]}, ("compress_ratios", "14", "4")),
        ({"compress_ratios": [0, 0, 4, 4] + [1] * 8 + [0, 0]}, ("compress_ratios",)),
        ({"compress_ratios": [0, 0] + [2] * 4 + [1] * 7 + [0]}, ("compress_ratios", "draft")),
        (
            {"compress_ratios": [0, 0, 2, 2, 1, 2] + [1] * 6 + [0, 0]},
            ("compress_ratios", "layer 5"),
        ),
        ({"compress_ratios": [0, 2, 2, 2, 2, 2] + [1] * 6 + [0, 0]}, ("layer 1", "no source")),
        ({"compress_ratios": [0, 0, 0, 2, 2, 2] + [1] * 6 + [0, 0]}, ("layer 2",)),
        ({"kv_source_layer_ids": [4, 2, 6]}, ("kv_source_layer_ids", "ascending")),
        ({"kv_source_layer_ids": [2, 4, 12]}, ("kv_source_layer_ids",)),
        ({"kv_source_layer_ids": []}, ("kv_source_layer_ids",)),
        ({"index_source_layer_ids": [2, 6, 8]}, ("index_source_layer_ids", "[4]")),
        ({"index_source_layer_ids": [2, 4, 6, 6]}, ("index_source_layer_ids",)),
        ({"candidate_source_layer_id": 4}, ("candidate_source_layer_id", "6")),
        ({"candidate_topk_blocks": 2, "candidate_block_size": 2}, ("candidate_topk_blocks", "3")),
        ({"head_dim": 48}, ("head_dim", "48")),
        ({"index_head_dim": 40}, ("index_head_dim", "40")),
        ({"hidden_size": 100}, ("hidden_size",)),
        ({"qk_rope_head_dim": 48}, ("qk_rope_head_dim",)),
        ({"qk_rope_head_dim": 15}, ("qk_rope_head_dim",)),
        ({"sliding_window": 0}, ("sliding_window",)),
        ({"sliding_window": 2048}, ("sliding_window", "max_position_embeddings")),
        ({"o_groups": 3}, ("o_groups",)),
        ({"n_shared_experts": 2}, ("n_shared_experts",)),
        ({"num_experts_per_tok": 9}, ("num_experts_per_tok", "8")),
        ({"dspark_noise_token_id": 512}, ("dspark_noise_token_id", "512")),
        ({"dspark_target_layer_ids": [5, 11]}, ("dspark_target_layer_ids",)),
        ({"engram_layer_ids": [1, 7]}, ("engram_layer_ids", "7")),
        ({"engram_num_embeddings": [660]}, ("engram_num_embeddings",)),
        ({"rms_norm_eps": -1e-20}, ("rms_norm_eps",)),
        ({"rope_theta": float("nan")}, ("rope_theta",)),
        ({"vocab_size": "512"}, ("vocab_size", "integer")),
        ({"vocab_size": 512.5}, ("vocab_size", "integer")),
        ({"vocab_size": True}, ("vocab_size", "integer")),
        ({"hc_eps": "small"}, ("hc_eps", "number")),
        ({"kv_source_layer_ids": 2}, ("kv_source_layer_ids", "list")),
        ({"dim": 256}, ("dim", "hidden_size")),
    ],
)
def test_wrong_value_is_refused(
    raw: dict[str, Any], change: dict[str, Any], mentions: tuple[str, ...]
) -> None:
    raw["text_config"] |= change
    refused(raw, *mentions)


def test_just_enough_candidate_blocks(raw: dict[str, Any]) -> None:
    raw["text_config"] |= {"candidate_topk_blocks": 4, "candidate_block_size": 1}
    assert read_config(raw)[0].index_topk == 4  # (4 − 1)·1 + 1
    raw["text_config"] |= {"candidate_topk_blocks": 3}
    refused(raw, "candidate_topk_blocks")


def test_missing_key_names_both_spellings(raw: dict[str, Any]) -> None:
    del raw["text_config"]["sliding_window"]
    refused(raw, "sliding_window", "window_size")


def test_model_without_draft_stages(raw: dict[str, Any]) -> None:
    raw["text_config"] |= {
        "num_nextn_predict_layers": 0,
        "compress_ratios": raw["text_config"]["compress_ratios"][:12],
        "dspark_target_layer_ids": [],
    }
    assert read_config(raw)[0].num_layers_total == 12


def test_missing_and_damaged_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config_file(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="JSON"):
        read_config_file(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="object"):
        read_config_file(tmp_path / "config.json")
