"""The data port: TCP connections of workers, packet by packet. Decides nothing; a damaged packet ends its connection only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Protocol

from proto import data_port
from proto.data_port import LENGTH, Kind, Packet, PacketError
from proto.frame import FrameError
from proto.ids import BlockKey
from proto.residency import Tier
from shared.log import get_logger

# Bytes to a reader that takes nothing for this long are not worth keeping.
SEND_S_MAX: Final = 10.0

log = get_logger()


class BlockStore(Protocol):
    """What a connection asks of the shard."""

    async def put(self, data: bytes) -> BlockKey:
        """Take a frame, waiting while too much waits for a commit. Raises FrameError."""
        ...

    async def settled(self, keys: set[BlockKey]) -> None:
        """Wait until none of these puts is open any more."""
        ...

    async def read(self, keys: tuple[BlockKey, ...]) -> list[tuple[Tier, bytes]]:
        """Frames in order, up to the first that is not here."""
        ...


class DataServer:
    """Owns the listening socket and its connections."""

    def __init__(self, store: BlockStore, *, connections_max: int) -> None:
        self._store, self._connections_max = store, connections_max
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()

    async def start(self, host: str, port: int) -> int:
        """Listen; the real port."""
        self._server = await asyncio.start_server(self._serve, host, port)
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def connection_count(self) -> int:
        """Workers that are connected, once for puts and once for gets."""
        return len(self._connections)

    async def close(self) -> None:
        """Stop listening and cut every connection."""
        if self._server is None:
            return
        self._server.close()
        for writer in list(self._connections):
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        try:
            if len(self._connections) > self._connections_max:
                raise PacketError(f"{self._connections_max} connections are open already")
            await _Connection(self._store, reader, writer).run()
        except (PacketError, FrameError) as refused:
            log.warning("data_connection_refused", error=str(refused))
            with suppress(OSError, TimeoutError):
                writer.writelines(data_port.fault(str(refused)))
                await asyncio.wait_for(writer.drain(), 1.0)
        except (EOFError, OSError, TimeoutError):
            # The worker is gone or takes nothing; its next connection starts afresh.
            log.debug("data_connection_ended")
        finally:
            self._connections.discard(writer)
            with suppress(OSError):
                writer.close()


class _Connection:
    """One worker's connection: one packet after the other, so that TCP holds a fast sender back."""

    def __init__(self, store: BlockStore, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._store, self._reader, self._writer = store, reader, writer
        # Puts of this connection that were not known to be settled at the last flush.
        self._put: set[BlockKey] = set()

    async def run(self) -> None:
        handlers: dict[Kind, Callable[[Packet], Awaitable[None]]] = {
            Kind.PUT: self._take,
            Kind.FLUSH: self._flush,
            Kind.GET: self._get,
        }
        while True:
            length = data_port.read_length(await self._reader.readexactly(LENGTH.size))
            packet = data_port.read_packet(await self._reader.readexactly(length))
            handler = handlers.get(packet.kind)
            if handler is None:
                raise PacketError(f"{packet.kind.name} is not for a kvstore")
            await handler(packet)

    async def _take(self, packet: Packet) -> None:
        self._put.add(await self._store.put(bytes(packet.payload)))

    async def _flush(self, packet: Packet) -> None:
        number = data_port.number_of(packet)
        await self._store.settled(self._put)
        self._put.clear()
        await self._send(data_port.flushed(number))

    async def _get(self, packet: Packet) -> None:
        number, keys = data_port.get_of(packet)
        for tier, frame in await self._store.read(keys):
            await self._send(data_port.frame(number, tier, frame))
        await self._send(data_port.end(number))

    async def _send(self, pieces: list[bytes]) -> None:
        self._writer.writelines(pieces)
        await asyncio.wait_for(self._writer.drain(), SEND_S_MAX)
