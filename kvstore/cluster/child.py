"""``python -m kvstore.cluster.child MEMORY SOCKET``: the index process of a node of a cluster.

It is the index process of :mod:`kvstore.index.child`, and also keeps the node's record in a store.
However the node ends, this process ends too, and withdraws the record: the others need not wait
until its lease expires.
"""

import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Final

import msgspec

from kvstore.cluster.claiming import Presence
from kvstore.cluster.greeting import LocalNode
from kvstore.cluster.leased import LeasedMembership
from kvstore.cluster.membership import used_nodes
from kvstore.cluster.messages import (
    AskPages,
    BeginCluster,
    ChildSettings,
    DirectoryReport,
    HoldingsFound,
    Join,
    Leave,
    NodesFound,
    StorePlace,
    encode_message,
    message_to_child,
)
from kvstore.cluster.presence import PresenceCheck
from kvstore.cluster.records import JoinStanding, NodeRecord
from kvstore.cluster.store import RecordStore
from kvstore.cluster.stores import open_store
from kvstore.index.child import serve
from kvstore.index.reading import UnreadableError
from kvstore.protocol.errors import InvalidArgument, printable

_log = logging.getLogger(__name__)

BUG: Final = "bug"
"""The cause by which failures that nothing expects are counted."""
AGAIN_S: Final = 1.0
"""Seconds until work that has failed as a whole is begun again."""

OpenStore = Callable[[StorePlace, str], RecordStore]
"""Opens the store of the cluster with this name."""
Tell = Callable[[bytes], None]


def configured_store(place: StorePlace, cluster: str) -> RecordStore:
    """The etcd or Redis of the configuration."""
    return open_store(place.kind, place.servers, cluster)


class ClusterCompanion:
    """Keeps the node's record, next to the index in the same process.

    Args:
        make_store: opens the store of the membership.
    """

    def __init__(self, make_store: OpenStore = configured_store) -> None:
        self._make_store = make_store
        self._settings: ChildSettings | None = None
        self._record: NodeRecord | None = None
        self._changed = asyncio.Event()
        self._begun = asyncio.Event()
        self._ask: Callable[[AskPages], None] | None = None
        self._bugs = 0
        #: Names of the nodes that were used last.
        self._known: frozenset[str] = frozenset()

    async def run(self, tell: Tell) -> None:
        """Keep the node joined or not, as requested; leave when cancelled, within a second.

        Args:
            tell: gets all nodes, and the standing, after each change.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(
                _kept(lambda: self._share(tell), lambda why: self._not_shared(why, tell)),
                name="shared directory",
            )
            await _kept(lambda: self._belong(tell), lambda why: _not_belonging(why, tell))

    async def _share(self, tell: Tell) -> None:
        """Use the directory that nodes share, if there is one, until cancelled."""
        await self._begun.wait()
        settings = self._settings
        assert settings is not None
        if settings.directory is not None:
            # Its client is an extra package.
            from kvstore.cluster.sharing import SharedDirectory

            shared = SharedDirectory(
                settings.directory, settings.credentials,
                lambda message: tell(encode_message(self._counted(message))),
            )  # fmt: skip
            self._ask = shared.ask
            await shared.run()

    def _counted(self, message: HoldingsFound | DirectoryReport) -> HoldingsFound | DirectoryReport:
        """A message of the directory; a report also has the failures that it did not live on."""
        if not self._bugs or isinstance(message, HoldingsFound):
            return message
        return msgspec.structs.replace(message, faults=message.faults | {BUG: self._bugs})

    def _not_shared(self, why: str, tell: Tell) -> None:
        self._ask = None
        self._bugs += 1
        tell(encode_message(DirectoryReport(faults={BUG: self._bugs}, why=why, trouble=BUG)))

    async def _belong(self, tell: Tell) -> None:
        """Keep the node joined or not, as requested, until cancelled."""
        while self._settings is None:
            await self._wait()
        settings = self._settings
        place = settings.membership
        if place is None:
            return
        store = self._make_store(place, settings.credentials.cluster)
        membership = LeasedMembership(store, self._presence)
        async with asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(membership.run(), name="membership"),
                tasks.create_task(
                    self._report(membership, settings.credentials.node, tell), name="nodes"
                ),
            ]
            try:
                while True:
                    if self._record is not None:
                        await membership.join(self._record)
                    else:
                        await membership.leave()
                    await self._wait()
            finally:
                await membership.leave()
                for task in running:
                    task.cancel()

    def hear(self, body: bytes) -> None:
        """See :class:`kvstore.index.child.Companion`."""
        message = message_to_child(body)
        match message:
            case BeginCluster(settings):
                if self._settings is not None:
                    raise UnreadableError("it has begun already")
                self._settings = settings
                self._begun.set()
            case AskPages():
                if self._ask is not None:  # else whoever asks does not wait for long
                    self._ask(message)
                return
            case Join(record, known):
                self._record = record
                self._known = self._known or frozenset(known)
            case Leave():
                self._record = None
        self._changed.set()

    async def _report(self, membership: LeasedMembership, own: str, tell: Tell) -> None:
        """Report the nodes that this node uses, and its standing, after each change."""
        async with aclosing(membership.changes()) as changes:
            async for nodes, standing in changes:
                used = used_nodes(nodes, own, self._known)
                if used:
                    self._known = frozenset(used)
                tell(encode_message(NodesFound(used, standing)))

    async def _wait(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    async def _presence(self, there: NodeRecord) -> Presence:
        """Whether the node of a record, which has this node's name, lives."""
        own, settings = self._record, self._settings
        assert settings is not None
        if own is None:
            return Presence.SILENT
        shown = settings.credentials
        try:
            tls = shown.files.connecting() if shown.files is not None else None
        except InvalidArgument:  # a new certificate may be on its way
            return Presence.SILENT
        local = LocalNode(shown.cluster, own.name, own.boot, own.scheme)
        return await PresenceCheck(local, tls)(there)


async def _kept(work: Callable[[], Awaitable[None]], failed: Callable[[str], None]) -> None:
    """Do some work until it has ended or is cancelled; begin it again after a bug.

    So the other work, and the index, go on. An assertion that failed ends the process.

    Args:
        work: can be begun again.
        failed: is told what happened.
    """
    while True:
        try:
            return await work()
        except* AssertionError:
            raise
        except* Exception as errors:
            _log.exception("bug in the index process, which continues")
            failed(printable(f"bug: {errors.exceptions[0]!r}"))
        await asyncio.sleep(AGAIN_S)


def _not_belonging(why: str, tell: Tell) -> None:
    tell(encode_message(NodesFound({}, JoinStanding("away", "", why))))


def main() -> int:
    """Serve until the socket is closed.

    Returns:
        Exit status.
    """
    memory, control = (int(argument) for argument in sys.argv[1:])
    serve(memory, control, ClusterCompanion())
    return 0


if __name__ == "__main__":
    sys.exit(main())
