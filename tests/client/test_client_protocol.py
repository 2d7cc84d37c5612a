"""What is decided without a server: requests, errors, joining, and that the client stands alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from client.chat import assistant_message
from client.protocol import (
    DeploymentError,
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    join_chunks,
)
from client.stream import GenerateStream
from client.tensors import chunk_from_outputs, input_tensors

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("[invalid_argument] top_p is 2", "invalid_argument", "top_p is 2"),
        ("[queue_full] try again in 3 s", "queue_full", "try again in 3 s"),
        (
            "Failed to process the request(s) for model 'm', message: [too_long] 9 > 8",
            "too_long",
            "9 > 8",
        ),
        ("[request id: 7] expected 1 inputs", "server_error", "[request id: 7] expected 1 inputs"),
        ("unexpected shape [n] here", "server_error", "unexpected shape [n] here"),
        ("", "server_error", "the server gave no message"),
        ("[a] two\nlines", "a", "two\nlines"),
    ],
)
def test_errors_are_read_from_the_server_s_words(text: str, code: str, message: str) -> None:
    error = DeploymentError.from_server(text)
    assert (error.code, error.message) == (code, message)
    assert str(error) == f"[{code}] {message}"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "exactly one"),
        ({"text_input": "a", "input_ids": [1]}, "exactly one"),
        ({"text_input": "a", "messages": []}, "exactly one"),
        ({"input_ids": [[1, 2]]}, r"shape \[n\], got int64 of shape \[1, 2\]"),
        ({"input_ids": [0.5]}, "whole numbers"),
        ({"input_ids": [2**31]}, "int32, got from 2147483648 to 2147483648"),
        ({"input_ids": [1, -(2**31) - 1]}, "got from -2147483649 to 1"),
    ],
)
def test_prompts_that_cannot_be_carried(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        GenerateRequest(**values)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"top_k": 2**31}, "top_k as a whole number from -2147483648 to 2147483647"),
        ({"seed": -1}, "seed as a whole number from 0 to 18446744073709551615, got -1"),
        ({"max_tokens": 1.5}, "max_tokens as a whole number"),
        ({"temperature": -1e39}, "temperature as a number from -3.402823.*38, got -1e\\+39"),
        ({"text_input": "ab\ud800"}, "lone surrogate at character 2"),
    ],
)
def test_values_that_a_tensor_cannot_hold(values: dict[str, object], sentence: str) -> None:
    """The server's JSON reader would wrap 2**31 around to −2**31 without a word."""
    request = GenerateRequest(**({"text_input": "a"} | values))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=sentence):
        input_tensors(request, stream=False)


def test_an_empty_prompt_is_the_server_s_to_refuse() -> None:
    request = GenerateRequest(input_ids=[])
    tensors = {spec.name: array for spec, array in input_tensors(request, stream=True)}
    assert tensors["input_ids"].shape == (1, 0)
    assert tensors["input_ids"].dtype == np.int32


def test_conversations_travel_as_json() -> None:
    request = GenerateRequest(
        messages=[{"role": "user", "content": "Grüße\n"}],
        tools=[{"type": "function"}],
        thinking=True,
        reasoning_effort=7,
    )
    tensors = {spec.name: array.item() for spec, array in input_tensors(request, stream=True)}
    assert tensors["messages"] == '[{"role": "user", "content": "Grüße\\n"}]'.encode()
    assert tensors["tools"] == b'[{"type": "function"}]'
    assert (tensors["thinking"], tensors["reasoning_effort"]) == (True, b"7")


@pytest.mark.parametrize("content", [{1}, float("nan")])
def test_messages_that_json_cannot_hold(content: object) -> None:
    request = GenerateRequest(messages=[{"role": "user", "content": content}])
    with pytest.raises(ValueError, match="expected messages that JSON can hold, but "):
        input_tensors(request, stream=False)


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [("a</think>b", "a", "b"), ("cut", "cut", ""), ("a</think>b</think>", "a", "b</think>")],
)
def test_an_answer_in_thinking_mode_is_split_for_the_history(
    text: str, reasoning: str, content: str
) -> None:
    assert assistant_message(text, thinking=True) == {
        "role": "assistant",
        "reasoning_content": reasoning,
        "content": content,
    }
    assert assistant_message(text, thinking=False) == {"role": "assistant", "content": text}


def test_ids_are_not_copied_when_they_are_int32() -> None:
    ids = np.arange(5, dtype=np.int32)
    (spec, tensor), *_ = input_tensors(GenerateRequest(input_ids=ids), stream=True)
    assert spec.name == "input_ids"
    assert np.shares_memory(ids, tensor)


def test_joining_keeps_the_last_value_of_each_field() -> None:
    chunks = [
        GenerateChunk("a", np.array([1], np.int32), cached_tokens=8),
        GenerateChunk("", np.array([], np.int32)),
        GenerateChunk("bc", np.array([2, 3], np.int32), FinishReason.STOP, 5, 3),
    ]
    result = join_chunks(chunks)
    assert result.text_output == "abc"
    assert result.output_ids.tolist() == [1, 2, 3]
    assert result.output_ids.dtype == np.int32
    assert result.finish_reason is FinishReason.STOP
    assert (result.num_input_tokens, result.num_output_tokens, result.cached_tokens) == (5, 3, 8)


@pytest.mark.parametrize(
    ("outputs", "ids"),
    [
        ({"output_ids": 7}, [7]),
        ({"output_ids": [7, 8]}, [7, 8]),
        ({"output_ids": []}, []),
        ({}, []),
    ],
)
def test_ids_in_each_form_that_the_server_writes(
    outputs: dict[str, object], ids: list[int]
) -> None:
    assert chunk_from_outputs(outputs).output_ids.tolist() == ids


def test_unknown_finish_reason() -> None:
    with pytest.raises(
        DeploymentError, match="stop, length, cancelled, error, got 'eof'"
    ) as caught:
        chunk_from_outputs({"finish_reason": b"eof"})
    assert caught.value.code == "protocol_error"


STANDS_ALONE = """
import sys

class Refuse:
    names = {"torch", "engine", "plugins", "builder", "python_backend", "safetensors",
             "tokenizers", "matplotlib"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise AssertionError("the client imported " + name)
        return None

sys.meta_path.insert(0, Refuse())
import client, client.cli, client.perf, client.perf_profile, client.plot
import client.chat, client.eval, client.progress
print("alone")
"""


def test_the_client_stands_alone() -> None:
    ran = subprocess.run([sys.executable, "-c", STANDS_ALONE], capture_output=True, text=True)
    assert ran.stdout == "alone\n", ran.stderr


def test_eval_without_a_checkout_says_what_it_needs(tmp_path: Path) -> None:
    """A copy of the package alone, as an installation has it."""
    shutil.copytree(ROOT / "client", tmp_path / "client")
    command = "from client.cli import main; raise SystemExit(main(['eval', '--task=arithmetic']))"
    ran = subprocess.run(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert "run eval from a checkout of the project, in its environment" in ran.stderr
    assert len(ran.stderr.splitlines()) == 1


def test_generation_options_travel_under_the_servers_names() -> None:
    request = GenerateRequest(
        text_input="a",
        min_p=0.25,
        logit_bias={7: -1.5},
        bad_words=["no", "nie"],
        stop_words=["Ende", "."],
        stop_token_ids=[5, 6],
        ignore_eos=True,
        logprobs=2,
    )
    sent = {spec.name: array[0].tolist() for spec, array in input_tensors(request, stream=False)}
    assert sent["bad_words"] == [b"no", b"nie"]
    assert sent["stop_words"] == [b"Ende", b"."]
    assert sent["logit_bias"] == [b'{"7": -1.5}']
    assert (sent["stop_token_ids"], sent["ignore_eos"], sent["logprobs"]) == ([5, 6], [True], [2])
    assert sent["min_p"] == [0.25]
    none = GenerateRequest(text_input="a", stop_words=[], bad_words=[], stop_token_ids=[])
    named = {spec.name for spec, _ in input_tensors(none, stream=False)}
    assert named == {"text_input", "max_tokens", "stream"}
    with pytest.raises(ValueError, match="expected stop_token_ids as whole numbers"):
        GenerateRequest(text_input="a", stop_token_ids=["x"])  # type: ignore[list-item]


def test_log_probs_are_joined_token_by_token() -> None:
    first = chunk_from_outputs(
        {
            "output_ids": [5, 6],
            "output_log_probs": [-0.5, -1.0],
            "top_log_prob_ids": [5, 9, 8, 6],
            "top_log_probs": [-0.5, -2.0, -0.25, -1.0],
        }
    )
    # The server shows a vector of one element as a number, and an empty one as an empty list.
    second = chunk_from_outputs(
        {"output_ids": 7, "output_log_probs": -3.0, "top_log_prob_ids": [7, 1],
         "top_log_probs": [-3.0, -4.0]}
    )  # fmt: skip
    last = chunk_from_outputs({"output_ids": [], "finish_reason": "length"})
    result = join_chunks([first, second, last])
    assert result.log_probs is not None
    assert result.top_log_prob_ids is not None
    assert result.log_probs.tolist() == [-0.5, -1.0, -3.0]
    assert result.top_log_prob_ids.tolist() == [[5, 9], [8, 6], [7, 1]]
    assert join_chunks([last]).log_probs is None


def test_log_probs_and_bytes_of_a_prompt() -> None:
    """The first token has no probability; what JSON shows without brackets is a vector too."""
    outputs = {
        "prompt_ids": [5, 6, 7], "prompt_log_probs": [-1.0, -2.0],
        "top_prompt_log_prob_ids": [6, 9, 1, 7], "top_prompt_log_probs": [-1.0, -3.0, -0.5, -2.0],
        "prompt_token_bytes": ["61", "", "e4b896"], "output_ids": 8, "output_token_bytes": "e4",
    }  # fmt: skip
    chunk = chunk_from_outputs(outputs)
    prompt = join_chunks([chunk, chunk_from_outputs({"output_ids": []})]).prompt
    assert prompt is not None
    assert prompt.top_log_prob_ids is not None
    assert prompt.ids.tolist() == [5, 6, 7]
    assert prompt.log_probs.tolist() == [-1.0, -2.0]
    assert prompt.top_log_prob_ids.tolist() == [[6, 9], [1, 7]]
    assert prompt.token_bytes == [b"a", b"", "世".encode()]
    assert chunk.token_bytes == [b"\xe4"]
    short = chunk_from_outputs({"prompt_ids": 5, "prompt_token_bytes": "61"}).prompt
    assert short is not None
    assert (short.ids.tolist(), short.log_probs.tolist(), short.token_bytes) == ([5], [], [b"a"])


def test_several_answers_are_told_apart() -> None:
    def chunk(index: int, text: str, reason: str | None = None) -> GenerateChunk:
        outputs = {"text_output": text, "sequence_index": index, "finish_reason": reason}
        return chunk_from_outputs(outputs)

    cancelled: list[bool] = []
    came = [chunk(0, "a"), chunk(1, "x", "stop"), chunk(0, "b", "length")]
    stream = GenerateStream(iter(came), lambda: cancelled.append(True), 2)
    assert [(r.text_output, r.finish_reason) for r in stream.results()] == [
        ("ab", FinishReason.LENGTH),
        ("x", FinishReason.STOP),
    ]
    stream.close()
    assert not cancelled
    with pytest.raises(ValueError, match="expected a request of one answer, got 2"):
        stream.result()
    unfinished = GenerateStream(iter(came[:2]), lambda: cancelled.append(True), 2)
    next(unfinished)
    next(unfinished)
    unfinished.close()  # one of the two still ran
    assert cancelled == [True]
