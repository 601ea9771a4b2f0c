"""Operations that change state: pins, eviction, verification, limits, policy, movements, jobs.

Arguments are checked in the same step that makes the change, before anything has changed.
"""

from collections.abc import Callable
from time import monotonic_ns
from typing import Any, Final

import msgspec

from kvstore.node.movements import Demotion, Prefetch
from kvstore.protocol.errors import CapacityError, InvalidArgument, KVStoreError
from kvstore.protocol.page import PrefixKey
from kvstore.protocol.wire import KEEP_KEYS_MAX
from kvstore.server import answers, operations
from kvstore.server.answers import JobRow
from kvstore.server.channel import Caller
from kvstore.server.copies import CopyJobs
from kvstore.server.jobs import Jobs, OperatorJob
from kvstore.server.naming import key_of, not_stored, space_of
from kvstore.server.refusal import Refusal
from kvstore.server.removals import drop
from kvstore.server.status import NodeStatus
from kvstore.server.turns import Turns, Work
from kvstore.server.verify import Verifier
from kvstore.state.choice.policies import POLICIES
from kvstore.state.choice.quotas import PIN_KEYS_MAX, expiry
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.tier.host import HostMemory

LIMIT_S: Final = 60.0
"""Maximum time that a quota job waits for the SSDs without progress."""
_POLL_S: Final = 0.05
_SHRINK_PAGES: Final = 8
_SETTLE_LEAVES: Final = 64
_STEP_NODES: Final = 32
_STEP_KEYS: Final = 512

_EVICTIONS: Final = ("removed_evicted", "evicted_to_disk", "disk_quota_pages")

Change = Callable[[Any, Caller], Work[Any]]


class OperatorRequests:
    """The operations of the operate role.

    Args:
        table: the page table.
        memory: the bytes of the host tier.
        status: the node's status.
        turns: runs jobs.

    Attributes:
        handlers: operation → its implementation, which also gets the caller.
    """

    def __init__(
        self, table: PageTable, memory: HostMemory, status: NodeStatus, turns: Turns
    ) -> None:
        self._table = table
        self._status = status
        self._jobs = Jobs(turns)
        self._verifier = Verifier(table, memory)
        self.handlers: dict[type[operations.Operation], Change] = {
            operations.PinPages: self.pin,
            operations.Unpin: self.unpin,
            operations.KeepPages: self.keep,
            operations.EndConversation: self.end_conversation,
            operations.Evict: self.evict,
            operations.Clear: self.clear,
            operations.Verify: self.verify,
            operations.PrefetchPages: self.prefetch,
            operations.MovePages: self.move,
            operations.SetLimits: self.limit,
            operations.SetPolicy: self.set_policy,
            operations.CancelJob: self.cancel,
            operations.ListJobs: self.all_jobs,
            operations.ShowJob: self.job,
            **CopyJobs(table, self._jobs, lambda: status.others).handlers,
        }

    def close(self) -> None:
        """Release the resources of jobs; they have ended."""
        self._verifier.close()

    def pin(self, asked: operations.PinPages, _by: Caller) -> Work[answers.Pinned]:
        """Pin a prefix."""
        self._refuse_without(asked.tier)
        space, key = space_of(self._table.spaces, asked.space), key_of(asked.key)
        table = self._table
        expires_ns = expiry(asked.ttl_s, table.now_ns)
        pin = table.keeping.begin_pin(space, key, expires_ns, asked.tier)
        try:
            while not table.keeping.go_on_with(pin):
                yield None
        except BaseException:  # also when nobody waits for it any more
            table.keeping.give_up(pin)
            raise
        return answers.Pinned(pin=pin.number, pages=pin.pages, bytes=pin.size_bytes, tier=pin.tier)

    def unpin(self, asked: operations.Unpin, _by: Caller) -> Work[answers.Unpinned]:
        """Remove a pin."""
        ended = self._table.keeping.unpin(asked.pin)
        while ended.nodes:
            yield None
            self._table.residents.offer_more(_STEP_NODES)
        return answers.Unpinned(pin=asked.pin, pages=ended.pages, bytes=ended.size_bytes)

    def keep(self, asked: operations.KeepPages, _by: Caller) -> Work[answers.KeptPages]:
        """Keep a prefix as that of a conversation."""
        space, key = space_of(self._table.spaces, asked.space), key_of(asked.key)
        table, name = self._table, asked.conversation
        keys = yield from _keys_to(space, key)
        ttl_ns, pages, cause = int(asked.ttl_s * 1e9), 0, ""
        for start in range(0, len(keys), KEEP_KEYS_MAX):
            some = keys[start : start + KEEP_KEYS_MAX]
            more, cause = table.keeping.keep(space, name, some, ttl_ns, asked.bytes_max)
            pages += more
            if cause:
                break
            yield None
        ends_in_s = min(ttl_ns, table.keeping.ttl_ns_max) / 1e9
        return answers.KeptPages(
            conversation=name, pages=pages, cause=cause, ends_in_s=ends_in_s
        )  # fmt: skip

    def end_conversation(
        self, asked: operations.EndConversation, _by: Caller
    ) -> Work[answers.ConversationEnded]:
        """Leave the pages of a conversation to the eviction policy."""
        yield from ()
        space = space_of(self._table.spaces, asked.space)
        pages = self._table.keeping.end(space, asked.conversation)
        return answers.ConversationEnded(conversation=asked.conversation, pages=pages)

    def evict(self, asked: operations.Evict, by: Caller) -> Work[JobRow]:
        """Drop the pages of a key and its descendants, or of a whole space."""
        yield from ()
        space = space_of(self._table.spaces, asked.space)
        top = _node(space, key_of(asked.key)) if asked.key is not None else space.root
        subject: dict[str, answers.Value] = {"space": space.label, "key": asked.key}
        table = self._table
        return self._jobs.start(
            "evict", subject, by, lambda job: drop(table, job, [top], "operator")
        )

    def clear(self, asked: operations.Clear, by: Caller) -> Work[JobRow]:
        """Empty a space, or all spaces."""
        yield from ()
        if (asked.space is None) == (not asked.all):
            raise InvalidArgument("space", "name a space, or set all=true")
        table = self._table
        one = [space_of(self._table.spaces, asked.space)] if asked.space is not None else None
        tops = [space.root for space in one or list(table.spaces)]
        subject: dict[str, answers.Value] = {"space": asked.space, "all": asked.all}
        return self._jobs.start("clear", subject, by, lambda job: drop(table, job, tops, "cleared"))

    def verify(self, asked: operations.Verify, by: Caller) -> Work[JobRow]:
        """Read pages again and compare them with their digests."""
        yield from ()
        self._refuse_without(asked.tier)
        every = ["host", "ssd"] if self._table.disk.exists else ["host"]
        tiers = [asked.tier] if asked.tier is not None else every
        deadline_ns = monotonic_ns() + int(asked.deadline_s * 1e9)
        subject: dict[str, answers.Value] = {
            "tier": asked.tier, "space": asked.space, "key": asked.key
        }  # fmt: skip
        if asked.space is None:
            if asked.key is not None:
                raise InvalidArgument("space", "a key also needs its space")
            spaces = list(self._table.spaces)
            work = self._verifier.spaces(spaces, tiers, deadline_ns)
        elif asked.key is None:
            space = space_of(self._table.spaces, asked.space)
            work = self._verifier.spaces([space], tiers, deadline_ns)
        else:
            node = _node(space_of(self._table.spaces, asked.space), key_of(asked.key))
            work = self._verifier.page(node, tiers, deadline_ns)
        return self._jobs.start("verify", subject, by, work)

    def prefetch(self, asked: operations.PrefetchPages, by: Caller) -> Work[JobRow]:
        """Load pages from the SSDs into host memory, until a deadline."""
        return (yield from self._moved("prefetch", asked, "host", by))

    def move(self, asked: operations.MovePages, by: Caller) -> Work[JobRow]:
        """Move pages to another tier."""
        return (yield from self._moved("move", asked, asked.to, by))

    def limit(self, asked: operations.SetLimits, by: Caller) -> Work[JobRow]:
        """Set the quota and the reservation of a space in a tier."""
        yield from ()
        space, table = space_of(self._table.spaces, asked.space), self._table
        self._refuse_without(asked.tier)
        self._jobs.refuse_if_full()
        quota, reserved = asked.quota_bytes, asked.reserved_bytes
        if asked.tier == "ssd":
            table.disk.limit(space, quota, reserved)
        else:
            table.quotas.set(space, quota, reserved, table.slots.capacity_bytes)
        subject: dict[str, answers.Value] = {
            "space": space.label, "quota_bytes": quota, "reserved_bytes": reserved,
            "tier": asked.tier,
        }  # fmt: skip
        return self._jobs.start(
            "limit", subject, by, lambda job: self._limit(job, space, asked.tier)
        )

    def set_policy(self, asked: operations.SetPolicy, _by: Caller) -> Work[answers.PolicySet]:
        """Change the eviction policy; if that fails, the old one stays."""
        eviction = self._table.eviction
        if asked.name not in POLICIES:
            known = ", ".join(POLICIES)
            raise InvalidArgument("name", f"{asked.name[:80]!r} is not a policy; known are {known}")
        while not eviction.settle(_SETTLE_LEAVES):
            yield None  # leaves are still being moved to the previous policy
        previous = eviction.policy
        try:
            eviction.change_policy(asked.name)
        except KVStoreError:
            eviction.change_policy(previous)
            raise
        self._table.residents.ghosts.policy = asked.name
        return answers.PolicySet(**msgspec.structs.asdict(self._status.policy()), previous=previous)

    def all_jobs(self, _asked: operations.ListJobs, _by: Caller) -> Work[answers.JobList]:
        """Running jobs and the last ended ones, newest first."""
        yield from ()
        return answers.JobList(jobs=self._jobs.all())

    def job(self, asked: operations.ShowJob, _by: Caller) -> Work[JobRow]:
        """One job, with its progress."""
        yield from ()
        return self._jobs.get(asked.job).shown()

    def cancel(self, asked: operations.CancelJob, _by: Caller) -> Work[JobRow]:
        """Cancel a job."""
        yield from ()
        found = self._jobs.get(asked.job)
        found.cancelled = True
        return found.shown()

    # ---- internal ---------------------------------------------------------------------------

    def _refuse_without(self, tier: str | None) -> None:
        """Refuse a tier that this node does not have."""
        if tier == "ssd" and not self._table.disk.exists:
            message = "this node has no SSD tier: set ssd.directories"
            raise Refusal(409, "tier_unavailable", message, "tier")

    def _limit(self, job: OperatorJob, space: PrefixTree, tier: str) -> Work[None]:
        """Requeue every page of the space, then evict until it is within its quota.

        ``complete`` is false if it is not: pages are pinned or in use, or the SSDs are too slow.
        """
        table = self._table
        # Meanwhile the quota may end, and another one begin, with a queue and a job of its own.
        leaves = table.disk.limits.leaves_of(space) if tier == "ssd" else None
        for number in space.by_creation.numbers(0):
            nodes = space.by_creation.nodes(number)
            for start in range(0, len(nodes), _STEP_NODES):
                some = nodes[start : start + _STEP_NODES]
                if tier == "host":
                    table.eviction.offer_all(some, anew=True)
                for node in some:
                    table.residents.add_candidate(node)
                yield None  # also if cancelled: leaves that are not queued would never be evicted
        if leaves is not None:
            leaves.all_offered = True
        evicted = 0
        job.result["evicted_bytes"] = evicted
        deadline_ns = monotonic_ns() + int(LIMIT_S * 1e9)
        while True:
            freed, kept, waits = self._shrink(job, space, tier)
            evicted += freed
            job.result["evicted_bytes"] = evicted
            now_ns = monotonic_ns()
            if kept:
                return
            if job.cancelled or now_ns >= deadline_ns or not (freed or waits):
                job.result["complete"] = False
                return
            if freed:
                deadline_ns = now_ns + int(LIMIT_S * 1e9)
            # Pages being written are evicted when that is done.
            yield None if freed or tier == "ssd" else _POLL_S

    def _shrink(self, job: OperatorJob, space: PrefixTree, tier: str) -> tuple[int, bool, bool]:
        """Evict some pages of a space.

        Returns bytes, whether it is within its quota, what waits.
        """
        table = self._table
        disk = table.disk
        job.pages -= _evicted(table)
        if tier == "ssd":
            before = space.disk_bytes
            kept = table.tiers.shrink(space, _SHRINK_PAGES)
            job.pages += _evicted(table)
            return before - space.disk_bytes, kept, table.disk.limits.is_behind(space)
        before = space.host_bytes
        kept = table.room.shrink(space, _SHRINK_PAGES)
        job.pages += _evicted(table)
        return before - space.host_bytes, kept, disk.busy or table.eviction.behind

    def _moved(
        self, kind: str, asked: operations.MovePages | operations.PrefetchPages, to: str, by: Caller
    ) -> Work[JobRow]:
        if not self._table.disk.exists:
            message = "this node has only one tier"
            raise Refusal(409, "tier_unavailable", message)
        space = space_of(self._table.spaces, asked.space)
        keys: list[PrefixKey] = []
        known = False
        for count, text in enumerate(asked.keys, start=1):
            keys.append(key_of(text, "keys"))
            known = known or keys[-1] in space.nodes
            if count % _STEP_KEYS == 0:
                yield None
        if not known:
            raise not_stored(keys[0].hex(), "keys")
        deadline_ns = monotonic_ns() + int(asked.deadline_s * 1e9)
        movement = (Demotion if to == "ssd" else Prefetch)(self._table, space, keys, deadline_ns)

        def work(job: OperatorJob) -> Work[None]:
            try:
                for pause in movement.steps():
                    job.done, job.total = movement.done, movement.total
                    if job.cancelled or monotonic_ns() >= deadline_ns:
                        break
                    yield pause
            finally:
                movement.cancel()
            over = job.cancelled or monotonic_ns() >= deadline_ns
            outcome = yield from _outcome(space, keys, to)
            job.result.update(outcome)
            job.pages = outcome["there"]
            job.done, job.total = outcome["there"], len(keys)
            if over and job.done < job.total:
                job.result["complete"] = False

        subject: dict[str, answers.Value] = {"space": space.label, "keys": len(keys)}
        return self._jobs.start(kind, subject, by, work)


def _node(space: PrefixTree, key: PrefixKey) -> PrefixNode:
    node = space.nodes.get(key)
    if node is None:
        raise not_stored(key.hex(), "key")
    return node


def _keys_to(space: PrefixTree, key: PrefixKey) -> Work[list[PrefixKey]]:
    """The keys of a stored page and of all pages before it, in chain order.

    Raises:
        NotFound: no page is stored under the key.
        CapacityError: they are more than a pin may cover.
    """
    keys: list[PrefixKey] = []
    before: PrefixKey | None = key
    while before:
        at = space.index.get(before)
        if at is None or not (keys or at.ready):
            raise not_stored(key.hex(), "key")
        keys += at.key_list()[at.position(before) :: -1]
        if len(keys) > PIN_KEYS_MAX:
            raise CapacityError(f"these are more than {PIN_KEYS_MAX} keys", "key")
        before = at.key_before(0)  # by its key: that node may be split meanwhile
        yield None
    keys.reverse()
    return keys


def _evicted(table: PageTable) -> int:
    """Number of pages evicted from a tier so far."""
    return sum(table.counts.get(name, 0) for name in _EVICTIONS)


def _outcome(space: PrefixTree, keys: list[PrefixKey], to: str) -> Work[dict[str, int]]:
    """Count the keys by the result of a movement."""
    there = kept = 0
    for count, key in enumerate(keys, start=1):
        node = space.nodes.get(key)
        if node is not None and node.ready:
            is_there = node.slots.keys() >= node.disk.keys() if to == "host" else not node.slots
            there += is_there
            kept += not is_there
        if count % _STEP_KEYS == 0:
            yield None
    return {"there": there, "kept": kept, "missing": len(keys) - there - kept}
