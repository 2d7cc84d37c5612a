"""Names, types and sizes of the model's tensors; config.pbtxt repeats them, and a test compares.

The names are those of TensorRT-LLM's Triton models where these have one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np


class Tensor(NamedTuple):
    """`kind` is the server's type name without TYPE_; `size` counts elements, −1 is any number.

    An input with `neutral` values is accepted for the sake of existing clients, with these values
    only: it would change the answer and this version cannot do it. `instead` ends the sentence
    that refuses others.
    """

    name: str
    kind: str
    size: int = 1
    neutral: tuple[Any, ...] = ()
    instead: str = "this version has no other"


INPUTS = (
    Tensor("text_input", "STRING"),
    Tensor("input_ids", "INT32", -1),
    Tensor("messages", "STRING"),
    Tensor("tools", "STRING"),
    Tensor("thinking", "BOOL"),
    Tensor("reasoning_effort", "STRING"),
    Tensor("max_tokens", "INT32"),
    Tensor("stream", "BOOL"),
    Tensor("speculative", "BOOL"),
    Tensor("temperature", "FP32"),
    Tensor("top_k", "INT32"),
    Tensor("top_p", "FP32"),
    Tensor("min_p", "FP32"),
    Tensor("seed", "UINT64"),
    Tensor("repetition_penalty", "FP32"),
    Tensor("presence_penalty", "FP32"),
    Tensor("frequency_penalty", "FP32"),
    Tensor("logit_bias", "STRING"),
    Tensor("embedding_bias_words", "STRING", -1),
    Tensor("embedding_bias_weights", "FP32", -1),
    Tensor("bad_words", "STRING", -1),
    Tensor("min_tokens", "INT32"),
    Tensor("stop_words", "STRING", -1),
    Tensor("include_stop_str_in_output", "BOOL"),
    Tensor("stop_token_ids", "INT32", -1),
    Tensor("ignore_eos", "BOOL"),
    Tensor("priority", "INT32"),
    Tensor("timeout", "UINT64"),
    Tensor("session_id", "STRING"),
    Tensor("cache_salt", "STRING"),
    Tensor("control", "STRING"),
    Tensor("end_id", "INT32"),
    Tensor("pad_id", "INT32"),
    Tensor("num_return_sequences", "INT32"),
    Tensor("return_log_probs", "BOOL"),
    Tensor("logprobs", "INT32"),
    Tensor("prompt_logprobs", "INT32"),
    Tensor("echo", "BOOL"),
    Tensor("return_num_input_tokens", "BOOL"),
    Tensor("return_num_output_tokens", "BOOL"),
    Tensor("return_finish_reason", "BOOL"),
    Tensor("return_stop_reason", "BOOL"),
    Tensor("return_cumulative_logprob", "BOOL"),
    Tensor("return_token_bytes", "BOOL"),
    Tensor("exclude_input_in_output", "BOOL"),
    Tensor("beam_width", "INT32", neutral=(1,)),
    Tensor("length_penalty", "FP32", neutral=(1.0,)),
    Tensor("guided_decoding_guide_type", "STRING"),
    Tensor("guided_decoding_guide", "STRING"),
    Tensor("return_context_logits", "BOOL", neutral=(False,)),
    Tensor("return_generation_logits", "BOOL", neutral=(False,)),
    Tensor("return_perf_metrics", "BOOL", neutral=(False,)),
    Tensor("sampling_param_best_of", "INT32", neutral=(1,)),
    Tensor("streaming", "BOOL"),
    Tensor(
        "stop",
        "BOOL",
        neutral=(False,),
        instead="cancel its stream to end a running request, and name texts in stop_words",
    ),
    Tensor("random_seed", "UINT64"),
    Tensor("min_length", "INT32"),
    Tensor("sampling_param_temperature", "FP32"),
    Tensor("sampling_param_top_k", "INT32"),
    Tensor("sampling_param_top_p", "FP32"),
    Tensor("sampling_param_frequency_penalty", "FP32"),
    Tensor("sampling_param_presence_penalty", "FP32"),
    Tensor("sampling_param_max_tokens", "INT32"),
    Tensor("sampling_param_stop", "STRING", -1),
    Tensor("sampling_param_seed", "UINT64"),
    Tensor("sampling_param_exclude_input_from_output", "BOOL"),
    Tensor("sampling_param_return_perf_metrics", "BOOL", neutral=(False,)),
)
ALIASES = {
    "streaming": "stream",
    "random_seed": "seed",
    "min_length": "min_tokens",
    "sampling_param_temperature": "temperature",
    "sampling_param_top_k": "top_k",
    "sampling_param_top_p": "top_p",
    "sampling_param_frequency_penalty": "frequency_penalty",
    "sampling_param_presence_penalty": "presence_penalty",
    "sampling_param_max_tokens": "max_tokens",
    "sampling_param_stop": "stop_words",
    "sampling_param_seed": "seed",
    "sampling_param_exclude_input_from_output": "exclude_input_in_output",
}
OUTPUTS = (
    Tensor("text_output", "STRING"),
    Tensor("output_ids", "INT32", -1),
    Tensor("sequence_index", "INT32"),
    Tensor("finish_reason", "STRING"),
    Tensor("stop_reason", "STRING"),
    Tensor("num_input_tokens", "INT32"),
    Tensor("num_output_tokens", "INT32"),
    Tensor("num_accepted_drafts", "INT32"),
    Tensor("cached_tokens", "INT32"),
    Tensor("output_log_probs", "FP32", -1),
    Tensor("top_log_prob_ids", "INT32", -1),
    Tensor("top_log_probs", "FP32", -1),
    Tensor("output_token_bytes", "STRING", -1),
    Tensor("top_token_bytes", "STRING", -1),
    Tensor("prompt_ids", "INT32", -1),
    Tensor("prompt_log_probs", "FP32", -1),
    Tensor("top_prompt_log_prob_ids", "INT32", -1),
    Tensor("top_prompt_log_probs", "FP32", -1),
    Tensor("prompt_token_bytes", "STRING", -1),
    Tensor("top_prompt_token_bytes", "STRING", -1),
    Tensor("cum_log_probs", "FP32"),
    Tensor("cumulative_logprob", "FP32"),
)
NUMPY_TYPES: dict[str, Any] = {
    "STRING": np.object_,
    "INT32": np.int32,
    "UINT64": np.uint64,
    "FP32": np.float32,
    "BOOL": np.bool_,
}
