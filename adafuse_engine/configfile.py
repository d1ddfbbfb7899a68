"""Configuration as a TOML file: what `adafuse calibrate` writes and every face of the engine reads.

::

    [[members]]
    model = "bundled:gemma-3-270m"
    weight = 3.0

    [decoding]
    threshold = 0.7

    [engine]
    max_concurrency = 8

    [server]
    port = 8000

``[[members]]`` holds fields of `MemberConfig`, ``[decoding]`` those of `DecodingConfig`, ``[engine]`` the others of
`EngineConfig`, ``[server]`` those of `ServerConfig`. A table ``[about]`` may say anything, and is not read.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from adafuse_engine.config import EngineConfig, MemberConfig, ServerConfig
from adafuse_engine.errors import InvalidArgumentError, UnknownArgumentError

__all__ = ["read_config", "read_server", "write_config"]

_TABLES = ("members", "decoding", "engine", "server", "about")


def read_config(path: str | Path) -> EngineConfig:
    """The configuration in a file.

    Raises `ConfigError` for a file that is missing or no TOML, for unknown names and for values that make no sense.
    """
    data = _tables(path)
    members, decoding, engine = data.get("members"), data.get("decoding", {}), data.get("engine", {})
    if not isinstance(members, list) or not members:
        raise InvalidArgumentError(f'{path} has no [[members]]; give each a model = "..."')
    if not isinstance(decoding, Mapping) or not isinstance(engine, Mapping):
        raise InvalidArgumentError(f"{path}: decoding and engine are tables, [decoding] and [engine]")
    return EngineConfig(**{**engine, "members": members, "decoding": decoding})


def read_server(path: str | Path) -> ServerConfig:
    """The ``[server]`` table of a file; the defaults where it has none. Raises `ConfigError` like `read_config`."""
    server = _tables(path).get("server", {})
    if not isinstance(server, Mapping):
        raise InvalidArgumentError(f"{path}: server is a table, [server]")
    return ServerConfig(**server)


def _tables(path: str | Path) -> dict[str, Any]:
    path = Path(path).expanduser()
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgumentError(f"{path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} is no TOML: {error}") from error
    for name in data:
        if name not in _TABLES:
            raise UnknownArgumentError(name, _TABLES, f"table in {path.name}:")
    return data


def write_config(path: str | Path, config: EngineConfig, about: Mapping[str, Any] | None = None) -> None:
    """Write a configuration; settings that are the defaults are left out. ``about``: plain values, for people."""
    rest = config.model_dump(mode="json", exclude_defaults=True, exclude={"members", "decoding"})
    tables: dict[str, Any] = {"about": dict(about)} if about else {}
    tables["members"] = [_plain(_member(m)) for m in config.members]
    if decoding := _plain(config.decoding.model_dump(mode="json", exclude_defaults=True)):
        tables["decoding"] = decoding
    if rest:
        tables["engine"] = _plain(rest)
    Path(path).expanduser().write_text(tomli_w.dumps(tables), encoding="utf-8")


def _member(member: MemberConfig) -> dict[str, Any]:
    """Without its key: files say which environment variable holds it."""
    dump = member.model_dump(mode="json", exclude_defaults=True, exclude={"remote": {"api_key"}})
    if remote := _plain(dump.pop("remote", {})):
        dump["remote"] = remote
    return dump


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without None, which TOML has not."""
    return {k: v for k, v in values.items() if v is not None}
