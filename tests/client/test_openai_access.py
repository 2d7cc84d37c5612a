"""The OpenAI API's refusals, ends and limits, before the real Triton server with the echo model."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from client.openai.errors import ApiError
from client.protocol import DeploymentError
from tests.client.openai_proxy import (
    CHAT,
    COMPLETIONS,
    MODEL,
    chat,
    get,
    options,
    post,
    raw,
    serving,
    user,
)
from tests.client.real_server import Server, assert_stops, free_address

pytestmark = pytest.mark.server


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "param", "sentence"),
    [
        ({"max_tokens": "5"}, "max_tokens", 'expected max_tokens to be a valid integer, got "5"'),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "judge"}]}, "messages.0.role", 'got "judge"'),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content", "this model reads text only",
        ),
        ({"functions": []}, "functions", "got functions; use tools"),
        ({"max_token": 5}, "max_token", "got max_token; remove it"),
        ({"store": True}, "store", "expected store to be False, got true"),
        ({"n": 129}, "n", "less than or equal to 128, got 129"),
        ({"top_logprobs": 2}, "top_logprobs", "it needs logprobs true"),
        ({"max_tokens": 1, "max_completion_tokens": 1}, "max_tokens", "send one of them"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "it needs stream true"),
        ({"tool_choice": "auto"}, "tool_choice", "there are no tools"),
        (
            {"thinking": {"type": "disabled"}, "reasoning_effort": "low"},
            "thinking", "reasoning_effort low says otherwise",
        ),
        (
            {"reasoning_effort": 101},
            "reasoning_effort", "xhigh, max or a whole number from 1 to 100, got 101",
        ),
        ({"reasoning_effort": True}, "reasoning_effort", "from 1 to 100, got true"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "expected logit_bias"),
    ],
)  # fmt: skip
def test_a_refused_field_is_named(
    proxy: str, changes: dict[str, Any], param: str, sentence: str
) -> None:
    status, _, made = post(proxy, CHAT, {"model": MODEL, "messages": user("a"), **changes})
    error = made["error"]
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert sentence in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "body", [b"", b"[", b"[]", b'{"a": NaN}', b"\xff", b'"\\ud800"', b"[" * 9999]
)
def test_a_body_that_is_no_json_object(proxy: str, body: bytes) -> None:
    status, _, made = post(proxy, COMPLETIONS, body)
    assert status == 400
    assert made["error"]["message"].startswith("expected ")


def test_errors_of_the_official_client(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="expected the model deepseek_v41, got 'gpt'"):
        api.chat.completions.create(model="gpt", messages=user("a"))
    with pytest.raises(openai.BadRequestError, match="token ids must be below 1000") as caught:
        api.completions.create(model=MODEL, prompt=[2000])
    assert (caught.value.code, caught.value.status_code) == ("invalid_argument", 400)
    with pytest.raises(openai.InternalServerError, match="asked to fail after three tokens"):
        chat(api, "[error_after_three]abcd")
    assert api.models.list().data[0].id == api.models.retrieve(MODEL).id == MODEL


def test_an_error_in_mid_stream_ends_it(api: openai.OpenAI) -> None:
    came = ""
    stream = chat(api, "[error_after_three]abcd", stream=True)
    with pytest.raises(openai.APIError, match="asked to fail after three tokens"):  # noqa: PT012
        for chunk in stream:
            came += chunk.choices[0].delta.content or ""
    assert came == "abc"


def test_the_cause_of_every_5xx_is_logged_and_of_nothing_else(
    proxy: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole, in mid-stream, where nobody has room, and what no rule foresaw; never the prompt."""

    def asked(text: str, **more: Any) -> dict[str, Any]:
        return {"model": MODEL, "messages": user(text), **more}

    def logged() -> list[str]:
        said = [r.getMessage() + (r.exc_text or "") for r in caplog.records]
        assert not any("secret" in line for line in said)
        caplog.clear()
        return said

    for stream in (False, True):
        raw(proxy, CHAT, asked("[error_after_three]secret", stream=stream))
        assert logged() == ["500 internal: asked to fail after three tokens"]
    post(proxy, CHAT, asked("[queue_full]secret"))
    assert logged() == ["503 unavailable: no room in the queue"]
    post(proxy, CHAT, asked("secret", n=129))
    assert logged() == []

    def fails(*_: object) -> None:
        raise RuntimeError("nobody thought of this")

    monkeypatch.setattr("client.openai.app.merged", fails)
    status, _, made = post(proxy, CHAT, asked("secret"))
    assert (status, made["error"]["code"]) == (500, "internal")
    assert "its log has the cause" in made["error"]["message"]
    deadline = time.monotonic() + 5
    while not caplog.records:  # it comes behind the answer
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (line,) = logged()
    assert "nobody thought of this" in line


def test_paths_and_types_of_others(proxy: str) -> None:
    assert get(proxy, "/v1/nothing")[0] == 404
    status, _, body = get(proxy, CHAT)
    assert (status, json.loads(body)["error"]["message"]) == (
        405,
        f"expected another method, got GET {CHAT}",
    )
    # A page of another origin may send text/plain without asking this server first.
    status, _, made = post(proxy, CHAT, {}, {"Content-Type": "text/plain"})
    assert (status, made["error"]["message"]) == (
        415,
        "expected a body of type application/json, got text/plain",
    )


# -- ends ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_at_the_server(
    proxy: str, server: Server, stream: bool
) -> None:
    body = {"model": MODEL, "prompt": ["[slow]a", "[slow]b"], "max_tokens": 1000, "stream": stream}
    connection = http.client.HTTPConnection(proxy, timeout=20)
    connection.request("POST", COMPLETIONS, json.dumps(body), {"Content-Type": "application/json"})
    before = server.tokens_made()
    while server.tokens_made() < before + 4:
        time.sleep(0.02)
    if stream:
        connection.getresponse().readline()
    connection.sock.close()
    connection.close()
    assert_stops(server)
    deadline = time.monotonic() + 2
    while "dsv41_proxy_requests_in_flight 0.0" not in get(proxy, "/metrics")[2]:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("stream", [True, False])
def test_a_stop_ends_long_answers_with_an_error(server: Server, stream: bool) -> None:
    asked = {"model": MODEL, "messages": user("[slow]" + "a" * 200), "stream": stream}
    with serving(server.grpc) as proxy:
        connection = http.client.HTTPConnection(proxy, timeout=20)
        before = server.tokens_made()
        connection.request("POST", CHAT, json.dumps(asked), {"Content-Type": "application/json"})
        while server.tokens_made() < before + 2:
            time.sleep(0.02)
    response = connection.getresponse()
    assert response.status == (200 if stream else 503)
    text = response.read().decode()
    assert '"code":"unavailable"' in text
    assert "[DONE]" not in text
    connection.close()
    assert_stops(server)


def test_no_deployment_is_503_with_retry_after() -> None:
    with serving(free_address()) as proxy:
        status, headers, made = post(proxy, CHAT, {"model": MODEL, "messages": user("a")})
        assert (status, made["error"]["code"], headers["retry-after"]) == (503, "unavailable", "1")
        assert get(proxy, "/health")[0] == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_503_with_retry_after(proxy: str, stream: bool) -> None:
    """Also where a stream was asked for: nothing has been sent yet."""
    asked = {"model": MODEL, "messages": user("[queue_full]a"), "stream": stream}
    status, headers, made = post(proxy, CHAT, asked)
    assert (status, made["error"]["code"], headers["retry-after"]) == (503, "unavailable", "1")
    assert made["error"]["message"] == "no room in the queue"


@pytest.mark.parametrize("stream", [False, True])
def test_answers_that_end_in_other_ways(proxy: str, stream: bool) -> None:
    """The reason, or the end, in a response of its own; no reason at all is an error."""
    for behaviour in ("late_reason", "empty_final", "no_finish_reason"):
        asked = {"model": MODEL, "messages": user(f"[{behaviour}]ab"), "stream": stream}
        text = raw(proxy, CHAT, asked)
        if behaviour == "no_finish_reason":
            assert '"code":"protocol_error"' in text
            assert "[DONE]" not in text
        else:
            assert '"finish_reason":"stop"' in text
            assert "error" not in text


def test_a_model_that_is_being_unloaded_is_503() -> None:
    """The Triton server's own words, which carry no code."""
    said = "Request for unknown model: 'deepseek_v41' has no available versions"
    assert ApiError.of(DeploymentError.from_server(said)).status == 503


def test_a_time_limit_is_504(server: Server) -> None:
    with serving(server.grpc, request_timeout=0.2) as proxy:
        asked = {"model": MODEL, "messages": user("[slow]" + "a" * 100)}
        status, _, made = post(proxy, CHAT, asked)
    assert (status, made["error"]["code"]) == (504, "deadline_exceeded")
    assert_stops(server)


# -- who may call, and how much ------------------------------------------------------------------


def test_api_keys(server: Server) -> None:
    with serving(server.grpc, keys=("first", "second")) as proxy:
        for key, status in (("first", 200), ("second", 200), ("firs", 401), ("", 401)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            asked = {"model": MODEL, "prompt": "a", "max_tokens": 1}
            got, answered, made = post(proxy, COMPLETIONS, asked, headers)
            assert got == status
            if got == 401:
                assert answered["www-authenticate"] == "Bearer"
                assert made["error"]["code"] == "invalid_api_key"
        assert get(proxy, "/v1/models")[0] == 401
        assert get(proxy, "/health")[0] == get(proxy, "/metrics")[0] == get(proxy, "/")[0] == 200


def test_requests_a_minute_are_counted_by_key(server: Server) -> None:
    asked = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    with serving(server.grpc, keys=("a", "b"), requests_per_minute=2) as proxy:
        statuses = {
            key: [
                post(proxy, COMPLETIONS, asked, {"Authorization": f"Bearer {key}"}) for _ in "123"
            ]
            for key in "ab"
        }
    for answers in statuses.values():
        assert [status for status, _, _ in answers] == [200, 200, 429]
        _, headers, made = answers[2]
        assert 1 <= int(headers["retry-after"]) <= 30  # one each half minute
        assert made["error"]["type"] == "rate_limit_error"


def test_a_body_that_is_too_long(server: Server) -> None:
    with serving(server.grpc, most_body_bytes=1000) as proxy:
        asked = {"model": MODEL, "prompt": "a" * 1000}
        status, _, made = post(proxy, COMPLETIONS, asked)
        assert (status, made["error"]["code"]) == (413, "body_too_large")
        chunked = {"Transfer-Encoding": "chunked", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(proxy, timeout=20)
        connection.request(
            "POST", COMPLETIONS, iter([b"x" * 600] * 2), chunked, encode_chunked=True
        )
        assert connection.getresponse().status == 413
        connection.close()


def test_too_many_at_once_are_told_to_come_back(server: Server) -> None:
    with serving(server.grpc, most_in_flight=1) as proxy:
        slow = {"model": MODEL, "messages": user("[slow]" + "a" * 100), "stream": True}
        connection = http.client.HTTPConnection(proxy, timeout=20)
        connection.request("POST", CHAT, json.dumps(slow), {"Content-Type": "application/json"})
        first = connection.getresponse()
        assert first.status == 200
        status, headers, made = post(proxy, CHAT, {"model": MODEL, "messages": user("a")})
        assert (status, made["error"]["code"], headers["retry-after"]) == (503, "overloaded", "1")
        first.close()
        connection.close()
        deadline = time.monotonic() + 2
        while post(proxy, CHAT, {"model": MODEL, "messages": user("a")})[0] != 200:
            assert time.monotonic() < deadline
    assert_stops(server)


def test_other_origins_may_call_only_where_they_are_named(server: Server, proxy: str) -> None:
    origin = {"Origin": "https://app.example"}
    assert not [h for h in get(proxy, "/v1/models", **origin)[1] if h.startswith("access-control")]
    with serving(server.grpc, cors_origins=("https://app.example",)) as open_to_one:
        headers = get(open_to_one, "/v1/models", **origin)[1]
        assert headers["access-control-allow-origin"] == "https://app.example"
        others = get(open_to_one, "/v1/models", Origin="https://evil.example")[1]
        assert "access-control-allow-origin" not in others
        asked = {"Access-Control-Request-Method": "POST"}
        status, headers, _ = options(open_to_one, CHAT, **origin, **asked)
        assert (status, headers["access-control-allow-methods"]) == (200, "GET, POST")
        status, headers, body = options(open_to_one, CHAT, Origin="https://evil.example", **asked)
        assert (status, headers["content-type"]) == (400, "application/json")
        assert "access-control-allow-origin" not in headers
        assert json.loads(body)["error"]["message"] == (
            "expected a call that --cors-origin allows, got another origin"
        )


def test_metrics_parse_and_count(server: Server) -> None:
    with serving(server.grpc) as proxy:
        for prompt in ("abc", "[cached]abc"):
            assert post(proxy, COMPLETIONS, {"model": MODEL, "prompt": prompt})[0] == 200
        asked = {"model": MODEL, "messages": user("abcd"), "stream": True}
        connection = http.client.HTTPConnection(proxy, timeout=20)
        connection.request("POST", CHAT, json.dumps(asked), {"Content-Type": "application/json"})
        assert connection.getresponse().read().endswith(b"data: [DONE]\n\n")
        connection.close()
        assert post(proxy, CHAT, {})[0] == 400
        _, headers, text = get(proxy, "/metrics")
    assert headers["content-type"].startswith("text/plain; version=")
    samples = {
        (s.name, *sorted(s.labels.values())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert samples["dsv41_proxy_requests_total", *sorted((COMPLETIONS, "200"))] == 2
    assert samples["dsv41_proxy_requests_total", *sorted((CHAT, "200"))] == 1
    assert samples["dsv41_proxy_requests_total", *sorted((CHAT, "400"))] == 1
    assert samples["dsv41_proxy_tokens_total", "prompt"] == 3 + 4 + 4
    assert samples["dsv41_proxy_tokens_total", "cached"] == 64
    assert samples["dsv41_proxy_tokens_total", "output"] == 16 + 16 + 4
    assert samples["dsv41_proxy_time_to_first_token_seconds_count",] == 1
    assert samples["dsv41_proxy_requests_in_flight",] == 0
