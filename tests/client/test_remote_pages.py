"""Goal: a client reads pages that only another node has, and no wait for them misleads it."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore import mover
from kvstore.client.resources import DISK_BYTES_PER_S_GUESS, LOAD_BYTES_PER_S_GUESS
from kvstore.client.store import KVStore
from kvstore.mover.kvpool import KVPool
from kvstore.mover.memory import memory_at
from kvstore.protocol.errors import CapacityError, InvalidArgument, TierUnavailable, TooFewCopies
from kvstore.protocol.page import KEY_BYTES, PrefixKeys, digest_seed, page_seeds
from kvstore.state.remote.jobs import (
    FetchEnd,
    Holding,
    Locate,
    PeerFetch,
    PeerJob,
    PeerLimits,
    Spread,
    SpreadEnd,
)
from tests.client.conftest import content, new_keys, open_space

WAIT_S = 10.0


class Elsewhere:
    """The peer side of an embedded node: another node's pages, as bytes of this test.

    Attributes:
        pages: key → bytes of the only shard.
        gate: reads wait for it.
        asked: questions that came.
        read: keys that were read.
        spreads: copies that were asked for.
        others: how many other nodes can take some.
        draining: how many more are draining.
    """

    def __init__(self, store: KVStore) -> None:
        self.pages: dict[bytes, bytes] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[Locate] = []
        self.read: list[bytes] = []
        self._link: Any = store._link
        self._jobs: list[PeerJob] = []
        self.spreads: list[Spread] = []
        self.others = 1
        self.draining = 0
        self._come, self._closed = threading.Event(), False
        self._link.node.join(PeerLimits(64 << 20))
        self._link._desk.peers = self
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def has(self, keys: PrefixKeys, pages: list[Any]) -> None:
        self.pages |= {bytes(key): bytes(page) for key, page in zip(keys, pages, strict=True)}

    def flush(self) -> None:
        jobs = self._link.node.remote.jobs
        self._jobs += jobs
        jobs.clear()
        self._come.set()

    def close(self) -> None:
        self._closed = True
        self.gate.set()
        self._come.set()
        self._thread.join(WAIT_S)

    def _run(self) -> None:
        while not self._closed:
            self._come.wait()
            self._come.clear()
            while self._jobs and not self._closed:
                job = self._jobs.pop(0)
                if isinstance(job, PeerFetch):
                    assert self.gate.wait(WAIT_S)
                with self._link._answered:
                    self._end(job)

    def _end(self, job: PeerJob) -> None:
        desk = self._link._desk
        every = [job.keys[at : at + KEY_BYTES] for at in range(0, len(job.keys), KEY_BYTES)]
        there = next((at for at, key in enumerate(every) if key not in self.pages), len(every))
        if isinstance(job, Locate):
            self.asked.append(job)
            desk.located(job.number, [Holding("there", there)])
            return
        if isinstance(job, Spread):
            self.spreads.append(job)
            desk.peer_spread(SpreadEnd(job.number, min(job.peers, self.others), self.draining))
            return
        self.read += every
        size = job.shard.page_bytes(job.identity)
        places = [self._link.node.pages.slots.address(slot) for slot in job.slots[:there]]
        addresses = [self._link.memory.address(extent) + offset for extent, _, offset in places]
        for key, address in zip(every, addresses, strict=False):
            memory_at(address, size)[:] = self.pages[key]
        seeds = page_seeds(job.keys[: there * KEY_BYTES], digest_seed(job.identity, job.shard))
        digests = mover.digest(np.array(addresses, dtype=np.uint64), size, seeds).tobytes()
        error = None if there == len(every) else TierUnavailable("it has no more")
        desk.peer_fetched(FetchEnd(job.job, digests, error, True))


@pytest.fixture
def store() -> Iterator[KVStore]:
    with KVStore.open(8 << 20, extent_bytes=1 << 20) as made:
        yield made


@pytest.fixture
def elsewhere(store) -> Iterator[Elsewhere]:
    made = Elsewhere(store)
    yield made
    made.close()


@pytest.fixture
def prompt(store, elsewhere):
    """A space, six keys of it, and their pages; the first two are here, five are elsewhere."""
    space = open_space(store)
    keys, pages = new_keys(space, 6), content(6, space.page_bytes[0])
    space.put(keys[:2], pages[:2])
    elsewhere.has(keys[:5], pages[:5])
    return space, keys, [bytes(page) for page in pages]


def read(space, keys) -> list[bytes]:
    out = [np.zeros(space.page_bytes[0], dtype=np.uint8) for _ in keys]
    return [bytes(page) for page in out[: space.get(keys, out)]]


def test_a_lookup_tells_what_other_nodes_have_further_and_in_what_time(prompt):
    space, keys, _ = prompt
    hit = space.lookup(keys, wait_s=WAIT_S)
    assert (hit.pages, hit.pending, hit.remote) == (2, 0, 3)
    assert 0 < hit.remote_seconds < 1
    assert hit.load_seconds < hit.remote_seconds, "that of the pages here alone"
    assert hit.tiers == {"host": 2}


def test_a_lookup_never_waits_for_the_answer_by_itself(prompt, wait_until):
    space, keys, _ = prompt
    first = space.lookup(keys)
    assert (first.pages, first.pending, first.remote) == (2, 4, 0)
    wait_until(lambda: space.lookup(keys).remote == 3)


def test_a_get_fetches_what_other_nodes_have_with_or_without_a_lookup(prompt, elsewhere):
    space, keys, pages = prompt
    assert read(space, keys) == pages[:5]
    assert b"".join(elsewhere.read) == keys[2:5].packed
    assert read(space, keys[:5]) == pages[:5]
    assert len(elsewhere.read) == 3, "they are here now"


def test_a_get_of_which_nothing_is_here_fetches_the_whole_chain(store, elsewhere):
    space = open_space(store)
    keys, pages = new_keys(space, 4), content(4, space.page_bytes[0])
    elsewhere.has(keys, pages)
    assert read(space, keys) == [bytes(page) for page in pages]


def test_views_and_prefetches_fetch_too(prompt):
    space, keys, pages = prompt
    assert space.prefetch(keys[:3]).result() == 3
    with space.get(keys) as views:
        assert [bytes(page) for page in views.arrays] == pages[:5]


def test_a_restore_that_fetches_lets_those_from_memory_pass(store, prompt, elsewhere):
    space, keys, pages = prompt
    size = space.page_bytes[0]
    target = np.zeros((7, size), dtype=np.uint8)
    pool = KVPool((target.ctypes.data,), size, size, 7, 1)
    elsewhere.gate.clear()
    far = space.restore_to_kvpool(keys[:5], pool, [0, 1, 2, 3, 4])
    near = space.restore_to_kvpool(keys[:2], pool, [5, 6])
    assert near.result().pages == 2
    assert not far.done
    elsewhere.gate.set()
    assert far.result().pages == 5
    assert [bytes(page) for page in target[:5]] == pages[:5]


def test_a_load_ends_with_what_came(store, prompt, elsewhere):
    space, keys, pages = prompt
    assert space.lookup(keys, wait_s=WAIT_S).remote == 3
    del elsewhere.pages[bytes(keys[3])]
    assert read(space, keys) == pages[:3]
    assert not store.troubles


def test_waits_for_other_nodes_change_no_measured_speed(store, prompt, elsewhere):
    space, keys, pages = prompt
    assert read(space, keys) == pages[:5]
    assert store.load_bytes_per_s == LOAD_BYTES_PER_S_GUESS
    assert store._resources.disk_bytes_per_s == DISK_BYTES_PER_S_GUESS
    assert read(space, keys[:5]) == pages[:5]
    assert store.load_bytes_per_s != LOAD_BYTES_PER_S_GUESS, "from memory"


def test_a_caller_that_knows_who_has_the_pages_spares_the_question(prompt, elsewhere):
    space, keys, pages = prompt
    hit = space.lookup(keys, holder="there", held=5)
    assert (hit.pages, hit.pending, hit.remote) == (2, 0, 3)
    assert not elsewhere.asked
    assert read(space, keys[:5]) == pages[:5]


def test_the_name_of_the_own_node_is_no_other_holder(store, prompt, elsewhere, wait_until):
    space, keys, _ = prompt
    assert store.node_name == "embedded"
    assert space.lookup(keys, holder=store.node_name, held=5).pending == 4
    wait_until(lambda: elsewhere.asked)


@pytest.mark.parametrize(
    ("holder", "held"), [("there", 10**30), ("there", -1), ("t" * 65, 5), ("\ud800", 5)]
)
def test_whatever_a_router_says_of_a_holder_costs_no_local_hit(store, prompt, holder, held):
    space, keys, _ = prompt
    assert space.lookup(keys, holder=holder, held=held).pages == 2
    assert not store.troubles


def test_a_store_without_other_nodes_asks_nobody(store):
    space = open_space(store)
    hit = space.lookup(new_keys(space, 3), holder="there", held=3)
    assert hit == (0, 0, {"host": 0}, 0.0, 0, 0.0)


# Copies


def test_a_put_with_replicas_returns_when_other_nodes_have_the_pages(store, elsewhere):
    space = open_space(store)
    keys = new_keys(space, 6)
    pages = content(len(keys), space.page_bytes[0])

    assert space.put(keys, pages, replicas=2).stored == 6

    (spread,) = elsewhere.spreads
    assert (spread.keys, spread.first, spread.peers) == (keys.packed, 0, 1)
    assert space.put(keys, pages, replicas=2).existing == 6, "it may be said again"
    assert len(elsewhere.spreads) == 2
    space.put(keys, pages)
    assert len(elsewhere.spreads) == 2, "without replicas nobody is asked"


def test_a_put_with_too_few_replicas_says_how_many_there_are(store, elsewhere):
    elsewhere.others = 1
    space = open_space(store)
    keys = new_keys(space, 2)
    pages = content(len(keys), space.page_bytes[0])

    with pytest.raises(TooFewCopies) as too_few:
        space.put(keys, pages, replicas=4)

    assert (too_few.value.copies, too_few.value.retryable) == (2, True)
    assert "draining" not in str(too_few.value)
    assert space.lookup(keys).pages == 2


def test_a_put_with_too_few_replicas_says_that_a_node_was_left_out_because_it_drains(
    store, elsewhere
):
    elsewhere.others, elsewhere.draining = 0, 1
    space = open_space(store)
    keys = new_keys(space, 2)
    pages = content(len(keys), space.page_bytes[0])
    with pytest.raises(TooFewCopies, match=r"1 of 2 nodes .* \(1 not asked: draining\)"):
        space.put(keys, pages, replicas=2)
    elsewhere.others = 1
    space.put(keys, pages, replicas=2)


def test_a_node_alone_has_the_only_copy(store):
    space = open_space(store)
    keys = new_keys(space, 2)
    with pytest.raises(TooFewCopies) as too_few:
        space.put(keys, content(len(keys), space.page_bytes[0]), replicas=2)
    assert too_few.value.copies == 1


def test_a_node_that_is_too_old_is_not_asked_for_copies(store, elsewhere, monkeypatch):
    monkeypatch.setattr(store._link, "node_minor", 5)
    space = open_space(store)
    keys = new_keys(space, 2)
    with pytest.raises(TooFewCopies, match="too old"):
        space.put(keys, content(len(keys), space.page_bytes[0]), replicas=2)
    assert not elsewhere.spreads


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"replicas": 0}, "replicas"),
        ({"replicas": 17}, "replicas"),
        ({"replicas": 2, "ttl_s": 1.0}, "replicas"),
        ({"replicas": 2, "read_once": True}, "replicas"),
    ],
)
def test_replicas_that_cannot_be_are_refused_and_nothing_is_stored(store, options, field):
    space = open_space(store)
    keys = new_keys(space, 1)
    with pytest.raises(InvalidArgument) as refused:
        space.put(keys, content(1, space.page_bytes[0]), **options)
    assert refused.value.field == field
    assert space.lookup(keys).pages == 0


def test_copies_of_pages_that_were_not_stored_are_refused(store, elsewhere):
    space = open_space(store)
    with pytest.raises(CapacityError, match="put them again"):
        space.replicate(new_keys(space, 1), 2)
    with pytest.raises(InvalidArgument):
        space.replicate(new_keys(space, 1), 0)
    assert not elsewhere.spreads
