"""``python -m kvstore.cluster.child MEMORY SOCKET``: the index process of a node of a cluster.

It is the index process of :mod:`kvstore.index.child`, and keeps the node's record in a store
besides. Whatever ends the node ends this process too, which takes the record away: the others need
not wait until its lease has run out.
"""

import asyncio
import contextlib
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Final, Protocol

from kvstore.cluster.greeting import LocalNode
from kvstore.cluster.messages import (
    Ask,
    Begin,
    ChildSettings,
    Join,
    Leave,
    NodesTold,
    encode_message,
    message_to_child,
)
from kvstore.cluster.probe import is_alive
from kvstore.cluster.records import MemberStanding, NodeRecord
from kvstore.cluster.store import RecordStore, StoreSettings
from kvstore.index.child import serve
from kvstore.index.reading import UnreadableError

LEAVE_S: Final = 1.0
"""Limit of leaving the membership when the node has ended."""
LOOK_S: Final = 0.1
"""Between looks whether the standing has changed."""

Tell = Callable[[bytes], None]
Alive = Callable[[NodeRecord], Awaitable[bool | None]]
"""Whether the node of a record runs there; None = that cannot be said."""


class HeldMembership(Protocol):
    """The record of one node in a store, and the records of all.

    Attributes:
        standing: of this node.
        unreadable: records that describe no node, of those told last.
    """

    standing: MemberStanding
    unreadable: int

    def watch(self) -> AsyncGenerator[Mapping[str, NodeRecord], None]:
        """See :meth:`kvstore.cluster.membership.Membership.watch`."""
        ...

    async def run(self) -> None:
        """Be the node until cancelled, whatever happens to the store."""
        ...

    async def leave(self) -> None:
        """Take the record away if it is still this node's; called once :meth:`run` has ended."""
        ...


Hold = Callable[[StoreSettings, NodeRecord, Alive], HeldMembership]


def open_store(settings: StoreSettings) -> RecordStore:
    """The store of these settings; it is not connected to yet."""
    raise NotImplementedError(settings.kind)


def hold(settings: StoreSettings, record: NodeRecord, alive: Alive) -> HeldMembership:
    """The membership of a node in a store."""
    raise NotImplementedError(open_store(settings), record, alive)


class ClusterCompanion:
    """What the index process of a node does besides the index: it keeps the node's record.

    Args:
        make: makes the membership of a node.
    """

    def __init__(self, make: Hold = hold) -> None:
        """Do nothing yet; see :meth:`run`."""
        self._make = make
        self._settings: ChildSettings | None = None
        self._record: NodeRecord | None = None
        self._changed = asyncio.Event()
        self._begun = asyncio.Event()
        self._ask: Callable[[Ask], None] | None = None

    async def run(self, tell: Tell) -> None:
        """Be the node that is asked for; leave when cancelled, within :data:`LEAVE_S`.

        Args:
            tell: gets all nodes, and the standing, after each change.
        """
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._share(tell), name="shared directory")
            await self._belong(tell)

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
                lambda message: tell(encode_message(message)),
            )  # fmt: skip
            self._ask = shared.ask
            await shared.run()

    async def _belong(self, tell: Tell) -> None:
        """Keep the record of the node until cancelled."""
        while True:
            self._changed.clear()
            settings, record = self._settings, self._record
            if settings is None or settings.store is None or record is None:
                await self._changed.wait()
            else:
                await self._be(settings, settings.store, record, tell)

    def hear(self, body: bytes) -> None:
        """See :class:`kvstore.index.child.Companion`."""
        message = message_to_child(body)
        match message:
            case Begin(settings):
                if self._settings is not None:
                    raise UnreadableError("it has begun already")
                self._settings = settings
                self._begun.set()
            case Ask():
                if self._ask is not None:  # else whoever asks does not wait for long
                    self._ask(message)
                return
            case Join(record):
                if record == self._record:
                    return
                self._record = record
            case Leave():
                self._record = None
        self._changed.set()

    async def _be(
        self, settings: ChildSettings, where: StoreSettings, record: NodeRecord, tell: Tell
    ) -> None:
        """Be this node until something else is asked for."""
        shown = settings.credentials
        local = LocalNode(shown.cluster, record.name, record.boot, record.scheme)
        membership = self._make(where, record, lambda one: is_alive(one, local, shown.files))
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(membership.run(), name="membership"),
                    tasks.create_task(_report(membership, tell), name="nodes"),
                ]
                await self._changed.wait()
                for task in running:
                    task.cancel()
        finally:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_S):
                    await membership.leave()


async def _report(membership: HeldMembership, tell: Tell) -> None:
    """Tell the nodes and the standing after each change, until cancelled."""
    nodes: Mapping[str, NodeRecord] = {}
    told: NodesTold | None = None

    async def follow() -> None:
        nonlocal nodes
        async with aclosing(membership.watch()) as changes:
            async for found in changes:
                nodes = found

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(follow())
        while True:
            now = NodesTold(dict(nodes), membership.standing, membership.unreadable)
            if now != told:
                told = now
                tell(encode_message(now))
            await asyncio.sleep(LOOK_S)


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
