"""What travels between a client and the deployment: requests, answers, errors. No transport."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]

DEFAULT_MODEL = "deepseek_v41"

# A code is how programs tell errors apart: the server writes it in brackets before the sentence.
INVALID_ARGUMENT = "invalid_argument"
UNAVAILABLE = "unavailable"
DEADLINE_EXCEEDED = "deadline_exceeded"
PROTOCOL_ERROR = "protocol_error"
SERVER_ERROR = "server_error"

# The server may put words of its own before the model's message ("…, message: [code] sentence").
_CODED = re.compile(r"(?:^|message: )\[([a-z][a-z0-9_]*)\] *(.*)", re.DOTALL)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class DeploymentError(Exception):
    """The deployment, or the road to it, failed.

    code: machine-readable, lower case; docs/client.md lists them.
    message: one sentence for people.
    partial: what had been received of the stream before it failed, None if nothing had.
    """

    def __init__(self, code: str, message: str, partial: GenerateResult | None = None) -> None:
        super().__init__(f"[{code}] {message}")
        self.code = code
        self.message = message
        self.partial = partial

    @classmethod
    def from_server(cls, text: str, default_code: str = SERVER_ERROR) -> DeploymentError:
        """Reads "[code] sentence"; `default_code` names a message that carries no code."""
        match = _CODED.search(text)
        if match:
            return cls(match[1], match[2].strip())
        return cls(default_code, text.strip() or "the server gave no message")


@dataclass(frozen=True, eq=False)
class GenerateRequest:
    """One generation: `text_input`, `input_ids` or `messages`; None leaves a value to the server.

    input_ids: int32 [n], converted from any integers that fit.
    messages: a conversation in the OpenAI form (role, content, reasoning_content, tool_calls,
    tool_call_id), which the server renders in the model's chat format. With it may come `tools`
    (OpenAI's form), `thinking` (reason before answering) and `reasoning_effort` (low, high, xhigh,
    max or 1 … 100, only with thinking).
    max_tokens: most tokens to generate.
    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. seed: 0 … 2**64 − 1.
    end_id: the token that ends the answer; −1 means that no token does. stop_token_ids: tokens
    that end it, too. ignore_eos: the model's own end tokens do not.
    stop_words: texts that end the answer and are left out of it, unless include_stop_str_in_output.
    min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias (a number by token
    id), bad_words, min_tokens: as docs/operations.md says.
    logprobs: return log probabilities of the answer's tokens and of so many alternatives to each.
    prompt_logprobs: the same of the prompt's tokens. echo: the prompt before the answer's text
    and, with logprobs, prompt_logprobs. exclude_input_in_output: false does the former.
    num_return_sequences: answers to the prompt; more than one are streamed.
    guided_decoding_guide_type, guided_decoding_guide: the form of the answer, as
    docs/operations.md says. speculative: false takes no drafts where the server makes them; the
    answer is the same. priority: smaller is earlier. cache_salt: prefixes are shared among
    equal salts only.
    request_id, session_id: named in the server's log.
    Values are judged by the server; only what cannot be carried is refused here (ValueError).
    """

    text_input: str | None = None
    input_ids: Int32Array | Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    thinking: bool | None = None
    reasoning_effort: str | int | None = None
    max_tokens: int = 16
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    min_tokens: int | None = None
    stop_words: Sequence[str] | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool | None = None
    num_return_sequences: int | None = None
    return_token_bytes: bool | None = None
    exclude_input_in_output: bool | None = None
    guided_decoding_guide_type: str | None = None
    guided_decoding_guide: str | None = None
    speculative: bool | None = None
    priority: int | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    end_id: int | None = None
    request_id: str = ""

    def __post_init__(self) -> None:
        prompts = (self.text_input, self.input_ids, self.messages)
        if sum(prompt is not None for prompt in prompts) != 1:
            raise ValueError(
                "expected exactly one of text_input, input_ids and messages: give one of them"
            )
        if self.input_ids is not None:
            object.__setattr__(self, "input_ids", _as_int32("input_ids", self.input_ids))
        if self.stop_token_ids is not None:
            ids = _as_int32("stop_token_ids", self.stop_token_ids)
            object.__setattr__(self, "stop_token_ids", ids)


@dataclass(frozen=True, eq=False)
class PromptTokens:
    """A prompt of N tokens and the model's log probabilities of them.

    ids: int32 [N]. log_probs: float32 [N − 1], of the tokens behind the first, which has none.
    top_log_prob_ids, top_log_probs: [N − 1, K]. token_bytes, top_token_bytes: as in GenerateChunk.
    """

    ids: Int32Array
    log_probs: Float32Array
    top_log_prob_ids: Int32Array | None = None
    top_log_probs: Float32Array | None = None
    token_bytes: list[bytes] | None = None
    top_token_bytes: list[bytes] | None = None


@dataclass(frozen=True, eq=False)
class GenerateChunk:
    """One streamed response: a delta. None where the response does not carry the field.

    output_ids: int32 [n], new tokens only, without the prompt.
    cached_tokens: prompt tokens found in the prefix cache; with the first response.
    finish_reason, num_input_tokens, num_output_tokens, and num_accepted_drafts, of the output
    tokens those that were drafts: with the last response.
    log_probs: float32 [n] of output_ids, where asked for; top_log_prob_ids and top_log_probs:
    [n, K], the K most probable tokens at each place, most probable first.
    token_bytes, top_token_bytes: where asked for, what each of output_ids and top_log_prob_ids
    (laid end to end) adds to the text; a character may be cut between two tokens.
    sequence_index: of several answers, which one this is of.
    prompt: with the first response, where log probabilities of the prompt were asked for.
    """

    text_output: str
    output_ids: Int32Array
    finish_reason: FinishReason | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    num_accepted_drafts: int | None = None
    cached_tokens: int | None = None
    log_probs: Float32Array | None = None
    top_log_prob_ids: Int32Array | None = None
    top_log_probs: Float32Array | None = None
    token_bytes: list[bytes] | None = None
    top_token_bytes: list[bytes] | None = None
    sequence_index: int | None = None
    prompt: PromptTokens | None = None


@dataclass(frozen=True, eq=False)
class GenerateResult(GenerateChunk):
    """A whole answer, or what came of it: deltas joined."""


@dataclass(frozen=True)
class Health:
    """live: the server process answers. ready: it takes requests. model_ready: so does the model.

    generates: one token was really made; None when that was not asked for.
    detail: the first failure in one sentence, empty when there is none.
    """

    live: bool
    ready: bool
    model_ready: bool
    generates: bool | None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.live and self.ready and self.model_ready and self.generates is not False


def join_chunks(chunks: Sequence[GenerateChunk]) -> GenerateResult:
    """Concatenates deltas; each other field is the last one that came."""

    def joined(name: str) -> Any:
        came = [getattr(chunk, name) for chunk in chunks]
        came = [value for value in came if value is not None and len(value)]
        return np.concatenate(came) if came else None

    def listed(name: str) -> list[bytes] | None:
        came = [value for chunk in chunks if (value := getattr(chunk, name)) is not None]
        return [piece for value in came for piece in value] if came else None

    def last(name: str) -> Any:
        came = (getattr(chunk, name) for chunk in reversed(chunks))
        return next((value for value in came if value is not None), None)

    ids = [chunk.output_ids for chunk in chunks]
    return GenerateResult(
        text_output="".join(chunk.text_output for chunk in chunks),
        output_ids=np.concatenate(ids) if ids else np.empty(0, np.int32),
        finish_reason=last("finish_reason"),
        num_input_tokens=last("num_input_tokens"),
        num_output_tokens=last("num_output_tokens"),
        num_accepted_drafts=last("num_accepted_drafts"),
        cached_tokens=last("cached_tokens"),
        log_probs=joined("log_probs"),
        top_log_prob_ids=joined("top_log_prob_ids"),
        top_log_probs=joined("top_log_probs"),
        token_bytes=listed("token_bytes"),
        top_token_bytes=listed("top_token_bytes"),
        sequence_index=last("sequence_index"),
        prompt=last("prompt"),
    )


def _as_int32(name: str, ids: Int32Array | Sequence[int]) -> Int32Array:
    array = np.asarray(ids)
    if array.size == 0 and array.dtype == np.float64:  # numpy's type of an empty list
        array = array.astype(np.int32)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"expected {name} as whole numbers of shape [n], got {array.dtype} of shape "
            f"{list(array.shape)}"
        )
    limits = np.iinfo(np.int32)
    if array.size and not (limits.min <= array.min() and array.max() <= limits.max):
        raise ValueError(f"expected {name} in int32, got from {array.min()} to {array.max()}")
    return np.ascontiguousarray(array, dtype=np.int32)
