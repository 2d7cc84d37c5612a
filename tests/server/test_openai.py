"""The OpenAI API's official client against TinyFlash as it ships, behind the real server with
drafts. What the model says is its own; the tests are about what the API makes of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from builder.cli import main as build
from examples.tinyflash.tools import CALCULATOR, calculate
from tests.client.openai_proxy import MODEL, serving
from tests.server.deployment import ROOT, Deployment

pytestmark = pytest.mark.server

CHECKPOINT = ROOT / "examples" / "tinyflash" / "checkpoint"
PAGE = 32  # two windows of 16
QUESTION = (
    "Sara saved 84 dollars. Later Cyrus paid her 56 dollars. Then she spent 107 dollars on a coat. "
    "Find the number of dollars at the end."
)
PROMPT = "84 + 56 ="
PROBLEM: list[Any] = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    engine = tmp_path_factory.mktemp("tinyflash") / "engine"
    made = ["engine", f"--checkpoint_dir={CHECKPOINT}", f"--output_dir={engine}"]
    assert build([*made, "--max_seq_len=512", "--max_batch_size=8"]) == 0
    deployment = Deployment(engine, "--speculative", "--max-queued-requests", "3")
    try:
        deployment.wait_until_ready()
        with (
            serving(f"127.0.0.1:{deployment.grpc}") as address,
            openai.OpenAI(base_url=f"http://{address}/v1", api_key="x", max_retries=0) as client,
        ):
            yield client
    finally:
        deployment.end()


def ask(api: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return api.chat.completions.create(model=MODEL, messages=messages, **options)


def test_an_answer_streamed_and_whole(api: openai.OpenAI) -> None:
    """Drafts are counted where each step is a response; the answer is the same."""
    whole = ask(api, PROBLEM, logprobs=True, top_logprobs=2, max_tokens=12)
    (choice,) = whole.choices
    assert (choice.finish_reason, whole.usage.completion_tokens) == ("length", 12)
    tokens = choice.logprobs.content
    assert len(tokens) == whole.usage.completion_tokens
    assert b"".join(bytes(token.bytes) for token in tokens).decode() == choice.message.content
    for token in tokens:  # greedy: the token itself is the most probable
        assert (token.top_logprobs[0].token, len(token.top_logprobs)) == (token.token, 2)
        assert token.top_logprobs[0].logprob == token.logprob <= 0
    usage = {"include_usage": True}
    *chunks, last = ask(api, PROBLEM, stream=True, stream_options=usage, max_tokens=12)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == choice.message.content
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    accepted = last.usage.completion_tokens_details.accepted_prediction_tokens
    assert 0 < accepted < whole.usage.completion_tokens
    hit = (whole.usage.prompt_tokens - 1) // PAGE * PAGE
    assert last.usage.prompt_tokens_details.cached_tokens == hit > 0
    own = ask(api, PROBLEM, max_tokens=1, extra_body={"cache_salt": "mine", "priority": -1})
    assert own.usage.prompt_tokens_details.cached_tokens == 0


def test_a_tool_is_called_and_its_result_is_used(api: openai.OpenAI) -> None:
    """With reasoning, streamed; then the conversation goes back with the reasoning and without: it
    is kept where there are tools, so the prompts differ by it."""
    messages: list[Any] = [{"role": "user", "content": "What is 3471 * 28?"}]
    options: dict[str, Any] = {"tools": [CALCULATOR], "reasoning_effort": "low"}
    with api.chat.completions.stream(model=MODEL, messages=messages, **options) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, call.function.name) == ("tool_calls", "calculator")
    (expression,) = json.loads(call.function.arguments).values()
    assert choice.message.reasoning_content
    result = {"role": "tool", "tool_call_id": call.id, "content": str(calculate(expression))}
    answer = choice.message.model_dump(exclude_none=True, exclude={"parsed"})
    for part in answer["tool_calls"]:
        part["function"].pop("parsed_arguments", None)
    bare = {name: value for name, value in answer.items() if name != "reasoning_content"}
    first = ask(api, [*messages, answer, result], max_tokens=24, **options)
    second = ask(api, [*messages, bare, result], max_tokens=1, **options)
    said = first.choices[0].message
    assert str(calculate(expression)) in said.reasoning_content + said.content
    assert first.usage.prompt_tokens > second.usage.prompt_tokens


def test_past_reasoning_without_tools_is_dropped(api: openai.OpenAI) -> None:
    bare = {"role": "assistant", "content": "#### 33"}
    answer = {**bare, "reasoning_content": "84 + 56 = 140, and 140 - 107 = 33."}
    again = {"role": "user", "content": "Now add 12 to that."}
    turns = [
        ask(api, [*PROBLEM, sent, again], reasoning_effort="high", max_tokens=1)
        for sent in (answer, bare)
    ]
    assert turns[0].usage.prompt_tokens == turns[1].usage.prompt_tokens
    assert turns[1].usage.prompt_tokens_details.cached_tokens > 0


def test_several_answers_are_those_of_the_seeds_that_follow(api: openai.OpenAI) -> None:
    """All behind the same hit, the first one too. One streamed, one whole."""
    ask(api, PROBLEM, max_tokens=1)
    hot: dict[str, Any] = {"temperature": 3.0, "max_tokens": 4}
    made = ask(api, PROBLEM, n=2, seed=7, **hot)
    texts = [choice.message.content for choice in made.choices]
    assert [choice.index for choice in made.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert made.usage.completion_tokens == 8
    streamed = ""
    for chunk in ask(api, PROBLEM, seed=8, stream=True, **hot):
        streamed += chunk.choices[0].delta.content or ""
    assert streamed == texts[1]


def test_echo_tells_the_log_probabilities_that_the_answer_had(api: openai.OpenAI) -> None:
    """An answer's tokens, sent again as the end of a prompt, have the log probabilities that they
    had when they were chosen (another batch shape: the last bits of float32 differ)."""
    first = api.completions.create(model=MODEL, prompt=PROMPT, max_tokens=6, logprobs=2)
    said = first.choices[0]
    text = PROMPT + said.text
    second = api.completions.create(model=MODEL, prompt=text, max_tokens=1, logprobs=2, echo=True)
    echoed = second.choices[0]
    assert echoed.text.startswith(text)
    probs = echoed.logprobs
    assert (probs.token_logprobs[0], probs.top_logprobs[0]) == (None, None)
    assert probs.text_offset == [0, *itertools.accumulate(map(len, probs.tokens[:-1]))]
    assert "".join(probs.tokens) == echoed.text
    place = len(probs.tokens) - 1 - 6
    assert probs.tokens[place:-1] == said.logprobs.tokens
    assert probs.token_logprobs[place:-1] == pytest.approx(said.logprobs.token_logprobs, abs=1e-3)
    assert set(probs.top_logprobs[place]) == set(said.logprobs.top_logprobs[0])

    for streams in (False, True):
        made = api.completions.create(
            model=MODEL, prompt=text, max_tokens=0, logprobs=2, echo=True, stream=streams
        )
        (only,) = made if streams else [made]
        alone = only.choices[0]
        assert streams or only.usage.completion_tokens == 0
        assert (alone.text, alone.finish_reason) == (text, "length")
        assert alone.logprobs.tokens == probs.tokens[:-1]
        assert alone.logprobs.token_logprobs == probs.token_logprobs[:-1]
    with pytest.raises(openai.BadRequestError, match="expected max_tokens ≥ 1, got 0"):
        api.completions.create(model=MODEL, prompt=text, max_tokens=0)


def test_an_answer_of_the_form_that_was_asked_for(api: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"dollars": {"type": "integer"}, "sure": {"type": "boolean"}},
        "required": ["dollars", "sure"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": schema}}
    made = ask(api, PROBLEM, response_format=form, max_tokens=30)
    value = json.loads(made.choices[0].message.content)
    assert made.choices[0].finish_reason == "stop"
    assert {name: type(field) for name, field in value.items()} == {"dollars": int, "sure": bool}
    outputs: Any = {"structured_outputs": {"choice": ["red", "green"]}}
    chosen = api.completions.create(model=MODEL, prompt="Sara saved", extra_body=outputs)
    assert chosen.choices[0].text in ("red", "green")
    form["json_schema"]["schema"] = {"type": "nothing"}
    with pytest.raises(openai.BadRequestError, match="JSON schema, got at #: Invalid type"):
        ask(api, PROBLEM, response_format=form)


def test_what_does_not_fit_is_a_sentence(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 512 tokens together, got") as caught:
        ask(api, PROBLEM, max_tokens=600)
    assert caught.value.code == "invalid_argument"
    with pytest.raises(openai.BadRequestError, match="expected a finite temperature"):
        ask(api, PROBLEM, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="got an assistant message"):
        ask(api, [*PROBLEM, {"role": "assistant", "content": "x"}])


def test_as_many_answers_of_one_call_as_run_and_wait_at_once(api: openai.OpenAI) -> None:
    """Eight places, of the engine, and a queue of three."""
    made = api.completions.create(model=MODEL, prompt=[PROMPT] * 11, max_tokens=2)
    assert len({choice.text for choice in made.choices}) == 1
    assert [choice.index for choice in made.choices] == list(range(11))
    for prompts, n in ((12, 1), (6, 2)):
        with pytest.raises(openai.BadRequestError, match=r"at most 11 answers .* got 12") as caught:
            api.completions.create(model=MODEL, prompt=[PROMPT] * prompts, n=n, max_tokens=2)
        assert (caught.value.code, caught.value.param) == ("over_capacity", "prompt")
    with pytest.raises(openai.BadRequestError, match="at most 11 sequences of one request"):
        api.completions.create(model=MODEL, prompt=PROMPT, n=12, max_tokens=2)


def test_a_call_that_must_come(api: openai.OpenAI) -> None:
    """A question that the model answers without a tool, streamed."""
    options: dict[str, Any] = {"tools": [CALCULATOR], "tool_choice": "required"}
    options |= {"parallel_tool_calls": False, "max_tokens": 80}
    with api.chat.completions.stream(model=MODEL, messages=PROBLEM, **options) as stream:
        for _ in stream:
            pass
        (choice,) = stream.get_final_completion().choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, choice.message.content) == ("calculator", "")
    assert set(json.loads(call.function.arguments)) == {"expression"}
    assert choice.finish_reason == "tool_calls"
