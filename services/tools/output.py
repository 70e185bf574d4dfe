"""Pure: output as the model gets it. Head and tail are kept, the middle is counted (F-SBX-02)."""

from __future__ import annotations


class HeadTail:
    """Takes bytes without end and holds at most `limit_bytes`: the first half from the start, the rest from the end."""

    def __init__(self, limit_bytes: int) -> None:
        self._head_max = limit_bytes // 2
        self._tail_max = limit_bytes - self._head_max
        self._head = bytearray()
        self._tail = bytearray()
        self.seen_bytes = 0

    def add(self, data: bytes) -> None:
        """Take the next bytes."""
        self.seen_bytes += len(data)
        room = self._head_max - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > self._tail_max:
            del self._tail[: len(self._tail) - self._tail_max]

    @property
    def dropped_bytes(self) -> int:
        """How many are not held."""
        return self.seen_bytes - len(self._head) - len(self._tail)

    def text(self) -> str:
        """What is held, as text; a mark stands where bytes are missing."""
        if not self.dropped_bytes:
            return bytes(self._head + self._tail).decode(errors="replace")
        middle = f"\n[... {self.dropped_bytes} bytes left out ...]\n"
        return self._head.decode(errors="replace") + middle + self._tail.decode(errors="replace")
