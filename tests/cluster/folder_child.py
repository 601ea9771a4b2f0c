"""The index process of a node, whose membership is kept in a folder: a file for each record."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path

from kvstore.cluster.child import Alive, ClusterCompanion
from kvstore.cluster.records import (
    MemberStanding,
    NodeRecord,
    decode_record,
    decode_records,
    encode_record,
)
from kvstore.cluster.store import StoreSettings
from kvstore.index.child import serve

PAUSE_S = 0.01
AWAY = ".away"
"""While the folder has this file, the store does not answer."""


class FolderMembership:
    """The record of one node in a folder. It looks at it again and again."""

    def __init__(self, settings: StoreSettings, record: NodeRecord, alive: Alive) -> None:
        self.standing = MemberStanding()
        self.unreadable = 0
        self._folder = Path(settings.endpoints[0])
        self._own = self._folder / record.name
        self._record = record
        self._alive = alive
        self._nodes: dict[str, NodeRecord] = {}

    async def watch(self) -> AsyncGenerator[Mapping[str, NodeRecord], None]:
        told = None
        while True:
            if told != self._nodes:
                told = self._nodes
                yield told
            await asyncio.sleep(PAUSE_S)

    async def run(self) -> None:
        while True:
            if (self._folder / AWAY).exists():
                self.standing = MemberStanding("away", "", "it does not answer")
            elif await self._may():
                values = {one.name: one.read_bytes() for one in self._folder.iterdir()}
                self._nodes, unreadable = decode_records(values)
                self.unreadable = len(unreadable)
                self.standing = MemberStanding("joined")
            await asyncio.sleep(PAUSE_S)

    async def leave(self) -> None:
        if self._own.exists() and self._own.read_bytes() == encode_record(self._record):
            self._own.unlink()

    async def _may(self) -> bool:
        if self._own.exists():
            there = decode_record(self._own.name, self._own.read_bytes())
            ours = there.boot == self._record.boot or there.endpoint == self._record.endpoint
            if not ours and await self._alive(there) is not False:
                self.standing = MemberStanding("refused", "name", f"{there.endpoint} has it")
                return False
        part = self._folder.parent / f"{self._own.name}.{self._record.boot.hex()}"
        part.write_bytes(encode_record(self._record))
        part.rename(self._own)
        return True


if __name__ == "__main__":
    memory, control = (int(argument) for argument in sys.argv[1:])
    serve(memory, control, ClusterCompanion(FolderMembership))
