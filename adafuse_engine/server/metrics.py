"""What the server counts, for Prometheus. No text of anybody's is among it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from adafuse_engine.types import Completion

__all__ = ["Metrics"]

SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The counters of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        name = "adafuse_"
        self.inside = Gauge(name + "requests_inside", "Requests that run or wait", registry=self.registry)
        self._requests = Counter(
            name + "requests", "Requests that are over", ["route", "model", "status"], registry=self.registry
        )
        self._tokens = Counter(
            name + "tokens", "Tokens, counted by the first member", ["model", "kind"], registry=self.registry
        )
        self._rounds = Counter(
            name + "rounds", "Rounds: decided by all members' scores, or led by one", ["model", "kind"],
            registry=self.registry,
        )  # fmt: skip
        self._forwards = Counter(
            name + "forward_passes", "Forward passes that requests took part in", ["member"], registry=self.registry
        )
        self._reused = Counter(
            name + "prompt_tokens_reused", "Prompt tokens found in a member's cache", ["member"],
            registry=self.registry,
        )  # fmt: skip
        self._lost = Counter(
            name + "members_lost", "Members that requests went on without", ["member"], registry=self.registry
        )
        self._seconds = Histogram(
            name + "request_seconds", "From a request to its whole answer", ["route"], buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip
        self._first = Histogram(
            name + "first_chunk_seconds", "From a request to the first text", ["route"], buckets=SECONDS,
            registry=self.registry,
        )  # fmt: skip

    def render(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self.registry)

    def refused(self, status: int) -> None:
        """A request that the gate did not let in."""
        self._requests.labels("refused", "", str(status)).inc()

    def first(self, route: str, seconds: float) -> None:
        """The first text of an answer has come."""
        self._first.labels(route).observe(seconds)

    def over(self, route: str, model: str, status: int, seconds: float) -> None:
        """A request is over; 499 is one whose client went away."""
        self._requests.labels(route, model, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def answered(self, model: str, completion: Completion) -> None:
        """What one answer took."""
        usage, trace = completion.usage, completion.trace
        self._tokens.labels(model, "prompt").inc(usage.prompt_tokens)
        self._tokens.labels(model, "completion").inc(usage.completion_tokens)
        self._rounds.labels(model, "fused").inc(trace.fused_rounds)
        self._rounds.labels(model, "led").inc(len(trace.rounds) - trace.fused_rounds)
        for member in usage.members:
            self._forwards.labels(member.name).inc(member.forward_passes)
            self._reused.labels(member.name).inc(member.prompt_tokens_reused)
        for failure in trace.failures:
            self._lost.labels(failure.member).inc()
