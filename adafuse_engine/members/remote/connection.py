"""One HTTP client per server and event loop: time limits, retries, and foreign errors mapped once."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception,
    stop_after_attempt,
    wait_random_exponential,
)

from adafuse_engine.config import MemberConfig, RemoteConfig
from adafuse_engine.errors import InvalidArgumentError, MemberError, UnavailableError

__all__ = ["Connection", "HttpConnection", "address_of"]

AGAIN = frozenset({429, 502, 503, 504})
"""What servers answer that are busy, restarting, or behind a proxy that cannot reach them."""

CONNECT_S = 5.0


class Connection(Protocol):
    """Where a dialect sends its questions."""

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON, get JSON. Raises `UnavailableError`, or `MemberError` for what the server refuses."""
        ...

    async def get(self, path: str) -> Any:
        """Get JSON."""
        ...

    async def aclose(self) -> None:
        """Let go of this loop's connections."""
        ...


def address_of(model: str) -> tuple[str, str | None]:
    """The server's root (without ``/v1``) and the model's name there, if the member's model names one."""
    url = httpx.URL(model.removeprefix("openai+"))
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidArgumentError(
            f"model: {model!r:.80} is no address of a server; write openai+http://host:port/v1#model"
        )
    name = url.fragment or None
    path = url.path.rstrip("/").removesuffix("/v1")
    root = url.copy_with(path=path or "/", fragment=None, query=None, username=None, password=None)
    return str(root).rstrip("/"), name


class HttpConnection:
    """A server by its root URL. Every question may be asked again, for none changes anything there."""

    def __init__(self, name: str, root: str, config: RemoteConfig) -> None:
        self.name = name
        self.root = root
        self._config = config
        self._key = _key_of(config)
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = WeakKeyDictionary()

    @classmethod
    def to(cls, member: MemberConfig) -> HttpConnection:
        """The connection of a member."""
        return cls(member.label, address_of(member.model)[0], member.remote)

    def __repr__(self) -> str:
        return f"HttpConnection({self.name!r}, {self.root!r})"

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """Send JSON, get JSON."""
        return await self._ask("POST", path, body)

    async def get(self, path: str) -> Any:
        """Get JSON."""
        return await self._ask("GET", path, None)

    async def aclose(self) -> None:
        """Close what this loop holds open."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()

    def _client(self) -> httpx.AsyncClient:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            verify: Any = self._config.verify
            if isinstance(verify, str):
                verify = ssl.create_default_context(cafile=verify)
            client = self._clients[loop] = httpx.AsyncClient(
                base_url=self.root,
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=httpx.Timeout(self._config.timeout_s, connect=min(CONNECT_S, self._config.timeout_s)),
                limits=httpx.Limits(max_connections=64, max_keepalive_connections=32),
                verify=verify,
            )
        return client

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        limit = self._config.timeout_s
        try:
            async with asyncio.timeout(limit):
                async for attempt in AsyncRetrying(
                    stop=stop_after_attempt(self._config.retries + 1),
                    wait=_wait,
                    retry=retry_if_exception(_is_passing),
                    reraise=True,
                ):
                    with attempt:
                        return await self._once(method, path, body)
        except TimeoutError as error:
            raise UnavailableError(self.name, f"{self.root} did not answer within {limit:g} s") from error
        except httpx.HTTPStatusError as error:
            raise self._refused(error.response) from error
        except httpx.HTTPError as error:
            raise UnavailableError(
                self.name, f"{self.root} cannot be reached ({type(error).__name__}: {error})"
            ) from error

    async def _once(self, method: str, path: str, body: Mapping[str, Any] | None) -> Any:
        response = await self._client().request(method, path, json=body)
        response.raise_for_status()
        try:
            return response.json()
        except ValueError as error:
            raise UnavailableError(self.name, f"{self.root}{path} did not answer in JSON") from error

    def _refused(self, response: httpx.Response) -> MemberError:
        said = _message(response)
        where = f"{self.root}{response.request.url.path} answered {response.status_code}: {said}"
        if response.status_code in (401, 403):
            return MemberError(
                f"member {self.name!r}: {where}; set remote.api_key_env to the variable that holds the key"
            )
        if response.status_code in AGAIN or response.status_code >= 500:
            return UnavailableError(self.name, where)
        return MemberError(f"member {self.name!r}: {where}")


def _key_of(config: RemoteConfig) -> str | None:
    if config.api_key is not None:
        return config.api_key.get_secret_value()
    if config.api_key_env is None:
        return None
    key = os.environ.get(config.api_key_env)
    if not key:
        raise InvalidArgumentError(f"remote.api_key_env: the environment has no {config.api_key_env}")
    return key


def _is_passing(error: BaseException) -> bool:
    """Whether asking once more may help."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code in AGAIN
    return isinstance(error, httpx.TransportError) and not isinstance(error, httpx.ReadTimeout)


_jitter = wait_random_exponential(multiplier=0.2, max=5.0)


def _wait(state: RetryCallState) -> float:
    """At least as long as the server said, if it did."""
    error = state.outcome.exception() if state.outcome else None
    told = error.response.headers.get("retry-after", "") if isinstance(error, httpx.HTTPStatusError) else ""
    return max(_jitter(state), float(told) if told.isdigit() else 0.0)


def _message(response: httpx.Response) -> str:
    """What the server said, from the usual places."""
    try:
        said: Any = response.json()
    except ValueError:
        said = response.text
    for name in ("error", "message", "detail"):
        if isinstance(said, dict) and name in said:
            said = said[name]
    return " ".join(str(said).split())[:300]
