"""The API behind HTTP: who may call, how much, and what each path answers."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from client.openai import page
from client.openai.deployment import Deployment
from client.openai.errors import RETRY_SECONDS, ApiError
from client.openai.fields import Body, ChatFields, CompletionFields, Sampling
from client.openai.fields import read_body as read_fields
from client.openai.formats import Choice, Format
from client.openai.limits import InFlight, RateLimit, read_body
from client.openai.metrics import Measured, Metrics
from client.openai.requests import Asked, chat_request, completion_request
from client.openai.settings import ApiKeys, ProxySettings
from client.openai.streams import DONE, ClientLeftError, EventStream, event, merged, unless_left
from client.openai.tokens import Counts
from client.protocol import DeploymentError, GenerateChunk

logger = logging.getLogger(__name__)

# The loop ends with this; answers that a stop has just cut off say so before.
LAST_WORDS_SECONDS = 0.2
CLIENT_LEFT = 499  # nobody reads it; a name for the metrics

Answers = AsyncGenerator[tuple[int, GenerateChunk], None]


def create_app(settings: ProxySettings, keys: ApiKeys) -> FastAPI:
    """The application; it connects to the deployment when it starts."""
    proxy = _Proxy(settings, keys)
    # The library's own pages load scripts from another host.
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None, lifespan=proxy.connected)
    app.add_api_route("/v1/chat/completions", proxy.chat, methods=["POST"])
    app.add_api_route("/v1/completions", proxy.completions, methods=["POST"])
    app.add_api_route("/v1/models", proxy.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", proxy.model, methods=["GET"])
    app.add_api_route("/health", proxy.health, methods=["GET"])
    app.add_api_route("/metrics", proxy.show_metrics, methods=["GET"])
    page.add_to(app)
    app.add_exception_handler(ApiError, _refused)
    app.add_exception_handler(DeploymentError, _refused)
    app.add_exception_handler(HTTPException, _no_such_path)
    app.add_exception_handler(ClientLeftError, _left)
    app.add_exception_handler(Exception, _failed)
    if settings.cors_origins:
        app.add_middleware(
            _Cors,
            allow_origins=list(settings.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type"],
        )
    app.add_middleware(Measured, metrics=proxy.metrics)
    return app


class _Cors(CORSMiddleware):
    """Refuses in the API's form, too."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        if response.status_code < 400:
            return response
        wrong = bytes(response.body).decode().removeprefix("Disallowed CORS ")
        error = ApiError(400, f"expected a call that --cors-origin allows, got another {wrong}")
        kept = {k: v for k, v in response.headers.items() if not k.startswith("content-")}
        return JSONResponse(error.body, response.status_code, kept)


class _Proxy:
    def __init__(self, settings: ProxySettings, keys: ApiKeys) -> None:
        self.metrics = Metrics()
        self._settings = settings
        self._keys = keys
        self._rate = RateLimit(settings.requests_per_minute)
        self._in_flight = InFlight(settings.most_in_flight, self.metrics.in_flight.set)
        self._started = int(time.time())
        self._deployment: Deployment

    @asynccontextmanager
    async def connected(self, app: FastAPI) -> AsyncIterator[None]:
        settings = self._settings
        self._deployment = Deployment(settings.deployment, settings.model, settings.request_timeout)
        yield
        await asyncio.sleep(LAST_WORDS_SECONDS)
        await self._deployment.close()

    # -- paths ------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        fields = await self._fields(request, ChatFields)
        id = f"chatcmpl-{secrets.token_hex(12)}"
        return await self._answer(request, id, chat_request(fields, id), chat=True)

    async def completions(self, request: Request) -> Response:
        fields = await self._fields(request, CompletionFields)
        id = f"cmpl-{secrets.token_hex(12)}"
        return await self._answer(request, id, completion_request(fields, id), chat=False)

    async def models(self, request: Request) -> Response:
        self._caller(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request, name: str) -> Response:
        self._caller(request)
        self._check_model(name)
        return JSONResponse(self._model())

    async def health(self) -> Response:
        trouble = await self._deployment.trouble()
        if trouble is not None:
            raise ApiError(
                503, trouble, kind="unavailable_error", code="unavailable",
                retry_seconds=RETRY_SECONDS,
            )  # fmt: skip
        return JSONResponse({"status": "ok"})

    async def show_metrics(self) -> Response:
        return Response(generate_latest(self.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    # -- before an answer -------------------------------------------------------------------------

    def _caller(self, request: Request) -> str:
        """The key's name, the client's address where there are no keys. Raises ApiError 401."""
        if not self._keys:
            return request.client.host if request.client else ""
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        name = self._keys.name(key.strip()) if scheme.lower() == "bearer" else None
        if name is None:
            raise ApiError(
                401,
                "expected a known API key in the header Authorization: Bearer KEY, got "
                f"{'another' if key else 'none'}",
                code="invalid_api_key",
            )
        return name

    async def _fields(self, request: Request, kind: type[Body]) -> Body:
        self._rate.take(self._caller(request))
        # Pages of other origins can send other types without asking this server first.
        sent_as = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if sent_as != "application/json":
            raise ApiError(
                415, f"expected a body of type application/json, got {sent_as or 'none'}"
            )
        try:
            body = await read_body(
                request.stream(),
                request.headers.get("Content-Length"),
                self._settings.most_body_bytes,
            )
        except ClientDisconnect:
            raise ClientLeftError from None
        fields = read_fields(kind, body)
        assert isinstance(fields, Sampling)
        self._check_model(fields.model)
        return fields

    def _check_model(self, name: str) -> None:
        if name != self._settings.served_name:
            raise ApiError(
                404,
                f"expected the model {self._settings.served_name}, got {name[:60]!r}",
                param="model",
                code="model_not_found",
            )

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._settings.served_name,
            "object": "model",
            "created": self._started,
            "owned_by": "dsv41-triton",
        }

    # -- answers ----------------------------------------------------------------------------------

    async def _answer(self, request: Request, id: str, asked: Asked, *, chat: bool) -> Response:
        counts = Counts()
        form = Format(id, self._settings.served_name, asked, chat=chat)
        answers = self._answers(asked, counts)
        headers = {"X-Request-Id": id}
        if not asked.stream:
            async with aclosing(answers):
                made = await unless_left(request, _whole(form, answers, counts))
            return Response(made, media_type="application/json", headers=headers)
        try:  # so that a refusal has a status of its own
            first = await unless_left(request, anext(answers))
        except BaseException:
            await answers.aclose()
            raise
        return EventStream(_events(form, first, answers, counts), answers, headers)

    async def _answers(self, asked: Asked, counts: Counts) -> Answers:
        """Chunks with the index of their choice."""
        began = time.perf_counter()
        if len(asked.requests) > 1:  # of one the deployment says it
            await self._check_sequences(len(asked.requests) * asked.num_answers)
        streams = [self._deployment.chunks(r, stream=asked.stream) for r in asked.requests]
        with self._in_flight.one():
            try:
                async with aclosing(merged(streams)) as chunks:
                    async for index, chunk in chunks:
                        if asked.stream and not counts.output and chunk.output_ids.size:
                            seconds = time.perf_counter() - began
                            self.metrics.first_token_seconds.observe(seconds)
                        counts.add(chunk)
                        yield index * asked.num_answers + (chunk.sequence_index or 0), chunk
            finally:
                self.metrics.count(counts)

    async def _check_sequences(self, num_sequences: int) -> None:
        """Raises ApiError 400 for more than an idle deployment takes, which would refuse some of
        them for ever because of its full queue."""
        most = await self._deployment.most_sequences()
        if most is not None and num_sequences > most:
            raise ApiError(
                400,
                f"expected at most {most} answers of one call, prompts × n, what runs and waits on "
                f"the deployment at once, got {num_sequences}; send fewer prompts in a call",
                param="prompt",
                code="over_capacity",
            )


async def _whole(form: Format, answers: Answers, counts: Counts) -> bytes:
    asked = form.asked
    choices = [form.choice(i) for i in range(len(asked.requests) * asked.num_answers)]
    async for index, chunk in answers:
        choices[index].take(chunk)
    return form.whole(choices, counts.usage())


async def _events(
    form: Format, first: tuple[int, GenerateChunk], answers: Answers, counts: Counts
) -> AsyncGenerator[str, None]:
    choices: dict[int, Choice] = {}

    def shown(index: int, chunk: GenerateChunk) -> str:
        choice = choices.setdefault(index, form.choice(index))
        delta = choice.take(chunk)
        return "" if delta is None else event(form.event(delta))

    yield shown(*first)
    try:
        async for index, chunk in answers:
            if text := shown(index, chunk):
                yield text
    except DeploymentError as error:
        yield event(_logged(ApiError.of(error)).body)
        return
    if form.asked.include_usage:
        yield event(form.usage_event(counts.usage()))
    yield DONE


# -- errors ---------------------------------------------------------------------------------------


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError | DeploymentError)
    shown = _logged(error if isinstance(error, ApiError) else ApiError.of(error))
    headers = dict(shown.headers)
    if shown.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(shown.body, shown.status, headers)


async def _no_such_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = f"{request.method} {request.url.path}"[:80]
    what = {404: "a path of this server", 405: "another method"}.get(error.status_code)
    message = f"expected {what}, got {path}" if what else str(error.detail)
    return JSONResponse(ApiError(error.status_code, message).body, error.status_code)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


async def _failed(request: Request, error: Exception) -> Response:
    """The library logs the cause after this."""
    shown = ApiError(
        500, "the proxy failed; its log has the cause", kind="server_error", code="internal"
    )
    return JSONResponse(shown.body, shown.status)


def _logged(error: ApiError) -> ApiError:
    if error.status >= 500:
        logger.error("%s %s: %s", error.status, error.code, error.message)
    return error
