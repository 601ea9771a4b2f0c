"""Compares the index with what nodes really have, a sample at a time.

A node is asked for pages chosen at random, and about pages that its events named. A page on which
node and index differ is checked again: only if they still differ once all batches published up to
that answer are applied, the index is wrong. Then the whole snapshot of the node is read again. If
the index only lacks pages, and some of the node's were left out because it was full, that is done
only when there is room, and not often.
"""

import asyncio
import random
from collections.abc import Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvstore.events.questions import KEYS_MAX
from kvstore.events.zmtp import PeerError
from kvstore.index.apply import shard_name
from kvstore.index.directory import PageHolder
from kvstore.index.feed import WorkerFeed
from kvstore.index.followers import Follower, Followers
from kvstore.index.snapshot import SnapshotError, SnapshotPages, audit, sample
from kvstore.index.table import IndexReader
from kvstore.protocol.page import KEY_BYTES

AUDIT_S: Final = 30.0
"""Pause between two audits of all nodes."""
SAMPLE_KEYS: Final = 1_024
AGAIN_S: Final = 300.0
"""Pause between two snapshots of a node because of pages that may have been left out."""
_APPLIED_S_MAX: Final = 5.0
"""Maximum wait for the batches that an answer needs."""


class AuditResult(NamedTuple):
    """What an audit found.

    Attributes:
        pages: pages that were compared.
        missing: pages that the node has and the index lacks.
        stale: pages that its events named, and on which node and index differ.
    """

    pages: int = 0
    missing: int = 0
    stale: int = 0


class Auditor:
    """Audits the nodes among the followed workers.

    Args:
        table: the index.
        followers: followers that feed the index.
    """

    def __init__(self, table: IndexReader, followers: Followers) -> None:
        self._table = table
        self._followers = followers
        self._results: dict[str, AuditResult] = {}

    def last(self, worker: str) -> AuditResult:
        """The last audit of a worker."""
        return self._results.get(worker, AuditResult())

    async def run(self) -> None:
        """Audit all nodes again and again until cancelled."""
        while True:
            await asyncio.sleep(AUDIT_S * random.uniform(0.9, 1.1))
            for follower in list(self._followers):
                if follower.has_snapshots and follower.current:
                    await self.audit(follower)
            known = {follower.source.worker for follower in self._followers}
            self._results = {worker: r for worker, r in self._results.items() if worker in known}

    async def audit(self, follower: Follower[WorkerFeed]) -> None:
        """Audit one node; a node that does not answer is audited another time."""
        try:
            async with asyncio.timeout(4 * _APPLIED_S_MAX):
                found = await self._compared(follower)
        except (OSError, PeerError, SnapshotError) as error:
            follower.faults.note("audit", f"{follower.source.worker}: {error}")
            return
        if found is None:
            return
        self._results[follower.source.worker] = found
        if found.missing or found.stale:
            follower.faults.note("drift", f"{found.missing} pages missing, {found.stale} stale")
            if found.stale or not follower.may_lack_pages or self._have_room(follower):
                follower.drifted()

    def _have_room(self, follower: Follower[WorkerFeed]) -> bool:
        """Whether pages that were left out could be there after another snapshot."""
        age_s = asyncio.get_running_loop().time() - follower.snapshot_at
        return follower.feed.has_room and age_s >= AGAIN_S

    async def _compared(self, follower: Follower[WorkerFeed]) -> AuditResult | None:
        """The result; None if the batches that an answer needs do not arrive."""
        source = follower.source
        assert source.replay_endpoint is not None
        _, parts, end = await sample(source.replay_endpoint, source.credentials, keys=SAMPLE_KEYS)
        if not await _applied(follower, end.sequence_end):
            return None
        pages = missing = stale = 0
        for part in parts:
            pages += len(part.keys) // KEY_BYTES
            suspects = part._replace(keys=_chosen(part.keys, ~self._present(follower, part)))
            missing += await self._differ(follower, suspects)
            await asyncio.sleep(0)
        for part in follower.sampled.pages():
            pages += len(part.keys) // KEY_BYTES
            stale += await self._differ(follower, part)
        return AuditResult(pages, missing, stale)

    def _present(
        self, follower: Follower[WorkerFeed], part: SnapshotPages
    ) -> npt.NDArray[np.bool_]:
        """Whether the index has each of some pages."""
        chains = follower.feed.chains_of(part.space, part.keys)
        holder = PageHolder(follower.source.worker, part.medium, shard_name(0, part.shard), 0)
        bit = self._table.holders().holders.get(holder)
        found = self._table.find(chains)
        if bit is None:
            return np.zeros(len(chains), dtype=np.bool_)
        here = (found.rows[:, bit // 64] >> np.uint64(bit % 64)) & np.uint64(1)
        return np.repeat(here != 0, np.diff(found.ends, prepend=0))

    async def _differ(self, follower: Follower[WorkerFeed], part: SnapshotPages) -> int:
        """Number of pages on which node and index differ after all; of too many, of the first."""
        part = part._replace(keys=part.keys[: KEYS_MAX * KEY_BYTES])
        if not part.keys:
            return 0
        source = follower.source
        assert source.replay_endpoint is not None
        truth = await audit(
            source.replay_endpoint, source.credentials, part.space, part.shard, part.keys
        )
        if not await _applied(follower, truth.end.sequence_end):
            return 0
        if part.medium not in truth.media:
            return 0
        has = truth.places >> truth.media.index(part.medium) & 1 != 0
        return int(np.count_nonzero(has != self._present(follower, part)))


async def _applied(follower: Follower[WorkerFeed], number: int) -> bool:
    """Wait until all batches before one are applied; False if they do not arrive."""
    try:
        async with asyncio.timeout(_APPLIED_S_MAX):
            await follower.reached(number)
    except TimeoutError:
        return False
    follower.feed.flush()
    return follower.current


def _chosen(packed: bytes, which: Iterable[bool]) -> bytes:
    """Some of these keys."""
    keys = np.frombuffer(packed, dtype=np.uint8).reshape(-1, KEY_BYTES)
    chosen: bytes = keys[np.asarray(which)].tobytes()
    return chosen
