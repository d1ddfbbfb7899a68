"""Who comes in: the key, the size of a request, and how many there may be at once."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from fastapi import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from adafuse_engine.server.answers import told
from adafuse_engine.server.metrics import Metrics

__all__ = ["Gate"]


class _TooLarge(HTTPException):
    """In FastAPI's tree, which reads the body and takes any other exception for a broken one."""


class Gate:
    """Refuses requests before anything is done for them.

    Parameters
    ----------
    app
        What is behind the gate.
    key
        What ``/v1`` and ``/metrics`` ask for as a bearer token; None for nothing.
    places
        Requests for answers that may be inside, running or waiting.
    max_body
        Bytes of a request.
    retry_after
        Seconds that refused clients are told to wait.
    """

    def __init__(
        self, app: ASGIApp, *, key: str | None, places: int, max_body: int, retry_after: int, metrics: Metrics
    ) -> None:
        self._app = app
        self._key = key
        self._places = places
        self._max_body = max_body
        self._too_large = told(f"the request has more than {max_body} bytes", "invalid_request_error")
        self._retry_after = retry_after
        self._metrics = metrics
        self._inside = 0

    def _refusal(self, scope: Scope, headers: MutableMapping[bytes, bytes]) -> JSONResponse | None:
        if self._key is not None and scope["path"].startswith(("/v1/", "/metrics")):
            given = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
            if not hmac.compare_digest(given, self._key.encode()):
                message = "a valid API key is needed as a bearer token"
                body = told(message, "invalid_request_error", None, "invalid_api_key")
                return JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
        length = headers.get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_body:
            return JSONResponse(self._too_large, 413)
        if scope["method"] == "POST" and self._inside >= self._places:
            body = told("too many requests are waiting; try again later", "rate_limit_error", None, "queue_full")
            return JSONResponse(body, 429, {"Retry-After": str(self._retry_after)})
        return None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope, dict(scope["headers"]))
        if refusal is not None:
            self._metrics.refused(refusal.status_code)
            await refusal(scope, receive, send)
            return
        asks = scope["method"] == "POST"
        self._inside += asks
        self._metrics.inside.set(self._inside)
        try:
            await self._app(scope, self._limited(receive), send)
        finally:
            self._inside -= asks
            self._metrics.inside.set(self._inside)

    def _limited(self, receive: Receive) -> Callable[[], Awaitable[MutableMapping[str, Any]]]:
        """``receive`` that counts: a body sent in chunks does not say how long it is."""
        seen = 0

        async def limited() -> MutableMapping[str, Any]:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._max_body:
                raise _TooLarge(
                    413, told(f"the request has more than {self._max_body} bytes", "invalid_request_error")
                )
            return message

        return limited
