"""The index process of a node, whose membership is kept in a folder: a file for each record."""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from kvstore.cluster.child import ClusterCompanion
from kvstore.cluster.messages import StorePlace
from kvstore.index.child import serve
from kvstore.protocol.errors import PeerUnreachable

PAUSE_S = 0.01
AWAY = "away"
"""While there is this file beside the folder, the store does not answer."""
SETTINGS = "settings"


class FolderStore:
    """Records as files. Only one process at a time may change a record; no lease runs out."""

    def __init__(self, place: StorePlace, cluster: str) -> None:
        self.lease_s = 1.0
        self._folder = Path(place.servers.endpoints[0])
        self._beside = self._folder.parent
        self._cluster = cluster

    async def open(self) -> None:
        self._answer()

    async def close(self) -> None:
        pass

    async def settings(self, offered: bytes) -> bytes:
        self._answer()
        there = self._beside / SETTINGS
        if not there.exists():
            there.write_bytes(offered)
        return there.read_bytes()

    async def claim(self, name: str, value: bytes, expected: bytes | None) -> bytes | None:
        self._answer()
        present = self._read(name)
        if present != expected:
            return present or b""
        part = self._beside / f"part.{name}"
        part.write_bytes(value)
        part.rename(self._folder / name)
        return None

    async def renew(self) -> bool:
        self._answer()
        return True

    async def withdraw(self, name: str, value: bytes) -> None:
        self._answer()
        if self._read(name) == value:
            (self._folder / name).unlink()

    async def watch(self) -> AsyncGenerator[Mapping[str, bytes], None]:
        told: Mapping[str, bytes] | None = None
        while True:
            self._answer()
            names = [one.name for one in self._folder.iterdir()]
            now = {name: value for name in names if (value := self._read(name)) is not None}
            if now != told:
                told = now
                yield now
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), PAUSE_S)

    def _answer(self) -> None:
        if (self._beside / AWAY).exists():
            raise PeerUnreachable("it does not answer")

    def _read(self, name: str) -> bytes | None:
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None


if __name__ == "__main__":
    memory, control = (int(argument) for argument in sys.argv[1:])
    serve(memory, control, ClusterCompanion(FolderStore))
