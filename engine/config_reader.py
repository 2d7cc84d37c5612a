"""Reading a model configuration in any of its spellings.

Three spellings describe the same model: the nested Hugging Face `config.json` (text keys under
`text_config`), the flat `inference/config.json` of the released code, and what
`ModelConfig.to_dict` writes. One table of aliases reads all three; a value given twice must agree.

The rule for keys that are not fields of `ModelConfig`:

1. a key that pins a variant (`FIXED`) must have the one value that this implementation computes;
2. a key known to change nothing in inference (`HARMLESS`, `vision_…`) is passed over;
3. any other key whose name contains a word of the architecture (`ARCHITECTURE_WORDS`) is refused,
   unless its value switches it off (null, false, 0, empty);
4. everything else is reported as a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from engine.config import ConfigError, ModelConfig
from engine.config_validation import validate
from engine.json_file import read_json

ALIASES = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "kv_source_layers": "kv_source_layer_ids",
    "index_source_layers": "index_source_layer_ids",
    "candidate_source_layer": "candidate_source_layer_id",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "original_seq_len": "rope_original_length",
    "norm_eps": "rms_norm_eps",
    "n_activated_experts": "num_experts_per_tok",
    "moe_inter_dim": "moe_intermediate_size",
    "route_scale": "routed_scaling_factor",
    "engram_pad_id": "engram_pad_token_id",
    "n_mtp_layers": "num_nextn_predict_layers",
    "dspark_n_activated_experts": "dspark_num_experts_per_tok",
}
ROPE_SCALING_FIELDS = {
    "factor": "rope_factor",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "original_max_position_embeddings": "rope_original_length",
}
# Keys whose other values mean another model. The values that mean this one:
FIXED: dict[str, tuple[Any, ...]] = {
    "num_key_value_heads": (1,),
    "scoring_func": ("sqrtsoftplus",),
    "score_func": ("sqrtsoftplus",),
    "topk_method": ("noaux_tc",),
    "norm_topk_prob": (True,),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "tie_word_embeddings": (False,),
    "first_k_dense_replace": (0, None),
    "num_hash_layers": (0, None),
    "n_hash_layers": (0, None),
    "moe_layer_freq": (1,),
    "n_group": (1, None),
    "topk_group": (1, None),
    "rope_interleave": (True,),
    "scale_fmt": ("ue8m0", None),
    "expert_dtype": ("fp4", "fp8", "bf16", "float32", None),
}
FIXED_QUANTIZATION: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),
    "weight_block_size": ([32, 32],),
    "scale_fmt": ("ue8m0",),
    "expert_dtype": ("fp4",),
}
# fmt: off
HARMLESS = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "aux_loss_alpha", "auto_map", "dtype",
    "initializer_range", "max_batch_size", "max_seq_len", "model_type", "output_attentions",
    "output_hidden_states", "output_router_logits", "pretraining_tp", "problem_type", "return_dict",
    "router_aux_loss_coef", "seq_aux", "torch_dtype", "transformers_version", "use_cache",
})
# fmt: on
# Singular words; a plural matches too.
# fmt: off
ARCHITECTURE_WORDS = frozenset({
    "act", "activation", "ape", "attention", "attn", "base", "beta", "bias", "block", "candidate",
    "causal", "compress", "compressed", "compression", "dense", "depth", "dim", "draft", "dspark",
    "embed", "embedding", "engram", "eps", "expert", "factor", "gate", "group", "hash", "hc",
    "head", "hidden", "hyper", "index", "inter", "interleave", "intermediate", "kv", "layer",
    "lora", "mamba", "mlp", "moe", "mtp", "multiplier", "nextn", "ngram", "norm", "normalize",
    "position", "quant", "quantization", "rank", "ratio", "residual", "rope", "rotary", "route",
    "router", "scale", "scaled", "scaling", "score", "sink", "size", "softcap", "softmax", "source",
    "sparse", "stage", "swiglu", "temp", "temperature", "theta", "tid2eid", "tie", "tied", "top",
    "topk", "window",
})
# fmt: on


def read_config_file(path: Path) -> tuple[ModelConfig, list[str]]:
    """`read_config` of a JSON file; ConfigError also when there is no such file, or not JSON."""
    try:
        raw = read_json(path)
    except FileNotFoundError:
        raise ConfigError(
            f"expected a model configuration at {path}, found none; "
            "point at a directory that holds config.json"
        ) from None
    except ValueError as error:
        raise ConfigError(f"expected JSON in {path}, but {error}; restore the file") from None
    return read_config(raw)


def read_config(raw: Mapping[str, Any]) -> tuple[ModelConfig, list[str]]:
    """Return the validated configuration and one warning per ignored key.

    Raises ConfigError with one sentence naming the key.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"expected a configuration object, got {type(raw).__name__}")
    reader = _Reader()
    text = raw.get("text_config")
    if text is not None:
        if not isinstance(text, Mapping):
            raise ConfigError(f"text_config: expected an object, got {text!r}")
        reader.take(text)
    reader.take({key: value for key, value in raw.items() if key != "text_config"})
    config = reader.build()
    validate(config)
    return config, reader.warnings


class _Reader:
    """Collects field values from one or two objects and remembers where each came from."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.spelled: dict[str, str] = {}
        self.warnings: list[str] = []
        self.field_types = {field.name: str(field.type) for field in fields(ModelConfig)}

    def take(self, section: Mapping[str, Any]) -> None:
        for key, value in section.items():
            name = ALIASES.get(key, key)
            if name in self.field_types:
                self._set(name, key, value)
            elif key == "rope_scaling":
                self._take_rope_scaling(value)
            elif key == "quantization_config":
                self._take_quantization(value)
            elif key in FIXED:
                _require_fixed(key, value, FIXED[key])
            elif key == "vision_config" or key.startswith("vision_"):
                if not any("vision" in warning for warning in self.warnings):
                    self.warnings.append(f"{key} is ignored: only the text model is read")
            elif key not in HARMLESS:
                self._unknown(key, value)

    def build(self) -> ModelConfig:
        if "max_position_embeddings" not in self.values:
            factor, original = (
                self.values.get(key) for key in ("rope_factor", "rope_original_length")
            )
            if factor is not None and original is not None:
                # The flat spelling has no such key; YaRN's reach is the published length.
                self.values["max_position_embeddings"] = int(factor * original)
        for field in fields(ModelConfig):
            if field.name not in self.values and field.default is MISSING:
                other = [alias for alias, name in ALIASES.items() if name == field.name]
                spelling = " or ".join([field.name, *other])
                raise ConfigError(f"{spelling}: expected this key, found none; add it")
        return ModelConfig(**self.values)

    def _set(self, name: str, key: str, value: Any) -> None:
        parsed = _parse(key, value, self.field_types[name])
        if name in self.values and self.values[name] != parsed:
            raise ConfigError(
                f"{key}: {value!r} contradicts {self.spelled[name]} = {self.values[name]!r}; "
                "keep one of them"
            )
        self.values[name] = parsed
        self.spelled[name] = key

    def _take_rope_scaling(self, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise ConfigError(f"rope_scaling: expected an object of YaRN values, got {value!r}")
        kinds = [value[key] for key in ("rope_type", "type") if key in value]
        if not kinds or any(kind != "yarn" for kind in kinds):
            shown = " and ".join(map(repr, kinds)) or "none"
            raise ConfigError(f"rope_scaling.rope_type: expected yarn, got {shown}")
        for key, entry in value.items():
            if key in ROPE_SCALING_FIELDS:
                self._set(ROPE_SCALING_FIELDS[key], key, entry)
            elif key not in ("rope_type", "type") and not _is_off(entry):
                raise ConfigError(
                    f"rope_scaling.{key}: {entry!r} would change the rotary embedding in a way "
                    "that is not implemented; remove the key if it has no effect"
                )

    def _take_quantization(self, value: Any) -> None:
        if value is None:
            return
        if not isinstance(value, Mapping):
            raise ConfigError(f"quantization_config: expected an object, got {value!r}")
        if value.get("quant_method") == "modelopt":
            return  # requantised by the builder: each tensor's stored dtype says how
        for key, entry in value.items():
            name = f"quantization_config.{key}"
            if key in FIXED_QUANTIZATION:
                _require_fixed(name, entry, FIXED_QUANTIZATION[key])
            elif key in ("ignored_layers", "modules_to_not_convert"):
                continue  # each tensor's stored dtype says whether it is quantised
            elif not _is_off(entry):
                raise ConfigError(
                    f"{name}: {entry!r} is not a known part of the released quantisation; "
                    "convert the checkpoint or remove the key if it has no effect"
                )

    def _unknown(self, key: str, value: Any) -> None:
        words = {word.removesuffix("s") for word in key.lower().split("_")}
        words.update(key.lower().split("_"))
        if words & ARCHITECTURE_WORDS and not _is_off(value):
            raise ConfigError(
                f"{key}: {value!r} is unknown here and its name says that it changes what the "
                "model computes; remove the key if it has no effect"
            )
        self.warnings.append(f"{key} is ignored: not a key of this model")


def _is_off(value: Any) -> bool:
    return value is None or value is False or value in (0, "", [], {})


def _require_fixed(key: str, value: Any, allowed: tuple[Any, ...]) -> None:
    # 1 == True in Python; the types must agree too.
    if not any(type(value) is type(one) and value == one for one in allowed):
        wanted = " or ".join(str(one) for one in allowed if one is not None)
        raise ConfigError(f"{key}: expected {wanted}, got {value!r}; other variants do not exist")


def _parse(key: str, value: Any, kind: str) -> Any:
    if kind == "int | None" and value is None:
        return None
    if kind.startswith("int"):
        return _integer(key, value)
    if kind == "float":
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{key}: expected a number, got {value!r}")
        if not math.isfinite(value):
            raise ConfigError(f"{key}: expected a finite number, got {value!r}")
        return float(value)
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise ConfigError(f"{key}: expected a list of integers, got {value!r}")
    return tuple(_integer(key, one) for one in value)


def _integer(key: str, value: Any) -> int:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{key}: expected an integer, got {value!r}")
    return value
