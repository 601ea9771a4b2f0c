"""How soon does a node notice that its membership store (etcd or Redis) fails or comes back?

Real servers on loopback, two nodes, the product's leases. ``KIND/killed``, ``KIND/stopped``: until
the node says that the store is away; ``KIND/restarted``, ``KIND/goes-on``: until it has joined
again; ``KIND/emptied``: until both records are back; ``KIND/came``, ``KIND/left``: until the other
node knows; ``KIND/died``: the same for a node that does not leave. ``KIND/renew``: one renewal.
"""

import argparse
import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any, Final

from bench.measure import Progress, Report, Result
from bench.store_servers import EtcdServer, RedisServer
from kvstore.cluster.access import StoreServers
from kvstore.cluster.greeting import LocalNode
from kvstore.cluster.leased import LeasedMembership
from kvstore.cluster.presence import PresenceCheck
from kvstore.cluster.records import SCHEME, JoinStanding, NodeRecord
from kvstore.cluster.stores import StoreKind, open_store

CLUSTER: Final = "bench"
WAIT_S: Final = 30.0
CALLS: Final = 200
_SERVERS: Final[dict[StoreKind, type[EtcdServer | RedisServer]]] = {
    "etcd": EtcdServer, "redis": RedisServer,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this group."""
    parser.add_argument("--kinds", default="etcd,redis", help="stores to test, comma-separated")


def run(options: argparse.Namespace) -> int:
    """Measure each kind of store."""
    kinds = [kind for kind in _SERVERS if kind in options.kinds.split(",")]
    with Report(json=options.json) as report, Progress("stores", len(kinds)) as progress:
        for kind in kinds:
            progress.step(kind)
            with tempfile.TemporaryDirectory(prefix="kvstore-") as folder:
                figures = asyncio.run(_measure(kind, Path(folder)))
            for case, took_s in figures.items():
                report.add(Result(f"{kind}/{case}", 1_000 * took_s, "ms"))
    return 0


class _Node:
    """A membership, and waiting for what it says."""

    def __init__(self, kind: StoreKind, servers: StoreServers, name: str) -> None:
        local = LocalNode(CLUSTER, name, name.encode() * 16, SCHEME)
        store = open_store(kind, servers, CLUSTER)
        self.membership = LeasedMembership(store, PresenceCheck(local, None))
        self.record = NodeRecord(name=name, boot=local.boot, endpoint=f"127.0.0.1:{ord(name)}")
        self.running = asyncio.create_task(self.membership.run())

    async def end(self) -> None:
        self.running.cancel()
        await asyncio.wait([self.running])

    async def until(
        self, condition: Callable[[Mapping[str, NodeRecord], JoinStanding], bool], began_s: float
    ) -> float:
        """Seconds from then until it says so."""
        async with asyncio.timeout(WAIT_S):
            async for nodes, standing in self.membership.changes():
                if condition(nodes, standing):
                    break
        return monotonic() - began_s

    async def stands(self, state: str, began_s: float) -> float:
        return await self.until(lambda _, standing: standing.state == state, began_s)

    async def sees(self, names: str, began_s: float) -> float:
        return await self.until(lambda nodes, _: nodes.keys() == set(names), began_s)


async def _measure(kind: StoreKind, folder: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    with _SERVERS[kind](folder / kind) as server:
        servers = StoreServers((server.endpoint,))
        async with _nodes(kind, servers, "ab") as (a, b):
            await a.membership.join(a.record)
            await a.stands("joined", monotonic())
            began_s = monotonic()
            await b.membership.join(b.record)
            figures["came"] = await a.sees("ab", began_s)
            began_s = monotonic()
            await b.membership.leave()
            figures["left"] = await a.sees("a", began_s)
            await b.membership.join(b.record)
            await a.sees("ab", began_s)
            await b.sees("ab", began_s)

            figures |= await _harmed(a, "killed", server.kill, "restarted", server.start)
            await b.stands("joined", monotonic())
            figures |= await _harmed(a, "stopped", server.stop, "goes-on", server.go_on)
            await b.stands("joined", monotonic())
            figures["emptied"] = await _emptied(kind, servers, server.empty)

            await b.end()
            figures["died"] = await a.sees("a", monotonic())
        figures["renew"] = await _renewals(kind, servers)
    return figures


@asynccontextmanager
async def _nodes(
    kind: StoreKind, servers: StoreServers, names: str
) -> AsyncIterator[list[_Node]]:  # fmt: skip
    nodes = [_Node(kind, servers, name) for name in names]
    try:
        yield nodes
    finally:
        for node in nodes:
            await node.end()


async def _harmed(
    node: _Node, harm: str, do: Callable[[], Any], mend: str, undo: Callable[[], Any]
) -> dict[str, float]:
    """How long a node takes to see both; the mending counts from when the server answers."""
    began_s = monotonic()
    await asyncio.to_thread(do)
    noticed_s = await node.stands("away", began_s)
    await asyncio.to_thread(undo)
    return {harm: noticed_s, mend: await node.stands("joined", monotonic())}


async def _emptied(kind: StoreKind, servers: StoreServers, empty: Callable[[], Any]) -> float:
    store = open_store(kind, servers, CLUSTER)
    await store.open()
    try:
        began_s = monotonic()
        await asyncio.to_thread(empty)
        async with asyncio.timeout(WAIT_S):
            async for records in store.watch():
                if len(records) == 2:
                    break
        return monotonic() - began_s
    finally:
        await store.close()


async def _renewals(kind: StoreKind, servers: StoreServers) -> float:
    """Mean of one renewal."""
    store = open_store(kind, servers, CLUSTER)
    await store.open()
    try:
        await store.claim("c", b"{}", None)
        began_s = monotonic()
        for _ in range(CALLS):
            assert await store.renew()
        return (monotonic() - began_s) / CALLS
    finally:
        await store.close()
