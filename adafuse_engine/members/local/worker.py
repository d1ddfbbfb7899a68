"""One thread per device, and all work of all requests on that device goes through it."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from adafuse_engine.members.local.memory import is_out_of_memory
from adafuse_engine.members.local.runner import Feed, Runner

__all__ = ["Worker"]

T = TypeVar("T")


@dataclass(slots=True)
class _Job:
    """A feed to be batched with others of its runner, or a call to be made on its own."""

    runner: Runner | None = None
    feed: Feed | None = None
    call: Callable[[], Any] | None = None
    future: Future[Any] = field(default_factory=Future)


class Worker:
    """Takes all that waits, runs one forward per model over it, and hands the results back."""

    def __init__(self, device: str) -> None:
        self._inbox: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"adafuse-{device}", daemon=True)
        self._thread.start()

    async def feed(self, runner: Runner, feed: Feed) -> Any:
        """The results of a feed. Cancelled before it runs, it does not run."""
        job = _Job(runner, feed)
        self._inbox.put(job)
        return await asyncio.wrap_future(job.future)

    async def call(self, function: Callable[[], T]) -> T:
        """The result of a function called on the worker's thread, after what was asked before."""
        job = _Job(call=function)
        self._inbox.put(job)
        result: T = await asyncio.wrap_future(job.future)
        return result

    def post(self, function: Callable[[], Any]) -> None:
        """Call a function on the worker's thread, after what was asked before; nobody waits for it."""
        self._inbox.put(_Job(call=function))

    def close(self) -> None:
        """Finish what waits and stop. May be called again."""
        self._inbox.put(None)
        self._thread.join(timeout=60)

    def _run(self) -> None:
        while True:
            jobs = [self._inbox.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    jobs.append(self._inbox.get_nowait())
            # Calls first: a request waits for its call before it feeds again, and what it feeds to a tree
            # that it closes is given up before.
            for job in jobs:
                if job is not None and job.call is not None:
                    _do_call(job, job.call)
            groups: dict[int, tuple[Runner, list[_Job]]] = {}
            for job in jobs:
                if job is not None and job.runner is not None and job.feed is not None:
                    # Prefills are long: in a forward with one, short feeds would be padded to its length.
                    kind = id(job) if job.feed.prefill else id(job.runner)
                    groups.setdefault(kind, (job.runner, []))[1].append(job)
            for runner, group in groups.values():
                _do_feeds(runner, group)
            if None in jobs:
                return


def _do_call(job: _Job, call: Callable[[], Any]) -> None:
    if job.future.set_running_or_notify_cancel():
        try:
            job.future.set_result(call())
        except BaseException as error:
            job.future.set_exception(error)


def _do_feeds(runner: Runner, group: Sequence[_Job]) -> None:
    """One forward of a runner for all of its feeds that are still wanted."""
    live = [(job, job.feed) for job in group if job.feed and job.future.set_running_or_notify_cancel()]
    if not live:
        return
    try:
        results = runner.run([feed for _, feed in live])
    except BaseException as error:
        if not is_out_of_memory(error):
            for job, _ in live:
                job.future.set_exception(error)
            return
    else:
        for (job, _), result in zip(live, results, strict=True):
            job.future.set_result(result)
        return
    # Out here the exception is gone, and with it the tensors of the forward that it came from.
    runner.shed()
    for job, feed in live:
        _do_alone(runner, job, feed)


def _do_alone(runner: Runner, job: _Job, feed: Feed) -> None:
    """A forward for one feed: of several that need too much memory together, most may do one by one."""
    try:
        [result] = runner.run([feed])
    except BaseException as error:
        if is_out_of_memory(error):
            # Whoever handles the error must not keep the forward's tensors alive.
            traceback.clear_frames(error.__traceback__)
            runner.shed()
        job.future.set_exception(error)
    else:
        job.future.set_result(result)
