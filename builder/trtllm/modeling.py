"""Our network as a model of TensorRT-LLM's PyTorch backend, registered when this is imported.

Written for TensorRT-LLM 1.3 from its sources (`register_auto_model`, `AttentionMetadata`, the
model loader); it was never run with it. The executor brings batching, sampling and streaming; the
model brings the network, its caches and its weights, which come from the engine. See
docs/tensorrt-llm.md for what is not wired.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from builder.trtllm import ARCHITECTURE, MODEL_TYPE
from builder.trtllm.sequences import SequenceNetwork
from engine.directory import Engine
from engine.network import Network
from engine.network.device import moved

try:
    from tensorrt_llm._torch.models.modeling_utils import (  # type: ignore[import-not-found]
        register_auto_model,
    )
    from transformers import AutoConfig, PretrainedConfig  # type: ignore[import-not-found]
except ImportError as error:
    raise ImportError(
        "expected to be imported by TensorRT-LLM (written for 1.3, PyTorch backend), and "
        f"{error.name} is not installed; give this directory to trtllm-serve with "
        "--custom_module_dirs"
    ) from None


class Dsv41TritonConfig(PretrainedConfig):  # type: ignore[misc]
    """config.json of a directory that `dsv41-build trtllm` wrote; `engine_dir` names the engine."""

    model_type = MODEL_TYPE


AutoConfig.register(MODEL_TYPE, Dsv41TritonConfig)


@register_auto_model(ARCHITECTURE)
class Dsv41TritonForCausalLM(torch.nn.Module):
    """Has no parameters: the weights are the engine's, and `load_format: dummy` fills nothing."""

    def __init__(self, model_config: Any) -> None:
        super().__init__()
        self.model_config = model_config
        self._sequences: SequenceNetwork | None = None

    @property
    def config(self) -> Any:
        return self.model_config.pretrained_config

    @property
    def vocab_size_padded(self) -> int:
        return int(self.config.vocab_size)

    def infer_max_seq_len(self) -> int:
        return int(self.config.max_position_embeddings)

    def post_load_weights(self) -> None:
        """Read the engine to the current device. The loader calls this when it is done itself."""
        engine = Engine.open(Path(self.config.engine_dir))
        weights = engine.load_weights(torch.bfloat16)
        if torch.cuda.is_available():
            weights = moved(weights, "cuda")
        self._sequences = SequenceNetwork(
            Network(engine.config, weights),
            num_slots=engine.build.max_batch_size,
            max_seq_len=engine.build.max_seq_len,
        )

    def forward(
        self,
        attn_metadata: Any,
        input_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        return_context_logits: bool = False,
        **_: Any,
    ) -> torch.Tensor:
        """Logits [sequences, vocab] of each sequence's last row. Raises ValueError for what this
        model does not do."""
        if input_ids is None or inputs_embeds is not None:
            raise ValueError("expected input_ids, got embeddings; this model reads text only")
        if return_context_logits:
            raise ValueError("expected requests without context logits; only last rows have them")
        if self._sequences is None:
            raise ValueError("expected post_load_weights before the first forward step")
        lengths = attn_metadata.seq_lens.tolist()
        tokens = input_ids[: sum(lengths)].to(torch.int32).cpu().numpy()
        return self._sequences.step(
            attn_metadata.request_ids,
            lengths,
            attn_metadata.kv_cache_params.num_cached_tokens_per_seq,
            np.ascontiguousarray(tokens),
        )
