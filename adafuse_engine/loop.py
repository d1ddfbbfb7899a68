"""An event loop on a thread of its own, which callers on any thread or loop hand coroutines to."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["LoopThread", "together"]

T = TypeVar("T")


class LoopThread:
    """Runs coroutines. Handing one over never waits for the loop, so event loops may do it too."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine; cancelling the future cancels it. Raises `RuntimeError` after `close`."""
        try:
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise

    def close(self, last: Iterable[Callable[[], Coroutine[Any, Any, None]]] = ()) -> None:
        """Cancel what runs, let it clean up, run what has to come ``last``, end the thread. May be called again."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._wind_up(list(last)), self._loop)
            # An engine that is dropped may be collected on its own thread, which then ends by itself.
            if threading.current_thread() is not self._thread:
                self._thread.join()

    async def _wind_up(self, last: list[Callable[[], Coroutine[Any, Any, None]]]) -> None:
        me = asyncio.current_task()
        tasks = [t for t in asyncio.all_tasks() if t is not me]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(call() for call in last), return_exceptions=True)
        await self._loop.shutdown_asyncgens()
        # One round more, so that the futures of what was cancelled are done before the loop stops.
        self._loop.call_soon(self._loop.stop)


async def together(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side and return their results in order; one failure cancels the others.

    The first error is raised as itself, not wrapped in a group.
    """
    coroutines = list(calls)
    if not coroutines:
        return []
    if len(coroutines) == 1:
        return [await coroutines[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(c) for c in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [t.result() for t in tasks]
