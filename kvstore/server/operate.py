"""Routes that change: pins, eviction, verification, limits, the policy, movements, jobs."""

from collections.abc import Callable
from time import monotonic_ns
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field

from kvstore.errors import InvalidArgument, KVStoreError
from kvstore.page import PrefixKey
from kvstore.server.api import (
    ApiError,
    Checked,
    Movement,
    Movements,
    Turns,
    key_of,
    not_stored,
)
from kvstore.server.auth import Auth
from kvstore.server.jobs import Job, Jobs
from kvstore.server.removals import drop
from kvstore.server.verify import Verifier
from kvstore.state.pages import PageTable
from kvstore.state.pins import Pin, expiry
from kvstore.state.tree import Node, Space

KEYS_MAX: Final = 10_000
_POLL_S: Final = 0.05
_SHRINK_PAGES: Final = 64
LIMIT_S: Final = 60.0
"""So long a job that brings a space within its quota waits for the SSDs while nothing goes."""

Tier = Literal["host", "ssd"]
Bytes = Annotated[int, Field(ge=0, le=1 << 62)]


class Body(BaseModel):
    """A request's body; what it does not know is refused."""

    model_config = ConfigDict(extra="forbid")


class PinBody(Body):
    """A prefix to pin in a tier; ``ttl_s`` 0 = until it is unpinned."""

    space: str
    key: str
    ttl_s: float = 3600.0
    tier: Tier = "host"


class EvictBody(Body):
    """A key, which goes with all that follows it; without one the whole space."""

    space: str
    key: str | None = None


class ClearBody(Body):
    """A space to empty; ``all`` = every space."""

    space: str | None = None
    all: bool = False


class VerifyBody(Body):
    """A page (space and key), a space, or with neither all pages; in one tier, or in all."""

    space: str | None = None
    key: str | None = None
    tier: Tier | None = None
    deadline_s: Annotated[float, Field(gt=0, le=7 * 86_400)] = 3600.0


class MoveBody(Body):
    """Keys of one chain, and how long the movement may take."""

    space: str
    keys: Annotated[list[str], Field(min_length=1, max_length=KEYS_MAX)]
    to: Tier = "ssd"
    deadline_s: Annotated[float, Field(gt=0, le=3600)] = 60.0


class PrefetchBody(Body):
    """Keys to bring from the SSD into host memory."""

    space: str
    keys: Annotated[list[str], Field(min_length=1, max_length=KEYS_MAX)]
    deadline_s: Annotated[float, Field(gt=0, le=3600)] = 10.0


class LimitsBody(Body):
    """Limits of a space in a tier; 0 = none."""

    quota_bytes: Bytes = 0
    reserved_bytes: Bytes = 0
    tier: Tier = "host"


class PolicyBody(Body):
    """The eviction policy to use from now on."""

    name: str


class Operation:
    """The routes that need the role ``operate``.

    Args:
        turns: takes turns on the state's loop.
        auth: who may operate.
        jobs: where work is done that takes longer than a turn.
    """

    def __init__(self, turns: Turns, auth: Auth, jobs: Jobs) -> None:
        """Make the routes."""
        self._turns = turns
        self._jobs = jobs
        self._verifier = Verifier(turns)
        operate = [Depends(auth.require("operate"))]
        self.router = APIRouter(prefix="/v1", tags=["operate"], route_class=Checked)
        routes: tuple[tuple[str, str, Callable[..., Any], int], ...] = (
            ("POST", "/evict", self.evict, 202),
            ("POST", "/clear", self.clear, 202),
            ("POST", "/verify", self.verify, 202),
            ("POST", "/prefetch", self.prefetch, 202),
            ("POST", "/move", self.move, 202),
            ("POST", "/pins", self.pin, 200),
            ("DELETE", "/pins/{pin}", self.unpin, 200),
            ("PUT", "/quotas/{space}", self.limit, 202),
            ("PUT", "/policy", self.set_policy, 200),
            ("DELETE", "/jobs/{job}", self.cancel, 200),
        )
        for method, path, route, status in routes:
            self.router.add_api_route(
                path, route, methods=[method], status_code=status, dependencies=operate
            )
        read = [Depends(auth.require("read"))]
        self.router.add_api_route("/jobs", self.all_jobs, methods=["GET"], dependencies=read)
        self.router.add_api_route("/jobs/{job}", self.job, methods=["GET"], dependencies=read)

    def pin(self, body: PinBody) -> dict[str, Any]:
        """Pin the pages of a key and of all keys before it: they stay in a tier."""
        self._refuse_without(body.tier)
        space, key = self._turns.space(body.space), key_of(body.key)

        def change(table: PageTable) -> Pin:
            return table.pin(space, key, expiry(body.ttl_s, table.now_ns), body.tier)

        pin = self._turns.operate(change)
        told = {"pin": pin.number, "pages": len(pin.nodes), "bytes": pin.size_bytes}
        return {**told, "tier": pin.tier}

    def unpin(self, pin: int) -> dict[str, Any]:
        """End a pin."""
        ended = self._turns.operate(lambda table: table.unpin(pin))
        return {"pin": pin, "pages": len(ended.nodes), "bytes": ended.size_bytes}

    def evict(self, body: EvictBody) -> dict[str, Any]:
        """Take a key with all that follows it, or a whole space, out of the index."""
        space = self._turns.space(body.space)
        top = self._node(space, key_of(body.key)) if body.key is not None else space.root
        subject = {"space": space.label, "key": body.key}
        return self._jobs.start(
            "evict", subject, lambda job: drop(self._turns, job, [top], "operator")
        )

    def clear(self, body: ClearBody) -> dict[str, Any]:
        """Empty a space, or all spaces; what is pinned or being written stays."""
        if (body.space is None) == (not body.all):
            raise InvalidArgument("space", "name a space, or say all=true")
        spaces = [self._turns.space(body.space)] if body.space is not None else self._spaces()
        tops = [space.root for space in spaces]
        subject = {"space": body.space, "all": body.all}
        return self._jobs.start(
            "clear", subject, lambda job: drop(self._turns, job, tops, "cleared")
        )

    def verify(self, body: VerifyBody) -> dict[str, Any]:
        """Read pages again and compare them with their digests; what fails is quarantined."""
        self._refuse_without(body.tier)
        every = ["host", "ssd"] if self._has_ssd() else ["host"]
        tiers = [body.tier] if body.tier is not None else every
        deadline_ns = monotonic_ns() + int(body.deadline_s * 1e9)
        subject = {"tier": body.tier, "space": body.space, "key": body.key}
        if body.space is None and body.key is not None:
            raise InvalidArgument("space", "a key is one of a space; name it too")
        spaces = [self._turns.space(body.space)] if body.space is not None else self._spaces()
        if body.key is not None:
            node = self._node(spaces[0], key_of(body.key))
            work = self._verifier.page(node, tiers, deadline_ns)
        else:
            work = self._verifier.spaces(spaces, tiers, deadline_ns)
        return self._jobs.start("verify", subject, work)

    def prefetch(self, body: PrefetchBody) -> dict[str, Any]:
        """Bring pages from the SSD into host memory, by a deadline."""
        return self._moved("prefetch", self._movements().prefetch, body, "host")

    def move(self, body: MoveBody) -> dict[str, Any]:
        """Move pages to another tier; to the SSDs: memory lets go of them from the tails on.

        The job's ``result`` says how many of the keys are ``there`` in the end, how many were
        ``kept`` where they are (in use, followed by pages in memory, or without room), and how
        many are ``missing``.
        """
        movements = self._movements()
        begin = movements.demote if body.to == "ssd" else movements.prefetch
        return self._moved("move", begin, body, body.to)

    def limit(self, space: str, body: LimitsBody) -> dict[str, Any]:
        """Limit what a space may have, and what the others must leave it, in a tier.

        A job puts the space's pages into queues of their own and brings it within its quota.
        """
        of = self._turns.space(space)
        self._refuse_without(body.tier)

        def change(table: PageTable) -> None:
            if body.tier == "ssd":
                assert table.disk is not None
                table.disk.limit(of, body.quota_bytes, body.reserved_bytes)
                return
            capacity = table.slots.capacity_bytes
            table.quotas.set(of, body.quota_bytes, body.reserved_bytes, capacity)

        subject = {"space": of.label, **body.model_dump()}
        return self._jobs.start(
            "limit", subject, lambda job: self._limit(job, of, body.tier),
            first=lambda: self._turns.operate(change),
        )  # fmt: skip

    def set_policy(self, body: PolicyBody) -> dict[str, Any]:
        """Change the eviction policy; when that fails the one before it stays."""
        observed = self._turns.observed
        before = self._turns.ask(observed.policy)
        if body.name not in before["known"]:
            known = ", ".join(before["known"])
            raise InvalidArgument("name", f"{body.name!r} is no policy; known are {known}")

        def change(table: PageTable) -> dict[str, Any]:
            try:
                observed.set_policy(body.name)
            except KVStoreError:
                observed.set_policy(before["name"])
                raise
            table.ghosts.policy = body.name
            return observed.policy()

        return {**self._turns.operate(change), "previous": before["name"]}

    def all_jobs(self) -> dict[str, Any]:
        """The jobs that run and the last ones that ended, the newest first."""
        return {"jobs": self._jobs.all()}

    def job(self, job: int) -> dict[str, Any]:
        """One job, with its progress."""
        return self._jobs.get(job).shown()

    def cancel(self, job: int) -> dict[str, Any]:
        """Ask a job to end; what it has done stays done."""
        found = self._jobs.get(job)
        found.cancel()
        return found.shown()

    # ---- inside -----------------------------------------------------------------------------

    def _spaces(self) -> list[Space]:
        return self._turns.ask(lambda: list(self._turns.observed.node.pages.spaces))

    def _node(self, space: Space, key: PrefixKey) -> Node:
        node = self._turns.ask(lambda: space.nodes.get(key))
        if node is None:
            raise not_stored(key.hex(), "key")
        return node

    def _has_ssd(self) -> bool:
        return self._turns.ask(lambda: self._turns.observed.node.pages.disk is not None)

    def _refuse_without(self, tier: str | None) -> None:
        """Refuse what is asked of a tier that this node does not have."""
        if tier == "ssd" and not self._has_ssd():
            message = "this node has no SSD tier: give it ssd.directories"
            raise ApiError(409, "tier_unavailable", message, "tier")

    def _limit(self, job: Job, space: Space, tier: str) -> None:
        """Offer every page anew, then evict until the quota is kept.

        ``complete`` is false when it is not: pages are pinned or in use, or the SSDs too slow.
        """
        for number in self._turns.ask(lambda: space.shelves.numbers(0)):

            def seed(table: PageTable, shelf: int = number) -> None:
                nodes = space.shelves.nodes(shelf)
                if tier == "host":
                    table.eviction.offer_all(nodes, anew=True)
                for node in nodes:
                    table.offer(node)

            self._turns.operate(seed)
            if job.cancelled:
                return

        def shrink(table: PageTable) -> tuple[int, bool, bool]:
            disk = table.disk
            if tier == "ssd":
                assert disk is not None
                before = space.disk_bytes
                kept = disk.limits.shrink(space, _SHRINK_PAGES)
                return before - space.disk_bytes, kept, False
            before = space.host_bytes
            kept = table.shrink(space, _SHRINK_PAGES)
            return before - space.host_bytes, kept, disk is not None and disk.busy

        job.result["evicted_bytes"] = 0
        deadline_ns = monotonic_ns() + int(LIMIT_S * 1e9)
        while True:
            freed, kept, waits = self._turns.operate(shrink)
            job.result["evicted_bytes"] += freed
            now_ns = monotonic_ns()
            if kept:
                return
            if job.cancelled or now_ns >= deadline_ns or not (freed or waits):
                job.result["complete"] = False
                return
            if freed:
                deadline_ns = now_ns + int(LIMIT_S * 1e9)
            else:
                job.pause(_POLL_S)  # its pages are being written, and go when that is done

    def _movements(self) -> Movements:
        movements = self._turns.observed.movements
        if movements is None:
            raise ApiError(
                409, "tier_unavailable", "this node has one tier: there is nowhere to move pages to"
            )
        return movements

    def _moved(
        self,
        kind: str,
        begin: Callable[[Space, list[PrefixKey], int], Movement],
        body: MoveBody | PrefetchBody,
        to: Tier,
    ) -> dict[str, Any]:
        space = self._turns.space(body.space)
        keys = [key_of(key, "keys") for key in body.keys]
        if not self._turns.ask(lambda: any(key in space.nodes for key in keys)):
            raise not_stored(keys[0].hex(), "keys")
        deadline_ns = monotonic_ns() + int(body.deadline_s * 1e9)

        def work(job: Job) -> None:
            movement = self._turns.operate(lambda _table: begin(space, keys, deadline_ns))
            while not self._turns.ask(movement.finished):
                job.done, job.total = self._turns.ask(movement.progress)
                if job.cancelled or monotonic_ns() >= deadline_ns:
                    break
                job.pause(_POLL_S)
            over = job.cancelled or monotonic_ns() >= deadline_ns
            self._turns.operate(lambda _table: movement.cancel())
            job.result.update(self._turns.ask(lambda: _outcome(space, keys, to)))
            job.done, job.total = job.result["there"], len(keys)
            if over and job.done < job.total:
                job.result["complete"] = False

        return self._jobs.start(kind, {"space": space.label, "keys": len(keys)}, work)


def _outcome(space: Space, keys: list[PrefixKey], to: Tier) -> dict[str, int]:
    """How many keys' pages a movement left in the tier it went to; on the state's loop."""
    nodes = [space.nodes.get(key) for key in keys]
    stored = [node for node in nodes if node is not None and node.ready]
    if to == "host":
        there = sum(node.slots.keys() >= node.disk.keys() for node in stored)
    else:
        there = sum(not node.slots for node in stored)
    return {"there": there, "kept": len(stored) - there, "missing": len(keys) - len(stored)}
