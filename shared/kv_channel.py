"""A worker's connection to a shard's data port: packets out and in, with bounds and timeouts. Knows nothing of blocks."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from proto.data_port import LENGTH, Kind, Packet, PacketError, read_length, read_packet
from proto.frame import FRAME_BYTES_MAX
from shared.errors import RoostError

CONNECT_S_MAX: Final = 2.0
# Bytes that may be on their way before a writer waits for the other side.
SEND_BUFFER_BYTES: Final = 4 * 1024 * 1024


class ChannelError(RoostError):
    """The shard is not there, does not answer in time, or does not speak the protocol."""


class DataChannel:
    """One TCP connection. Errors close it; open a new one then."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, host: str, port: int) -> DataChannel:
        """Connect. Raises ChannelError."""
        try:
            reader, writer = await asyncio.wait_for(
                asyncio.open_connection(host, port, limit=2 * FRAME_BYTES_MAX), CONNECT_S_MAX
            )
        except (TimeoutError, OSError) as failed:
            raise ChannelError(f"data port {host}:{port}: {failed or 'no answer'}") from failed
        writer.transport.set_write_buffer_limits(high=SEND_BUFFER_BYTES)
        return cls(reader, writer)

    async def send(self, pieces: list[bytes], timeout_s: float) -> None:
        """Write a packet, waiting while the other side is behind. Raises ChannelError."""
        try:
            self._writer.writelines(pieces)
            await asyncio.wait_for(self._writer.drain(), timeout_s)
        except (TimeoutError, OSError) as failed:
            self.close()
            raise ChannelError(f"sending: {failed or 'the shard takes nothing'}") from failed

    async def receive(self, timeout_s: float) -> Packet:
        """The next packet. Raises ChannelError, also for a FAULT that the shard says."""
        try:
            packet = await asyncio.wait_for(self._receive(), timeout_s)
        except (TimeoutError, OSError, EOFError, PacketError) as failed:
            self.close()
            raise ChannelError(f"receiving: {failed or 'no answer'}") from failed
        if packet.kind is Kind.FAULT:
            self.close()
            raise ChannelError(f"the shard says: {bytes(packet.payload).decode(errors='replace')}")
        return packet

    async def _receive(self) -> Packet:
        length = read_length(await self._reader.readexactly(LENGTH.size))
        return read_packet(await self._reader.readexactly(length))

    def close(self) -> None:
        """Let go of the connection. Idempotent."""
        with suppress(OSError):
            self._writer.close()
