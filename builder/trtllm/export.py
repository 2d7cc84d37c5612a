"""`dsv41-build trtllm`: what TensorRT-LLM's PyTorch backend needs to serve an engine.

    dsv41_trtllm/               --custom_module_dirs: imports the model, which registers itself
    model/                      the model directory: config.json and the tokenizer
    serve.yaml                  --extra_llm_api_options of trtllm-serve
    triton/tensorrt_llm/1/      model.yaml and model.py for the llmapi model of its Triton server

Written for TensorRT-LLM 1.3 from its sources, never run with it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import yaml

from builder.assemble import check_output, complete_directory
from builder.trtllm import ARCHITECTURE, MODEL_TYPE, PACKAGE, TARGET_VERSION
from engine.config import ConfigError
from engine.directory import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    Engine,
)

_LABEL = f"Written by dsv41-build trtllm for TensorRT-LLM {TARGET_VERSION}, PyTorch backend."

_MODULE = f'''"""{_LABEL}

trtllm-serve MODEL --custom_module_dirs {PACKAGE}
"""

from builder.trtllm.modeling import Dsv41TritonConfig, Dsv41TritonForCausalLM

__all__ = ["Dsv41TritonConfig", "Dsv41TritonForCausalLM"]
'''

_TRITON_MODEL = f'''"""{_LABEL}

Registers the model, then hands over to TensorRT-LLM's own llmapi model: copy its model.py beside
this file as llmapi_model.py, its helpers.py too, and its config.pbtxt one directory up.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import {PACKAGE}  # noqa: E402, F401
from llmapi_model import TritonPythonModel  # noqa: E402

__all__ = ["TritonPythonModel"]
'''


def write_adapter(engine: Engine, output: Path) -> None:
    """Write the directory, complete or not at all.

    Raises ConfigError for an engine of several ranks, without a tokenizer, or a taken output.
    """
    if engine.build.tp_size != 1:
        raise ConfigError(
            f"engine: expected one rank, got {engine.build.tp_size}: the adapter runs one; build "
            "the engine with --tp_size 1"
        )
    if engine.tokenizer_path is None:
        raise ConfigError(
            f"engine: {engine.path} has no tokenizer, and the llmapi model takes text; build it "
            "from a checkpoint with tokenizer.json"
        )
    check_output(output)
    with complete_directory(output) as partial:
        model, triton = partial / "model", partial / "triton" / "tensorrt_llm" / "1"
        for directory in (partial / PACKAGE, model, triton):
            directory.mkdir(parents=True)
        (partial / PACKAGE / "__init__.py").write_text(_MODULE)
        (model / CONFIG_NAME).write_text(json.dumps(_model_config(engine), indent=1))
        for name in (TOKENIZER_NAME, TOKENIZER_CONFIG_NAME, GENERATION_CONFIG_NAME):
            if (engine.path / name).is_file():
                shutil.copyfile(engine.path / name, model / name)
        if not (model / TOKENIZER_CONFIG_NAME).is_file():
            fast = {"tokenizer_class": "PreTrainedTokenizerFast"}
            (model / TOKENIZER_CONFIG_NAME).write_text(json.dumps(fast))
        (triton / "model.py").write_text(_TRITON_MODEL)
        arguments = _llm_arguments(engine)
        _write_yaml(partial / "serve.yaml", arguments)
        _write_yaml(
            triton / "model.yaml",
            {"model": str(output.resolve() / "model"), "backend": "pytorch"}
            | arguments
            | {"triton_config": {"max_batch_size": 0, "decoupled": True}},
        )


def _write_yaml(path: Path, value: dict[str, Any]) -> None:
    path.write_text(f"# {_LABEL}\n{yaml.safe_dump(value, sort_keys=False)}")


def _model_config(engine: Engine) -> dict[str, Any]:
    """A Hugging Face style configuration. The shapes size a cache that TensorRT-LLM keeps and the
    model does not use, so they are small; the engine knows the model's own."""
    config = engine.config
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "torch_dtype": "bfloat16",
        "engine_dir": str(engine.path.resolve()),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "max_position_embeddings": config.max_position_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": config.eos_token_id,
        "pad_token_id": config.pad_token_id,
        "tie_word_embeddings": False,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 64,
    }


def _llm_arguments(engine: Engine) -> dict[str, Any]:
    """Arguments of TensorRT-LLM's LLM class."""
    build = engine.build
    return {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "max_batch_size": build.max_batch_size,
        "max_num_tokens": build.max_num_tokens,
        "max_seq_len": build.max_seq_len,
        "max_beam_width": 1,
        "load_format": "dummy",  # the engine has the weights
        # A request's rows come whole and in order: what the model's own caches rely on.
        "enable_chunked_prefill": False,
        "disable_overlap_scheduler": True,
        "cuda_graph_config": None,
        "kv_cache_config": {
            "enable_block_reuse": False,
            "max_tokens": build.max_batch_size * build.max_seq_len,
        },
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
    }
