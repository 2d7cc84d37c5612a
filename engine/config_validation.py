"""The rules that make a set of dimensions and roles a model that can run."""

from __future__ import annotations

from dataclasses import fields
from itertools import pairwise

from engine.config import ConfigError, ModelConfig

_MAY_BE_ZERO = frozenset(
    {"candidate_source_layer_id", "engram_pad_token_id", "dspark_noise_token_id", "bos_token_id",
     "eos_token_id", "pad_token_id", "image_token_id", "hc_eps", "num_nextn_predict_layers"}
)  # fmt: skip


def validate(config: ModelConfig) -> None:
    """Raise ConfigError when the fields do not describe a model that can run."""
    for field in fields(ModelConfig):
        value = getattr(config, field.name)
        if not isinstance(value, int | float):
            continue
        if value < 0 or (value == 0 and field.name not in _MAY_BE_ZERO):
            raise ConfigError(f"{field.name}: expected a positive number, got {value}")
    _validate_dims(config)
    _validate_roles(config)
    _validate_selection(config)
    _validate_engram_and_draft(config)


def _validate_dims(config: ModelConfig) -> None:
    for name in ("head_dim", "index_head_dim", "engram_head_dim", "hidden_size",
                 "moe_intermediate_size"):  # fmt: skip
        if getattr(config, name) % 32:
            raise ConfigError(
                f"{name}: expected a multiple of 32 (a row's scales cover 32 values), "
                f"got {getattr(config, name)}"
            )
    rope = config.qk_rope_head_dim
    if rope % 2 or rope > min(config.head_dim, config.index_head_dim):
        raise ConfigError(
            f"qk_rope_head_dim: expected an even number of at most head_dim = {config.head_dim} "
            f"and index_head_dim = {config.index_head_dim}, got {rope}"
        )
    if config.num_attention_heads % config.o_groups:
        raise ConfigError(
            f"o_groups: expected a divisor of num_attention_heads = {config.num_attention_heads}, "
            f"got {config.o_groups}"
        )
    if config.n_shared_experts != 1:
        raise ConfigError(f"n_shared_experts: expected 1, got {config.n_shared_experts}")
    pairs = [
        ("num_experts_per_tok", "n_routed_experts"),
        ("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
        ("sliding_window", "max_position_embeddings"),
    ]
    for small, large in pairs:
        if getattr(config, small) > getattr(config, large):
            raise ConfigError(
                f"{small}: expected at most {large} = {getattr(config, large)}, "
                f"got {getattr(config, small)}"
            )
    for name in ("bos", "eos", "pad", "image", "dspark_noise", "engram_pad"):
        token = getattr(config, f"{name}_token_id")
        if token is not None and token >= config.vocab_size:
            raise ConfigError(
                f"{name}_token_id: expected an id below vocab_size = {config.vocab_size}, "
                f"got {token}"
            )


def _ascending(name: str, ids: tuple[int, ...], end: int) -> None:
    ordered = all(a < b for a, b in pairwise(ids))
    if not ordered or any(not 0 <= one < end for one in ids):
        raise ConfigError(
            f"{name}: expected ascending layer numbers below num_hidden_layers = {end}, "
            f"got {list(ids)}"
        )


def _validate_roles(config: ModelConfig) -> None:
    layers, stages = config.num_hidden_layers, config.num_nextn_predict_layers
    ratios, sources = config.compress_ratios, config.kv_source_layer_ids
    if len(ratios) != layers + stages:
        raise ConfigError(
            f"compress_ratios: expected {layers + stages} entries ({layers} layers and {stages} "
            f"draft stages), got {len(ratios)}"
        )
    if any(ratio not in (0, 1, 2) for ratio in ratios):
        raise ConfigError(f"compress_ratios: expected values 0, 1 or 2, got {list(ratios)}")
    if any(ratios[layers:]):
        raise ConfigError(
            f"compress_ratios: expected 0 for each draft stage, got {list(ratios[layers:])}"
        )
    _ascending("kv_source_layer_ids", sources, layers)
    _ascending("index_source_layer_ids", config.index_source_layer_ids, layers)
    if not sources or sources[0] == 0:
        raise ConfigError(
            "kv_source_layer_ids: expected at least one source, and none at layer 0, "
            f"got {list(sources)}"
        )
    for layer, ratio in enumerate(ratios[:layers]):
        if ratio == 0:
            if layer in sources or layer in config.index_source_layer_ids:
                raise ConfigError(
                    f"compress_ratios: layer {layer} is a source and needs a ratio of 1 or 2, got 0"
                )
            continue
        below = [source for source in sources if source <= layer]
        if not below:
            raise ConfigError(
                f"kv_source_layer_ids: layer {layer} has ratio {ratio} but no source at or below "
                f"it in {list(sources)}"
            )
        if ratios[below[-1]] != ratio:
            raise ConfigError(
                f"compress_ratios: layer {layer} has ratio {ratio}, but the source that it reads, "
                f"layer {below[-1]}, has {ratios[below[-1]]}"
            )
    missing = sorted(set(sources) - set(config.index_source_layer_ids))
    if missing:
        raise ConfigError(
            f"index_source_layer_ids: expected every KV source among them, layers {missing} are not"
        )


def _validate_selection(config: ModelConfig) -> None:
    if config.candidate_source_layer_id != config.kv_source_layer_ids[-1]:
        raise ConfigError(
            "candidate_source_layer_id: expected the last KV source, layer "
            f"{config.kv_source_layer_ids[-1]}, got {config.candidate_source_layer_id}"
        )
    reach = (config.candidate_topk_blocks - 1) * config.candidate_block_size + 1
    if reach < config.index_topk:
        raise ConfigError(
            f"candidate_topk_blocks: {config.candidate_topk_blocks} blocks of "
            f"{config.candidate_block_size} guarantee {reach} candidates, index_topk needs "
            f"{config.index_topk}; raise candidate_topk_blocks or lower index_topk"
        )


def _validate_engram_and_draft(config: ModelConfig) -> None:
    _ascending("engram_layer_ids", config.engram_layer_ids, config.num_hidden_layers)
    if any(layer > config.decoder_start for layer in config.engram_layer_ids):
        raise ConfigError(
            f"engram_layer_ids: expected layers up to {config.decoder_start}, the first decoder "
            f"layer (prefill does not run later ones on every row), "
            f"got {list(config.engram_layer_ids)}"
        )
    if len(config.engram_num_embeddings) != len(config.engram_layer_ids):
        raise ConfigError(
            f"engram_num_embeddings: expected one table size for each of "
            f"{len(config.engram_layer_ids)} Engram layers, got {len(config.engram_num_embeddings)}"
        )
    if config.num_nextn_predict_layers == 0:
        return
    targets = config.dspark_target_layer_ids
    _ascending("dspark_target_layer_ids", targets, config.num_hidden_layers)
    if not targets or targets[0] < config.decoder_start:
        raise ConfigError(
            "dspark_target_layer_ids: expected decoder layers, from "
            f"{config.decoder_start} on, got {list(targets)}"
        )
