"""The routes: OpenAI's models, completions and chat completions; health, readiness and metrics."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from http import HTTPStatus
from time import monotonic
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.middleware.trustedhost import TrustedHostMiddleware

from adafuse_engine.config import ServerConfig
from adafuse_engine.engine import Engine
from adafuse_engine.errors import AdaFuseError, InvalidArgumentError
from adafuse_engine.server.answering import Answer, ChatAnswer, TextAnswer
from adafuse_engine.server.answers import error_body, told
from adafuse_engine.server.gate import Gate
from adafuse_engine.server.metrics import Metrics
from adafuse_engine.server.schema import ChatRequest, CompletionRequest

__all__ = ["create_app"]

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
GONE = 499
"""The status, for the metrics, of requests whose client went away before the answer."""


def create_app(engine: Engine, config: ServerConfig | None = None) -> FastAPI:
    """The server of a loaded engine, as an ASGI application; it does not close the engine.

    ``app.state.draining`` can be set to tell load balancers, by ``/ready``, to send no more.
    """
    config = config or ServerConfig()
    if config.model_name in engine.member_names:
        raise InvalidArgumentError(f"server.model_name: a member is called {config.model_name!r} already")
    engines = {config.model_name: engine}
    alone = {name: engine.only(name) for name in engine.member_names if len(engine.member_names) > 1}

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        yield
        for one in alone.values():
            await asyncio.to_thread(one.close)

    metrics = Metrics()
    app = FastAPI(title="AdaFuse", description="Several language models answer as one.", lifespan=life)
    app.state.draining = False
    app.state.metrics = metrics
    app.add_middleware(
        Gate,
        key=_key(config),
        places=engine.max_concurrency + config.max_queue,
        max_body=config.max_body_bytes,
        retry_after=config.retry_after_s,
        metrics=metrics,
    )
    hosts = config.allowed_hosts or (LOOPBACK if config.host in LOOPBACK else ())
    if hosts:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=list(hosts), www_redirect=False)
    _errors(app)
    _facts(app, engine, [config.model_name, *alone])

    def asked(model: str | None) -> tuple[str, Engine]:
        name = model or config.model_name
        found = {**engines, **alone}.get(name)
        if found is None:
            known = ", ".join([config.model_name, *alone])
            body = told(
                f"there is no model {name!r:.80} here; known: {known}",
                "invalid_request_error",
                "model",
                "model_not_found",
            )
            raise HTTPException(404, body)
        return name, found

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue a text, or several."""
        name, used = asked(body.model)
        return await _respond(TextAnswer(used, name, body), request, metrics)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a chat."""
        name, used = asked(body.model)
        return await _respond(ChatAnswer(used, name, body, config.tool_form), request, metrics)

    return app


def _key(config: ServerConfig) -> str | None:
    if config.api_key is not None:
        return config.api_key.get_secret_value()
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise InvalidArgumentError(f"server.api_key_env: the environment has no {config.api_key_env}")
    return key


# ---- answering


async def _respond(answer: Answer, request: Request, metrics: Metrics) -> Response:
    route, begun = request.url.path, monotonic()

    def over(status: int) -> None:
        metrics.over(route, answer.model, status, monotonic() - begun)
        for completion in answer.completions:
            metrics.answered(answer.model, completion)

    try:
        if not answer.request.stream:
            document = await _while_heard(answer.document(), request)
            over(200 if document is not None else GONE)
            return JSONResponse(document) if document is not None else Response(status_code=GONE)
        events = answer.events()
        # A prompt that cannot be answered gets its status: nothing is sent before the first event is known.
        first = await _while_heard(anext(events), request)
    except Exception as error:
        over(error_body(error)[0])
        raise
    if first is None:
        over(GONE)
        return Response(status_code=GONE)
    metrics.first(route, monotonic() - begun)

    async def body() -> AsyncGenerator[str, None]:
        status = GONE
        try:
            yield first
            async for event in events:
                yield event
            status = 200
        finally:
            await events.aclose()
            over(answer.status or status)

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(body(), media_type="text/event-stream", headers=headers)


async def _while_heard(work: Coroutine[Any, Any, Any], request: Request) -> Any:
    """The result, or None where the client went away first; the work is then cancelled."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, left = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for one in (task, left):
            one.cancel()
        await asyncio.gather(task, left, return_exceptions=True)


# ---- what else there is


def _errors(app: FastAPI) -> None:
    def answer(_: Request, error: Exception) -> Response:
        status, body = error_body(error)
        return JSONResponse(body, status)

    def invalid(_: Request, error: Exception) -> Response:
        first = error.errors()[0] if isinstance(error, RequestValidationError) else {"loc": (), "msg": "invalid"}
        where = [str(part) for part in first["loc"] if part != "body"]
        message = f"{'.'.join(where)}: {first['msg']}" if where else str(first["msg"])
        return JSONResponse(told(message, "invalid_request_error", where[0] if where else None), 400)

    def http(_: Request, error: Exception) -> Response:
        status, detail, headers = 500, "", None
        if isinstance(error, AnyHTTPException):
            status, detail, headers = error.status_code, error.detail, error.headers
        if isinstance(detail, dict):
            return JSONResponse(detail, status, headers)
        return JSONResponse(told(detail or HTTPStatus(status).phrase, "invalid_request_error"), status, headers)

    app.add_exception_handler(AdaFuseError, answer)
    app.add_exception_handler(RequestValidationError, invalid)
    app.add_exception_handler(AnyHTTPException, http)
    app.add_exception_handler(Exception, answer)


def _facts(app: FastAPI, engine: Engine, names: list[str]) -> None:
    def card(name: str) -> dict[str, Any]:
        members = engine.member_names if name == names[0] else (name,)
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "adafuse",
            "members": list(members),
            "context_window": engine.context_window,
        }

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The ensemble, and each of its members alone."""
        return {"object": "list", "data": [card(name) for name in names]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        if name not in names:
            body = told(f"there is no model {name!r:.80} here", "invalid_request_error", "model", "model_not_found")
            raise HTTPException(404, body)
        return card(name)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process answers."""
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> JSONResponse:
        """Whether requests should be sent here."""
        if app.state.draining or engine.closed:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ready"})

    @app.get("/metrics")
    async def metrics() -> Response:
        """What was counted, for Prometheus."""
        return Response(app.state.metrics.render(), media_type="text/plain; version=0.0.4")
