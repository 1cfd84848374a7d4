"""A proxy between subscriber B and the sidecar, which cuts connections and delays bytes when told to."""

from __future__ import annotations

import asyncio
import contextlib
import time

from stress_child import Parent
from stress_site import SINKS, Site

__all__ = ["run_proxy"]

_CHUNK_BYTES = 16 << 10
_DELAY_S = 0.05
"""Of each chunk, while bytes are delayed."""


def run_proxy(parent: Parent, site: Site) -> None:
    """Forward until told to leave."""
    asyncio.run(_Proxy(parent).run(site))


class _Proxy:
    def __init__(self, parent: Parent) -> None:
        self._parent = parent
        self._connections: set[asyncio.StreamWriter] = set()
        self._refuses_until = self._delays_until = 0.0
        self._leave = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, site: Site) -> None:
        asyncio.get_running_loop().add_reader(self._parent.fileno(), self._obey)
        servers = [
            await self._listen(ours, theirs)
            for sink in SINKS
            for ours, theirs in zip(site.proxied[sink], site.direct[sink], strict=True)
        ]
        self._parent.say("ready")
        await self._leave.wait()
        for server in servers:
            server.close()
        self._cut()

    async def _listen(self, ours: int, theirs: int) -> asyncio.Server:
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await self._forward(reader, writer, theirs)

        return await asyncio.start_server(forward, "127.0.0.1", ours)

    def _obey(self) -> None:
        match self._parent.poll():
            case ("cut", seconds):
                self._refuses_until = time.monotonic() + seconds
                self._cut()
            case ("delay", seconds):
                self._delays_until = time.monotonic() + seconds
            case ("leave",):
                self._leave.set()
            case _:
                pass

    def _cut(self) -> None:
        for writer in self._connections:
            writer.transport.abort()

    async def _forward(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        """One connection, both directions."""
        upstream: asyncio.StreamWriter | None = None
        try:
            if time.monotonic() < self._refuses_until:
                return
            source, upstream = await asyncio.open_connection("127.0.0.1", port)
            self._connections |= {writer, upstream}
            await asyncio.gather(self._copy(reader, upstream), self._copy(source, writer))
        except OSError:
            pass
        finally:
            for one in (writer, upstream):
                if one is not None:
                    self._connections.discard(one)
                    one.transport.abort()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(_CHUNK_BYTES):
            if time.monotonic() < self._delays_until:
                await asyncio.sleep(_DELAY_S)
            writer.write(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        raise ConnectionResetError("the end of one direction is the end of both")
