"""The ensemble over HTTP, in the form of OpenAI's API (extra ``server``)."""

from adafuse_engine.server.app import create_app

__all__ = ["create_app"]
