"""Goal: jobs copy the right pages to the right nodes, and drop nothing that is not there."""

from collections.abc import Callable
from itertools import count
from typing import Any, cast

import pytest

from kvstore.cluster.copier import Copier, preference
from kvstore.protocol.errors import PeerUnreachable
from kvstore.protocol.page import KEY_BYTES
from kvstore.server import copies, operations
from kvstore.server.channel import Caller
from kvstore.server.copies import CopyJobs
from kvstore.server.jobs import Jobs, OperatorJob
from kvstore.server.refusal import Refusal
from kvstore.server.turns import Task, Turns
from kvstore.state.remote.jobs import BringEnd, PeerBring
from kvstore.state.tree.node import ORDINARY, Retention
from tests.state.world import FULL, FULL_2, PAGE, World, chain, key

ME = Caller("operate", "10.0.0.7:4711")
S = 1_000_000_000
GONE = PeerUnreachable("gone")


class AtOnce:
    """Runs work to its end; waits pass at once."""

    def __init__(self) -> None:
        self.before_step: Callable[[], object] = lambda: None
        self.pauses: list[float] = []

    def start(self, work: Any, ended: Callable[[Any], None], name: str) -> Task:
        try:
            for pause in work:
                self.pauses += [pause] if pause is not None else []
                self.before_step()
            ended(None)
        except Refusal as refusal:
            ended(refusal)
        return Task(work, ended, name)


class Cluster:
    """A node's table, and other nodes that bring what they have room for.

    Attributes:
        there: what each of them has: keys of the only space, by shard.
        room: how many pages each may still take.
        asked: requests to bring pages, in order.
    """

    def __init__(self, stored: "Stored", *names: str) -> None:
        self.stored = stored
        self.up = list(names)
        self.draining: set[str] = set()
        self.there: dict[str, set[tuple[str, bytes]]] = {name: set() for name in names}
        self.room = dict.fromkeys(names, 1000)
        self.asked: list[PeerBring] = []
        self.states: list[str] = []
        self.now_ns = 0
        self.copier = Copier(self._bring, self._up, lambda: self.now_ns)
        self.turns = AtOnce()
        self.jobs = Jobs(cast("Turns", self.turns))
        self.operations = CopyJobs(stored.table, self.jobs, lambda: self)

    def _up(self) -> dict[str, bool]:
        return {name: name in self.draining for name in self.up}

    def set_state(self, state: str) -> None:
        self.states.append(state)

    def _bring(self, job: PeerBring) -> None:
        self.asked.append(job)
        if job.peer not in self.up:
            self.copier.brought(BringEnd(job.number, 0, GONE))
            return
        there, shard = self.there[job.peer], job.shard.digest.hex()
        keys = [job.keys[at : at + KEY_BYTES] for at in range(0, len(job.keys), KEY_BYTES)]
        for at, one in enumerate(keys):
            if (shard, one) not in there and not self.room[job.peer]:
                self.copier.brought(BringEnd(job.number, max(0, at - job.first), None))
                return
            self.room[job.peer] -= (shard, one) not in there
            there.add((shard, one))
        self.copier.brought(BringEnd(job.number, len(keys) - job.first, None))

    def paths(self, peer: str, *paths: str) -> list[str]:
        """Those of these paths of which a peer has every page of the first shard."""
        shard = FULL.digest.hex()
        return [path for path in paths if {(shard, one) for one in chain(path)} <= self.there[peer]]

    def ask(self, asked: Any) -> OperatorJob:
        """Run a job to its end."""
        work = self.operations.handlers[type(asked)](asked, ME)
        while True:
            try:
                next(work)
            except StopIteration as end:
                return self.jobs.get(end.value.job)

    @property
    def space(self) -> str:
        return self.stored.tree.label


class Stored:
    """One engine's pages at a node whose clock the test sets."""

    def __init__(self) -> None:
        self.world = World(8, 8)
        self.table = self.world.table
        self.engine = self.world.process()
        self.tree = self.world.space(self.engine, [FULL, FULL_2])
        self.at(1000)

    def at(self, seconds: int) -> None:
        self.table.moment.now_ns = seconds * S

    def store(
        self, path: str, *, start: int = 0, shards: tuple[int, ...] = (0,),
        keep: Retention = ORDINARY,
    ) -> None:  # fmt: skip
        for shard in shards:
            self.world.store(self.engine, self.tree, path, start=start, shard=shard, keep=keep)

    def has(self, *paths: str) -> list[str]:
        """Those of these paths of which every page is here."""
        return [path for path in paths if self.world.lookup(self.tree, path)[0] == len(path)]


@pytest.fixture
def stored() -> Stored:
    return Stored()


@pytest.fixture
def one(stored: Stored) -> Cluster:
    return Cluster(stored, "b")


@pytest.fixture
def two(stored: Stored) -> Cluster:
    return Cluster(stored, "b", "c")


def move(cluster: Cluster, path: str, node: str | None = None) -> OperatorJob:
    return cluster.ask(operations.MoveToNode(space=cluster.space, key=key(path).hex(), node=node))


def replicate(cluster: Cluster, path: str, count: int = 2) -> OperatorJob:
    asked = operations.ReplicatePages(space=cluster.space, key=key(path).hex(), copies=count)
    return cluster.ask(asked)


def drain(cluster: Cluster, **limits: Any) -> OperatorJob:
    return cluster.ask(operations.DrainNode(**limits))


# Replicate


def test_a_prefix_is_replicated_with_all_its_shards(stored, two):
    stored.store("abcd", shards=(0, 1))
    stored.store("abcx", start=3)
    job = replicate(two, "abc", 3)
    assert job.result == {
        "pages": 12, "bytes": 12 * PAGE, "to b": 6, "to c": 6, "copies": 3, "complete": True,
        "why": "",
    }  # fmt: skip
    assert {len(there) for there in two.there.values()} == {6}
    assert (job.done, job.total) == (12, 12)
    assert not two.states, "that is no drain"


def test_a_node_that_fails_is_replaced_by_the_next(stored, two):
    stored.store("abcd")
    first, second = preference(["b", "c"], key("a"))
    two.room[first] = 1
    job = replicate(two, "abcd")
    assert (job.result["copies"], job.result["complete"]) == (2, True)
    assert two.paths(second, "abcd") == ["abcd"]


def test_too_few_nodes_end_a_replication_with_what_there_is(stored, one):
    stored.store("abcd")
    job = replicate(one, "abcd", 3)
    assert (job.result["copies"], job.result["complete"]) == (2, False)
    assert "too few" in job.result["why"]
    assert "draining" not in job.result["why"]


def test_a_node_that_drains_gets_no_copies_and_is_named(stored, two):
    stored.store("abcd")
    two.draining = {"c"}
    job = replicate(two, "abcd", 3)
    assert (job.result["copies"], job.result["complete"]) == (2, False)
    assert job.result["why"].endswith("(draining, so not asked: c)")
    assert not two.there["c"]
    with pytest.raises(Refusal, match="draining, so not asked: c"):
        move(two, "abcd", "c")


# Move


def test_moved_pages_are_dropped_after_the_other_node_has_all(stored, one):
    stored.store("abcd", shards=(0, 1))
    stored.store("wxyz")
    job = move(one, "abcd", "b")
    assert (job.result["dropped"], job.result["complete"]) == (8, True)
    assert stored.has("a", "abcd", "wxyz") == ["wxyz"]
    assert one.paths("b", "abcd") == ["abcd"]
    assert stored.table.counts["removed_moved"] == 8
    told = [(asked.shard, asked.first, asked.keys) for asked in one.asked if asked.gone]
    assert told == [(of, 0, b"".join(chain("abcd"))) for of in (FULL, FULL_2)], "they are its own"
    assert job.result["pages"] == 8


@pytest.mark.parametrize("room", [0, 3])
def test_nothing_is_dropped_when_the_other_node_has_no_room_for_all(stored, one, room):
    stored.store("abcd")
    one.room["b"] = room
    job = move(one, "abcd")
    assert (job.result["dropped"], job.result["complete"]) == (0, False)
    assert "no room" in job.result["why"]
    assert stored.has("abcd") == ["abcd"]


def test_a_chain_is_leaving_only_while_it_is_moved(stored, one):
    stored.store("abcd")
    (space,) = stored.table.spaces
    seen = []
    one.turns.before_step = lambda: seen.append((len(one.asked), list(space.leaving)))
    move(one, "abcd", "b")
    assert seen[0] == (0, [b"".join(chain("abcd"))]), "before anybody is asked"
    assert not space.leaving

    stored.store("wxyz")
    one.room["b"] = 0
    assert not move(one, "wxyz", "b").result["complete"]
    assert not space.leaving


def test_nothing_is_dropped_when_the_other_node_dies(stored, one):
    stored.store("abcd")
    begun = one.copier.copy

    def die(order: Any, told: Any) -> None:
        one.up.clear()
        begun(order, told)

    one.copier.copy = die  # type: ignore[method-assign]
    job = move(one, "abcd")
    assert (job.result["dropped"], job.result["complete"]) == (0, False)
    assert "peer_unreachable" in job.result["why"]
    assert stored.has("abcd") == ["abcd"]


def test_heads_that_other_pages_need_stay(stored, one):
    stored.store("abcd")
    stored.store("abxy", start=2)
    job = move(one, "abcd")
    assert job.result["dropped"] == 2
    assert stored.has("ab", "abc", "abxy") == ["ab", "abxy"]


def test_only_pages_that_have_left_are_said_to_have_left(stored, one):
    stored.store("abcd")
    stored.store("abxy", start=2)
    job = move(one, "abcd")
    assert (job.result["dropped"], stored.has("ab")) == (2, ["ab"])
    assert [asked.first for asked in one.asked if asked.gone] == [2]
    assert one.copier.stats().copied_pages == 4


def test_pages_in_use_and_pinned_pages_stay(stored, one):
    stored.store("abcd")
    stored.world.acquire(stored.engine, stored.tree, "abcd")
    assert move(one, "abcd").result["dropped"] == 0
    stored.store("wxyz")
    stored.table.keeping.pins.budget_bytes = 1 << 20
    stored.table.keeping.pin(stored.tree, key("wx"), 0)
    assert move(one, "wxyz").result["dropped"] == 2
    assert stored.has("abcd", "wx") == ["abcd", "wx"]


def test_pages_that_expire_or_are_read_once_are_not_copied(stored, one):
    stored.store("ab")
    stored.store("abcd", start=2, keep=Retention(read_once=True))
    stored.store("xy", keep=Retention(expires_ns=5000 * S))
    assert move(one, "abcd").result["dropped"] == 0
    assert one.paths("b", "ab", "abc") == ["ab"]
    job = move(one, "xy")
    assert (job.result["complete"], job.result["dropped"]) == (False, 0)
    assert stored.has("abcd", "xy") == ["abcd", "xy"]


def test_a_node_that_is_not_there_is_refused(stored, one):
    stored.store("ab")
    with pytest.raises(Refusal) as refused:
        move(one, "ab", "z")
    assert (refused.value.status, refused.value.field) == (409, "node")
    one.up.clear()
    with pytest.raises(Refusal):
        move(one, "ab")


@pytest.mark.parametrize("kind", [move, replicate])
def test_an_unknown_page_is_refused(stored, one, kind):
    stored.store("ab")
    with pytest.raises(Refusal) as refused:
        kind(one, "abc")
    assert refused.value.field == "key"


def test_a_node_alone_refuses_all_of_it(stored, one):
    stored.store("ab")
    one.operations = CopyJobs(stored.table, one.jobs, lambda: None)
    for kind in (lambda: move(one, "ab"), lambda: replicate(one, "ab"), lambda: drain(one)):
        with pytest.raises(Refusal) as refused:
            kind()
        assert (refused.value.status, refused.value.code) == (409, "not_clustered")


# Drain


def test_a_drain_copies_everything_what_was_used_last_first(stored, one):
    for at, path in enumerate(("ab", "cd", "ef")):
        stored.at(1000 + at)
        stored.store(path)
    stored.at(1010)
    stored.world.lookup(stored.tree, "cd")
    stored.at(1020)

    job = drain(one)

    assert [asked.keys[:KEY_BYTES] for asked in one.asked] == [key("c"), key("e"), key("a")]
    assert [asked.idle_ms for asked in one.asked] == [10_000, 18_000, 20_000]
    assert job.result == {
        "kept": 0, "pages": 6, "bytes": 6 * PAGE, "to b": 6, "complete": True, "why": "",
    }  # fmt: skip
    assert stored.has("ab", "cd", "ef") == ["ab", "cd", "ef"], "they stay here too"
    assert one.states == ["draining"], "until it is stopped"


def test_a_page_is_drained_once_whatever_follows_it(stored, one):
    stored.store("abcd", shards=(0, 1))
    stored.store("abxy", start=2)
    job = drain(one)
    assert (job.result["pages"], job.result["kept"], job.total) == (10, 0, 10)
    assert sorted(one.paths("b", "abcd", "abxy")) == ["abcd", "abxy"]


def test_a_chain_stays_together_and_chains_are_distributed(stored, two):
    paths = ["ab", "cd", "ef", "gh", "ij", "kl"]
    for path in paths:
        stored.store(path)
    assert drain(two).result["complete"]
    for path in paths:
        assert two.paths(preference(["b", "c"], key(path[0]))[0], path) == [path]
    assert all(two.there.values())


def test_for_a_node_that_is_full_the_other_one_is_asked(stored, two):
    for path in ("ab", "cd", "ef", "gh", "ij", "kl"):
        stored.store(path)
    two.room["b"] = 1
    job = drain(two)
    assert (job.result["complete"], job.result["to c"]) == (True, 12)
    asked = [one.peer for one in two.asked].count("b")
    assert asked <= copies.FAILURES_MAX + 1, "it is not asked again and again"


def test_a_drain_ends_when_no_node_has_room(stored, one):
    for at, path in enumerate(("ab", "cd", "ef", "gh", "ij", "kl")):
        stored.at(1000 + at)
        stored.store(path)
    one.room["b"] = 4
    job = drain(one)
    assert not job.result["complete"]
    assert (job.result["pages"], job.result["kept"]) == (4, 8)
    assert "no room" in job.result["why"]
    assert len(one.asked) == 2 + copies.FAILURES_MAX
    assert one.states == ["draining", "up"]
    assert len(stored.has("ab", "cd", "ef", "gh", "ij", "kl")) == 6


def test_a_drain_without_any_node_waits_a_moment_then_ends(stored, one, monkeypatch):
    stored.store("ab")
    monkeypatch.setattr(copies, "REJOIN_NS", 0)
    one.up.clear()
    job = drain(one)
    assert (job.result["complete"], job.result["kept"]) == (False, 2)
    assert "no session" in job.result["why"]


def test_a_node_that_comes_back_in_time_is_used(stored, one):
    stored.store("ab")
    one.up.clear()
    one.turns.before_step = lambda: one.up.append("b") if not one.up else None
    assert drain(one).result["complete"]


def test_a_cancelled_drain_says_what_it_has_done(stored, one):
    for path in ("ab", "cd"):
        stored.store(path)

    def cancel() -> None:
        if one.asked:
            one.jobs.get(1).cancelled = True

    one.turns.before_step = cancel
    job = drain(one, bytes_per_s=1)
    assert (job.state, job.result["why"], job.result["kept"]) == ("cancelled", "cancelled", 2)
    assert one.states == ["draining", "up"]


def test_a_drain_ends_at_its_deadline(stored, one, monkeypatch):
    for path in ("ab", "cd"):
        stored.store(path)
    clock = count(step=S // 1_000)  # it passes only as somebody looks at it
    monkeypatch.setattr(copies, "monotonic_ns", lambda: next(clock))
    job = drain(one, bytes_per_s=1, deadline_s=1.0)
    assert (job.result["pages"], job.result["kept"]) == (2, 2)
    assert job.result["why"] == "the deadline has passed"


def test_one_drain_runs_at_a_time(stored, one):
    stored.store("ab")
    refused: list[Refusal] = []

    def again() -> None:
        one.turns.before_step = lambda: None
        try:
            drain(one)
        except Refusal as refusal:
            refused.append(refusal)

    one.turns.before_step = again
    assert drain(one).result["complete"]
    assert [(one.status, one.code) for one in refused] == [(409, "busy")]
    assert drain(one).result["complete"], "the next one may begin"
