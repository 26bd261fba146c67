"""A TCP relay that passes bytes on late, or stops to pass them on without closing anything. Knows no protocol."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

_CHUNK = 1 << 16


class Relay:
    """Passes connections on to a port of this machine. `delay_s` holds in either direction, in the order of the bytes."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._open: set[asyncio.Task[None]] = set()
        self._held: set[asyncio.Task[None]] = set()
        self.delay_s = 0.0
        self.num_connections = 0

    @contextlib.asynccontextmanager
    async def listening(self, port: int) -> AsyncIterator[None]:
        """Listen at a port of this machine meanwhile."""
        server = await asyncio.start_server(self._meet, "127.0.0.1", port)
        try:
            yield
        finally:
            server.close()
            left = self._open | self._held
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def hold(self) -> int:
        """Pass nothing on any more over the connections that there are, nor close them; how many. New ones work."""
        held = len(self._open)
        self._held |= self._open
        self._open = set()
        return held

    def release(self) -> None:
        """Close the held connections."""
        for task in self._held:
            task.cancel()
        self._held = set()

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio runs this in a task"
        self.num_connections += 1
        self._open.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await self._pass_both(task, reader, writer)
        finally:
            self._open.discard(task)
            self._held.discard(task)
            await _close(writer)

    async def _pass_both(
        self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        ways = [
            asyncio.create_task(self._pass(task, reader, far_writer)),
            asyncio.create_task(self._pass(task, far_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            if task in self._held:
                await asyncio.Event().wait()  # until it is released
        finally:
            for way in ways:
                way.cancel()
            await _close(far_writer)

    async def _pass(self, task: asyncio.Task[None], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        due_s = 0.0
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK):
                if task in self._held:
                    return
                # Never before what came earlier, also when the delay has just become shorter.
                due_s = max(loop.time() + self.delay_s, due_s + 1e-6)
                loop.call_at(due_s, _write, writer, data)


def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    if not writer.is_closing():
        writer.write(data)


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
