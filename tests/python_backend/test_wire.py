"""Reading a request: what is accepted, and the sentence for everything that is not."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from python_backend import wire
from python_backend.generation.defaults import DefaultsError, generation_defaults
from python_backend.generation.options import GenerationOptions, Shown
from python_backend.grammar.guide import Guide, GuideKind
from python_backend.request import RequestError, SamplingParams
from python_backend.tensors import INPUTS, OUTPUTS

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "model_repository/deepseek_v41/config.pbtxt"


def tensors(**values: Any) -> dict[str, np.ndarray]:
    """Values as [1, n] arrays of the right type, the prompt 1 2 3 unless another is given."""
    dtypes = {"STRING": object, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32}
    kinds = {tensor.name: tensor.kind for tensor in INPUTS}
    if "text_input" not in values:
        values = {"input_ids": [1, 2, 3]} | values
    return {
        name: np.atleast_1d(np.array(value, dtype=dtypes.get(kinds[name], np.bool_)))[None]
        for name, value in values.items()
        if value is not None
    }


def refusal(inputs: dict[str, np.ndarray], **parameters: Any) -> str:
    with pytest.raises(RequestError) as caught:
        wire.read_request(inputs, parameters)
    assert caught.value.code == "invalid_argument"
    assert str(caught.value).startswith("[invalid_argument] expected ")
    return str(caught.value)


def test_the_tables_are_those_of_config_pbtxt() -> None:
    config = text_format.Parse(CONFIG.read_text(), model_config_pb2.ModelConfig())
    kinds = model_config_pb2.DataType.Name
    for ours, theirs in ((INPUTS, config.input), (OUTPUTS, config.output)):
        assert [(t.name, f"TYPE_{t.kind}", [t.size]) for t in ours] == [
            (t.name, kinds(t.data_type), list(t.dims)) for t in theirs
        ]
    assert all(t.optional for t in config.input)
    assert config.model_transaction_policy.decoupled


def test_defaults() -> None:
    request = wire.read_request(tensors(), {"id": "r1"})
    assert request.text is None
    assert request.input_ids is not None
    assert request.input_ids.tolist() == [1, 2, 3]
    assert request.input_ids.dtype == np.int32
    assert (request.max_tokens, request.stream, request.end_ids) == (16, False, None)
    options = request.options
    assert options == GenerationOptions(SamplingParams(seed=options.sampling.seed))
    assert request.shown == Shown()


def test_everything_given() -> None:
    request = wire.read_request(
        tensors(
            text_input="Grüße".encode(), max_tokens=7, stream=True, temperature=0.5, top_k=3,
            top_p=0.25, min_p=0.125, seed=2**64 - 1, repetition_penalty=1.5,
            presence_penalty=0.5, frequency_penalty=-0.25, logit_bias=b'{"9": -1, "3": 0.5}',
            embedding_bias_words=[b"ab"], embedding_bias_weights=[2.0],
            bad_words=[b"", b"no"], min_tokens=4, stop_words=[b"Ende", b""],
            include_stop_str_in_output=True, stop_token_ids=[5, 6], ignore_eos=True, end_id=5,
            pad_id=2, beam_width=1, logprobs=3, return_num_input_tokens=False,
            return_stop_reason=True, return_cumulative_logprob=True,
            exclude_input_in_output=False,
        ),
        {},
    )  # fmt: skip
    assert (request.text, request.input_ids) == ("Grüße", None)
    assert (request.max_tokens, request.stream, request.end_ids) == (7, True, frozenset({5}))
    assert request.options == GenerationOptions(
        SamplingParams(
            temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=2**64 - 1,
            repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=-0.25,
            logit_bias=((3, 0.5), (9, -1.0)), min_tokens=4, logprobs=3,
        ),
        bad_words=("no",), bias_words=(("ab", 2.0),), stop_strings=("Ende",), include_stop=True,
        stop_token_ids=frozenset({5, 6}), ignore_eos=True,
    )  # fmt: skip
    assert request.options.end_ids(frozenset({1})) == frozenset({5, 6})
    assert request.shown == Shown(
        prompt=True, num_input_tokens=False, stop_reason=True, log_probs=True,
        cumulative_logprob=True,
    )  # fmt: skip


def test_echo_shows_of_the_prompt_what_is_shown_of_the_answer() -> None:
    for sent, shows, number in (
        ({"echo": True}, True, None),
        ({"echo": True, "logprobs": 3}, True, 3),
        ({"echo": True, "return_log_probs": True}, True, 0),
        ({"echo": True, "logprobs": 3, "prompt_logprobs": 1}, True, 1),
        ({"echo": True, "return_cumulative_logprob": True}, True, None),
        ({"echo": False, "logprobs": 3}, False, None),
        ({"prompt_logprobs": 0}, False, 0),
    ):
        request = wire.read_request(tensors(**sent), {})
        assert request.shown.prompt is shows
        assert request.options.sampling.prompt_logprobs == number
        assert request.shown.prompt_log_probs is (number is not None)


def test_what_a_router_says_about_a_request() -> None:
    """As inputs or as parameters of the request, which may repeat each other."""
    sent = {"priority": -3, "timeout": 2_500_000, "session_id": "s é", "cache_salt": "é"}
    as_inputs = {k: v.encode() if isinstance(v, str) else v for k, v in sent.items()}
    for request in (
        wire.read_request(tensors(**as_inputs), {}),
        wire.read_request(tensors(), sent),
        wire.read_request(tensors(**as_inputs), sent),
    ):
        assert (request.priority, request.timeout) == (-3, 2.5)
        assert (request.session_id, request.cache_salt) == ("s é", "é".encode())
    plain = wire.read_request(tensors(timeout=0), {})
    assert (plain.priority, plain.timeout, plain.session_id, plain.cache_salt) == (0, None, "", b"")
    wrong = "expected the parameter"
    assert f"{wrong} priority as INT32, got 1.5" in refusal(tensors(), priority=1.5)
    assert f"{wrong} priority as INT32, got True" in refusal(tensors(), priority=True)
    assert f"{wrong} priority as INT32, got {2**31}" in refusal(tensors(), priority=2**31)
    assert f"{wrong} timeout as UINT64, got -1" in refusal(tensors(), timeout=-1)
    assert f"{wrong} cache_salt as STRING, got 7" in refusal(tensors(), cache_salt=7)
    assert "and the parameter priority 2; send one" in refusal(tensors(priority=1), priority=2)
    assert "cache_salt of at most 256 char" in refusal(tensors(cache_salt=b"x" * 257))


def test_an_order_of_an_operator_stands_alone() -> None:
    order = np.array([[b"reset_prefix_cache"]], dtype=object)
    assert wire.read_control({"control": order}) == "reset_prefix_cache"
    assert wire.read_control(tensors()) is None
    for inputs in ({"control": order} | tensors(), {"control": np.array([[b"x"]], dtype=object)}):
        with pytest.raises(RequestError, match=r"expected control reset_prefix_cache and no other"):
            wire.read_control(inputs)


def test_words_become_tokens() -> None:
    """A bad word in both its forms; each token of a bias word is moved, its repetition twice."""
    options = wire.read_request(
        tensors(
            bad_words=[b"ab"], embedding_bias_words=[b"aa", b"b"],
            embedding_bias_weights=[1.0, -3.0], logit_bias=b'{"97": 0.5}',
        ),
        {},
    ).options  # fmt: skip
    sampling = options.resolve(lambda text: list(text.encode()))
    assert sampling.bad_words == ((32, 97, 98), (97, 98))
    assert sampling.logit_bias == ((97, 2.5), (98, -3.0))


def test_the_names_of_the_llmapi_model() -> None:
    request = wire.read_request(
        tensors(
            text_input=b"a", streaming=True, stop=False, sampling_param_temperature=0.5,
            sampling_param_top_k=4, sampling_param_top_p=0.75, sampling_param_max_tokens=9,
            sampling_param_frequency_penalty=0.5, sampling_param_presence_penalty=0.25,
            sampling_param_stop=[b"."], sampling_param_seed=3, sampling_param_best_of=1,
            sampling_param_exclude_input_from_output=False, return_finish_reason=False,
        ),
        {},
    )  # fmt: skip
    assert (request.stream, request.max_tokens) == (True, 9)
    assert request.options == GenerationOptions(
        SamplingParams(
            temperature=0.5, top_k=4, top_p=0.75, seed=3, frequency_penalty=0.5,
            presence_penalty=0.25,
        ),
        stop_strings=(".",),
    )  # fmt: skip
    assert request.shown == Shown(prompt=True, finish_reason=False)
    assert wire.read_request(tensors(min_length=3), {}).options.sampling.min_tokens == 3
    assert "one min_tokens, got min_tokens 2 and min_length 3" in refusal(
        tensors(min_tokens=2, min_length=3)
    )
    both = tensors(sampling_param_stop=[b"."], stop_words=[b"."])
    assert wire.read_request(both, {}).options.stop_strings == (".",)
    assert "stop to be False or not sent, got True; cancel its stream" in refusal(
        tensors(stop=True)
    )


# Inputs of TensorRT-LLM's Triton models, from their config.pbtxt: llmapi/tensorrt_llm, and
# inflight_batcher_llm/ensemble. Without those for images, adapters and embeddings.
BOOL, INT32, UINT64, FP32, STRING = ("BOOL", 1), ("INT32", 1), ("UINT64", 1), ("FP32", 1), "STRING"
LLMAPI = {
    "streaming": BOOL, "sampling_param_best_of": INT32, "sampling_param_temperature": FP32,
    "sampling_param_top_k": INT32, "sampling_param_top_p": FP32,
    "sampling_param_frequency_penalty": FP32, "sampling_param_presence_penalty": FP32,
    "sampling_param_max_tokens": INT32, "sampling_param_stop": (STRING, -1),
    "sampling_param_seed": UINT64, "sampling_param_exclude_input_from_output": BOOL,
    "sampling_param_return_perf_metrics": BOOL, "return_finish_reason": BOOL,
    "return_stop_reason": BOOL, "return_cumulative_logprob": BOOL, "stop": BOOL,
}  # fmt: skip
ENSEMBLE = {
    "text_input": (STRING, 1), "max_tokens": INT32, "num_return_sequences": INT32,
    "bad_words": (STRING, -1), "stop_words": (STRING, -1), "exclude_input_in_output": BOOL,
    "end_id": INT32, "pad_id": INT32, "top_k": INT32, "top_p": FP32, "temperature": FP32,
    "length_penalty": FP32, "repetition_penalty": FP32, "min_tokens": INT32,
    "presence_penalty": FP32, "frequency_penalty": FP32, "seed": UINT64, "return_log_probs": BOOL,
    "return_context_logits": BOOL, "return_generation_logits": BOOL, "return_perf_metrics": BOOL,
    "return_num_input_tokens": BOOL, "return_num_output_tokens": BOOL, "beam_width": INT32,
    "stream": BOOL, "embedding_bias_words": (STRING, -1), "embedding_bias_weights": ("FP32", -1),
    "guided_decoding_guide_type": (STRING, 1), "guided_decoding_guide": (STRING, 1),
}  # fmt: skip


def test_inputs_of_existing_clients_have_their_types() -> None:
    ours = {tensor.name: (tensor.kind, tensor.size) for tensor in wire.INPUTS}
    theirs = LLMAPI | ENSEMBLE
    assert {name: ours.get(name) for name in theirs} == theirs


def test_what_is_left_out_is_the_checkpoints() -> None:
    config = {
        "temperature": 0.75, "top_p": 0.5, "top_k": 20, "repetition_penalty": 1.25,
        "max_new_tokens": 33, "eos_token_id": 1, "do_sample": True, "min_p": None,
    }  # fmt: skip
    defaults = generation_defaults(config, 512)
    request = wire.read_request(tensors(top_p=0.25), {}, defaults)
    sampling = request.options.sampling
    assert request.max_tokens == 33
    assert sampling == SamplingParams(
        temperature=0.75, top_p=0.25, top_k=20, repetition_penalty=1.25, seed=sampling.seed
    )
    greedy = generation_defaults(config | {"do_sample": False}, 512)
    assert greedy.sampling.temperature == 0.0
    with pytest.raises(DefaultsError, match=r"expected top_p above 0 .*, got 2.0"):
        generation_defaults({"top_p": 2.0}, 512)
    with pytest.raises(DefaultsError, match="expected top_k to be a number, got 'x'"):
        generation_defaults({"top_k": "x"}, 512)


def test_an_end_id_of_minus_one_means_that_nothing_ends_it() -> None:
    assert wire.read_request(tensors(end_id=-1), {}).end_ids == frozenset()


def test_the_older_name_of_the_seed() -> None:
    assert wire.read_request(tensors(random_seed=8), {}).options.sampling.seed == 8
    assert "one seed, got seed 7 and random_seed 8" in refusal(tensors(seed=7, random_seed=8))


def test_guides() -> None:
    """An empty one is none; with reasoning it is for what comes behind."""
    asked = tensors(guided_decoding_guide_type=b"", guided_decoding_guide=b"")
    assert wire.read_request(asked, {}).options.guide is None
    asked = tensors(guided_decoding_guide_type=b"regex", guided_decoding_guide="ä+".encode())
    assert wire.read_request(asked, {}).options.guide == Guide(GuideKind.REGEX, "ä+")
    asked |= tensors(input_ids=None, messages=b'[{"role": "user", "content": "a"}]', thinking=True)
    del asked["input_ids"]
    assert wire.read_request(asked, {}).options.guide == Guide(GuideKind.REGEX, "ä+", True)


def test_requests_without_a_seed_differ() -> None:
    seeds = {wire.read_request(tensors(), {}).options.sampling.seed for _ in range(8)}
    assert len(seeds) == 8


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"input_ids": None}, "exactly one of text_input, input_ids, messages, got none"),
        ({"text_input": b"a", "input_ids": [1]}, "exactly one of .*, got text_input and input_ids"),
        ({"text_input": b""}, "a prompt of at least one token, got an empty text"),
        ({"text_input": b"ab\xff"}, "text_input as UTF-8, got byte 0xff at 2"),
        ({"beam_width": 2}, "beam_width to be 1 or not sent, got 2"),
        ({"num_return_sequences": 0}, "num_return_sequences from 1 to 128, got 0"),
        ({"num_return_sequences": 129}, "num_return_sequences from 1 to 128, got 129"),
        ({"echo": True, "exclude_input_in_output": True}, "to be true, got both; drop one"),
        ({"echo": True, "max_tokens": 0, "min_tokens": 1}, "at most max_tokens, got 1 and 0"),
        ({"stop_words": [b"a"] * 17}, "at most 16 stop_words, got 17"),
        ({"stop_words": [b"a" * 1025]}, "stop_words of at most 1024 bytes, got 1025"),
        ({"stop_words": [b"\xff"]}, "stop_words as UTF-8"),
        ({"embedding_bias_words": [b"a"]}, "as many embedding_bias_weights .*, got 0 and 1"),
        ({"logit_bias": b"{"}, "logit_bias as a JSON object, but .*; correct the JSON"),
        ({"logit_bias": b"[1]"}, "logit_bias as a JSON object, got '\\[1\\]'"),
        ({"logit_bias": b'{"a": 1}'}, "numbers by token id, got 'a': 1"),
        ({"logit_bias": b'{"-1": 1}'}, "numbers by token id, got '-1': 1"),
        ({"logit_bias": b'{"1": true}'}, "numbers by token id, got '1': True"),
        ({"guided_decoding_guide": b"x"}, "guided_decoding_guide_type with guided_decoding_guide"),
        ({"guided_decoding_guide_type": b"xml"}, "to be json, json_schema, .*, got 'xml'"),
        ({"guided_decoding_guide": b"\xff"}, "guided_decoding_guide as UTF-8"),
    ],
)  # fmt: skip
def test_bad_values(values: dict[str, Any], sentence: str) -> None:
    assert re.search(sentence, refusal(tensors(**values)))


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("input_ids", np.ones((1, 3), np.int64), "input_ids as INT32, got int64"),
        ("input_ids", np.ones(3, np.int32), r"input_ids of shape \[1, n\], got \[3\]"),
        ("input_ids", np.ones((2, 3), np.int32), r"one request per call.*got \[2, 3\]"),
        ("input_ids", np.ones((0, 3), np.int32), r"input_ids of shape \[1, n\], got \[0, 3\]"),
        ("max_tokens", np.ones((1, 2), np.int32), r"max_tokens of shape \[1, 1\], got \[1, 2\]"),
        ("temperature", np.ones((1, 1)), "temperature as FP32, got float64"),
        ("stream", np.ones((1, 1), np.int32), "stream as BOOL, got int32"),
        ("top_q", np.ones((1, 1), np.float32), "got 'top_q'; did you mean top_"),
    ],
)  # fmt: skip
def test_wrong_types_and_shapes(name: str, array: np.ndarray, sentence: str) -> None:
    assert re.search(sentence, refusal(tensors() | {name: array}))


def test_an_unknown_field_is_not_ignored() -> None:
    assert "got 'max_token'; did you mean max_tokens?" in refusal(tensors(), max_token=5)
    assert "see the model's documentation" in refusal(tensors(), zzz=5)


def test_every_code_of_the_backend_has_a_wire_code() -> None:
    """Reads the sources, so that a new code cannot reach clients as `internal` unnoticed."""
    used = set()
    for path in (ROOT / "python_backend").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "RequestError":
                used |= {a.value for a in node.args[:1] if isinstance(a, ast.Constant)}
    assert {"exceeds_cache", "token_out_of_range"} <= used
    for code in used:
        error = wire.to_wire(RequestError(code, "expected [a] thing"))
        assert error.code != "internal" or code in {"core_failed", "executor_failed", "internal"}
        assert str(error) == f"[{error.code}] expected [a] thing"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("too_long", "invalid_argument"),
        ("exceeds_cache", "over_capacity"),
        ("shutting_down", "unavailable"),
        ("executor_failed", "internal"),
        ("cancelled", "cancelled"),
        ("never heard of", "internal"),
    ],
)
def test_wire_codes(code: str, expected: str) -> None:
    assert wire.to_wire(RequestError(code, "a")).code == expected
