"""Named configurations: the released model, and two small ones of the same topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine.config import ConfigError, ModelConfig
from engine.config_reader import read_config_file
from engine.config_validation import validate
from plugins.engram import engram_layout

FULL = ModelConfig(
    vocab_size=129280,
    hidden_size=5120,
    num_hidden_layers=40,
    num_attention_heads=64,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=1280,
    o_groups=8,
    o_lora_rank=1024,
    sliding_window=128,
    compress_ratios=(0, 0) + (2,) * 18 + (1,) * 20 + (0,) * 3,
    kv_source_layer_ids=(2, 8, 14, 20),
    index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
    index_n_heads=32,
    index_head_dim=128,
    index_topk=512,
    candidate_source_layer_id=20,
    candidate_topk_blocks=2048,
    candidate_block_size=8,
    rope_theta=10000.0,
    compress_rope_theta=160000.0,
    rope_factor=16.0,
    rope_beta_fast=32.0,
    rope_beta_slow=1.0,
    rope_original_length=65536,
    max_position_embeddings=1048576,
    rms_norm_eps=1e-20,
    hc_mult=4,
    hc_sinkhorn_iters=20,
    hc_eps=1e-6,
    n_routed_experts=384,
    num_experts_per_tok=6,
    n_shared_experts=1,
    moe_intermediate_size=2304,
    routed_scaling_factor=1.5,
    swiglu_limit=10.0,
    engram_layer_ids=(1, 14),
    engram_num_embeddings=(384006168, 384016682),
    engram_max_ngram_size=4,
    engram_n_heads=8,
    engram_head_dim=256,
    engram_vocab_size=16000000,
    engram_compressed_vocab_size=99092,
    engram_pad_token_id=2,
    num_nextn_predict_layers=3,
    dspark_block_size=5,
    dspark_noise_token_id=128799,
    dspark_target_layer_ids=(37, 38, 39),
    dspark_markov_rank=256,
    dspark_n_routed_experts=128,
    dspark_num_experts_per_tok=3,
    image_token_id=129264,
)

# Every mechanism at a size that a CPU runs in float64; the golden vectors use it.
TINY = replace(
    FULL,
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=12,
    num_attention_heads=4,
    head_dim=64,
    qk_rope_head_dim=16,
    q_lora_rank=64,
    o_groups=2,
    o_lora_rank=32,
    sliding_window=8,
    compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1, 0, 0),
    kv_source_layer_ids=(2, 4, 6),
    index_source_layer_ids=(2, 4, 6, 8, 10),
    index_n_heads=16,
    index_head_dim=32,
    index_topk=4,
    candidate_source_layer_id=6,
    candidate_topk_blocks=4,
    candidate_block_size=2,
    rope_original_length=64,
    max_position_embeddings=1024,
    n_routed_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    swiglu_limit=1.0,
    engram_layer_ids=(1, 4),
    engram_num_embeddings=(660, 864),
    engram_n_heads=2,
    engram_head_dim=32,
    engram_vocab_size=101,
    engram_compressed_vocab_size=256,
    num_nextn_predict_layers=2,
    dspark_block_size=3,
    dspark_noise_token_id=500,
    dspark_target_layer_ids=(10, 11),
    dspark_markov_rank=16,
    dspark_n_routed_experts=4,
    dspark_num_experts_per_tok=1,
    image_token_id=None,
)

# TINY's topology with the released heads, windows and cache records, for kernels.
MEDIUM = replace(
    TINY,
    hidden_size=512,
    num_attention_heads=16,
    head_dim=512,
    qk_rope_head_dim=64,
    q_lora_rank=128,
    o_lora_rank=64,
    sliding_window=128,
    index_n_heads=32,
    index_head_dim=128,
    index_topk=512,
    candidate_topk_blocks=128,
    candidate_block_size=8,
    rope_original_length=65536,
    max_position_embeddings=1048576,
    n_routed_experts=16,
    moe_intermediate_size=128,
)

PRESETS = {"tiny": TINY, "medium": MEDIUM, "full": FULL}


def find_config(name: str) -> tuple[ModelConfig, list[str]]:
    """A preset by name, or a configuration file (or the directory that holds config.json)."""
    if name in PRESETS:
        return PRESETS[name], []
    path = Path(name)
    if not path.exists():
        raise ConfigError(
            f"expected {', '.join(PRESETS)} or a configuration file, got {name}; "
            "name a preset or an existing file"
        )
    return read_config_file(path / "config.json" if path.is_dir() else path)


def slice_config(
    config: ModelConfig,
    *,
    layer_ids: Sequence[int] | None = None,
    num_experts: int | None = None,
    engram_rows: int | None = None,
) -> ModelConfig:
    """A smaller model of the same widths: fewer layers, experts or Engram rows.

    Layers are renumbered from 0 and keep their roles, so every layer with a ratio needs its source
    among `layer_ids`. Draft targets that are dropped fall back to the last layer. `engram_rows` is
    about the size of each table; the exact size follows from the primes above its share.
    Raises ConfigError when what remains is not a model.
    """
    changes: dict[str, object] = {}
    if num_experts is not None:
        changes["n_routed_experts"] = num_experts
        changes["dspark_n_routed_experts"] = min(num_experts, config.dspark_n_routed_experts)
        changes["num_experts_per_tok"] = min(num_experts, config.num_experts_per_tok)
        changes["dspark_num_experts_per_tok"] = min(num_experts, config.dspark_num_experts_per_tok)
    if layer_ids is not None:
        changes.update(_layer_slice(config, layer_ids))
    if engram_rows is not None:
        if engram_rows < 2 * config.engram_columns:
            raise ConfigError(
                f"engram_rows: expected at least two for each of {config.engram_columns} hash "
                f"columns, {2 * config.engram_columns}, got {engram_rows}"
            )
        changes["engram_vocab_size"] = engram_rows // config.engram_columns
    sliced = config.with_changes(**changes)
    if layer_ids is not None or engram_rows is not None:
        sliced = sliced.with_changes(engram_num_embeddings=table_rows(sliced))
    validate(sliced)
    return sliced


def table_rows(config: ModelConfig) -> tuple[int, ...]:
    """Rows of each Engram table: the sum of its hash moduli."""
    layouts = engram_layout(
        config.engram_layer_ids,
        max_ngram_size=config.engram_max_ngram_size,
        n_heads=config.engram_n_heads,
        vocab_size=config.engram_vocab_size,
        compressed_vocab_size=config.engram_compressed_vocab_size,
    )
    return tuple(layouts[layer].num_rows for layer in config.engram_layer_ids)


def check_table_rows(config: ModelConfig) -> None:
    """Raise ConfigError when the tables are not of the size that the hash reaches."""
    expected = table_rows(config)
    if config.engram_num_embeddings != expected:
        raise ConfigError(
            f"engram_num_embeddings: expected {list(expected)}, the sums of the primes from "
            f"engram_vocab_size = {config.engram_vocab_size} on, got "
            f"{list(config.engram_num_embeddings)}"
        )


def _layer_slice(config: ModelConfig, layer_ids: Sequence[int]) -> dict[str, object]:
    chosen = sorted(set(layer_ids))
    if list(layer_ids) != chosen or not chosen or chosen[-1] >= config.num_hidden_layers:
        raise ConfigError(
            f"layer_ids: expected ascending layers below {config.num_hidden_layers}, "
            f"got {list(layer_ids)}"
        )
    number = {old: new for new, old in enumerate(chosen)}

    def kept(ids: Sequence[int]) -> tuple[int, ...]:
        return tuple(number[one] for one in ids if one in number)

    for layer in chosen:
        source = config.kv_source(layer)
        index_source = config.index_source(layer)
        for needed in (source, index_source):
            if needed is not None and needed not in number:
                raise ConfigError(
                    f"layer_ids: layer {layer} reads from layer {needed}, which is not among "
                    f"{chosen}; add it"
                )
    if config.candidate_source_layer_id not in number:
        raise ConfigError(
            f"layer_ids: expected the candidate source, layer {config.candidate_source_layer_id}, "
            f"among {chosen}; add it"
        )
    draft_ratios = config.compress_ratios[config.num_hidden_layers :]
    return {
        "num_hidden_layers": len(chosen),
        "compress_ratios": tuple(config.ratio(old) for old in chosen) + draft_ratios,
        "kv_source_layer_ids": kept(config.kv_source_layer_ids),
        "index_source_layer_ids": kept(config.index_source_layer_ids),
        "candidate_source_layer_id": number[config.candidate_source_layer_id],
        "engram_layer_ids": kept(config.engram_layer_ids),
        "dspark_target_layer_ids": kept(config.dspark_target_layer_ids) or (len(chosen) - 1,),
    }
