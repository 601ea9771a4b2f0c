"""Chunks of vLLM's primary tier, in a store of this process."""

import threading
from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import numpy as np
import pytest

from engine_adapters.vllm.names import page_key
from engine_adapters.vllm.options import read_tier_options
from kvstore.client.results import MISS, Hit, PutResult
from kvstore.client.store import KVStore
from kvstore.engine import tiering
from kvstore.engine.opening import Opening
from kvstore.engine.tiering import Moved, Tiering
from kvstore.protocol.errors import CapacityError, ConfigError, PeerUnreachable, TransferTimeout
from kvstore.protocol.page import OpaqueLayout, PrefixKeys, ShardSpec, SpaceIdentity
from tests.conftest import WaitUntil

ROW = 4096
WAIT_S = 30.0
IDENTITY = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=16)
LAYOUT = OpaqueLayout("vllm", "1", "", 16, ROW)
SHARD = ShardSpec(layout=LAYOUT, layers=(0, 1), heads=(0, 1), window_pages=1)
KEYS = [bytes([number]) * 32 + bytes(4) for number in range(4)]


@pytest.fixture
def store() -> Iterator[KVStore]:
    """A store of this process."""
    opened = KVStore.open(8 << 20, extent_bytes=1 << 20)
    yield opened
    opened.close()


class Stub:
    """A store, and the one space of it, whose calls may be held, refused or wrong."""

    def __init__(self) -> None:
        self.connected = True
        self.away = False
        self.go = threading.Event()
        self.go.set()
        self.refused: set[bytes] = set()
        self.error: type[Exception] = CapacityError
        self.asked: list[int] = []
        self.calls = 0

    def space(self, identity: object, shards: object) -> Any:
        del identity, shards
        if self.away:
            raise PeerUnreachable("nobody there")
        return self

    def lookup(self, keys: PrefixKeys) -> Hit:
        self.asked.append(len(keys))
        self._wait(keys)
        return MISS

    def get(self, keys: PrefixKeys, out: list[np.ndarray]) -> int:
        self._wait(keys)
        out[0][:] = 7
        return 1

    def put(self, keys: PrefixKeys, pages: list[np.ndarray]) -> PutResult:
        del pages
        self._wait(keys)
        return PutResult(1)

    def _wait(self, keys: PrefixKeys) -> None:
        self.calls += 1
        assert self.go.wait(WAIT_S)
        if keys.packed in self.refused:
            raise self.error("refused")


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    yield made
    made.go.set()


class Clock:
    """Seconds, as a test sets them."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(
    store: Any, rows: np.ndarray, clock: Callable[[], float] = monotonic, timeout_s: float = WAIT_S
) -> Tiering:
    one, two, three = (Opening(store, IDENTITY, [SHARD], monotonic) for _ in range(3))
    return Tiering((one, two, three), rows, clock, timeout_s, page_key)


def ended(tier: Tiering) -> Moved:
    tier.drain(WAIT_S)
    (moved,) = tier.finished()
    return moved._replace(seconds=0.0)


def page(key: bytes) -> bytes:
    found = page_key(key)
    assert found is not None
    return found.packed


def filled(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (8, ROW), dtype=np.uint8)


def test_chunks_come_back_byte_equal_through_a_manager_made_anew(store: KVStore) -> None:
    rows = filled(1)
    first = make(store, rows)
    first.store(1, KEYS, [0, 1, 2, 3])
    assert ended(first).whole
    first.close(WAIT_S)
    target = filled(2)
    second = make(store, target)
    second.load(2, [KEYS[3], KEYS[0]], [5, 6])
    assert ended(second) == Moved(2, [KEYS[3], KEYS[0]], True, 2 * ROW, 0.0)
    assert (target[5] == rows[3]).all()
    assert (target[6] == rows[0]).all()
    second.close(WAIT_S)


def test_a_load_names_the_keys_that_were_there_and_counts_the_failure(store: KVStore) -> None:
    tier = make(store, filled(1))
    tier.store(1, KEYS[:1], [0])
    assert ended(tier).whole
    tier.load(2, KEYS[:2], [1, 2])
    assert ended(tier) == Moved(2, KEYS[:1], False, ROW, 0.0)
    assert tier.counts.take() == {"load_failed_chunks": 1}
    tier.close(WAIT_S)


def test_a_key_of_a_weak_hash_is_a_miss_and_is_never_stored(store: KVStore) -> None:
    tier = make(store, filled(1))
    weak = bytes(20)
    assert tier.lookup(weak) is False
    tier.store(1, [weak], [0])
    assert ended(tier).good == []
    assert tier.counts.take() == {"weak_keys": 1, "store_failed_chunks": 1}
    tier.close(WAIT_S)


@pytest.mark.parametrize("refused", [False, True])
def test_a_closed_tier_lets_go_of_the_memory_it_was_given(stub: Stub, refused: bool) -> None:
    buffer = bytearray(8 * ROW)
    memory = memoryview(buffer).cast("B", (8, ROW))
    stub.refused = {page(KEYS[0])} if refused else set()
    tier = make(stub, np.asarray(memory))
    tier.store(1, KEYS[:1], [0])
    tier.close(WAIT_S)  # nobody has asked for the job's end
    memory.release()
    buffer.clear()  # refused while anything holds its memory


def answers(tier: Tiering, keys: list[bytes], wait_until: WaitUntil) -> list[bool | None]:
    for key in keys:
        tier.lookup(key)
    tier.flush()
    wait_until(lambda: all(tier.lookup(key) is not None for key in keys), WAIT_S, "answers")
    return [tier.lookup(key) for key in keys]


def test_lookups_of_many_chunks_tell_each_that_is_there(
    store: KVStore, wait_until: WaitUntil
) -> None:
    keys = [number.to_bytes(32, "big") + bytes(4) for number in range(200)]
    there = {3, 5, 70, 199}
    tier = make(store, filled(1))
    tier.store(1, [keys[number] for number in sorted(there)], [0, 1, 2, 3])
    assert ended(tier).whole
    found = answers(tier, keys, wait_until)
    assert {number for number, answer in enumerate(found) if answer} == there
    tier.close(WAIT_S)


def test_a_prompt_nobody_knows_costs_a_request_for_every_64_chunks(
    stub: Stub, wait_until: WaitUntil
) -> None:
    tier = make(stub, filled(1))
    keys = [number.to_bytes(32, "big") + bytes(4) for number in range(130)]
    assert answers(tier, keys, wait_until) == [False] * 130
    assert stub.asked == [64, 64, 2]
    tier.close(WAIT_S)


def test_a_lookup_that_is_not_answered_in_time_is_a_miss_and_a_late_answer_harms_nobody(
    stub: Stub,
) -> None:
    clock = Clock()
    stub.go.clear()
    tier = make(stub, filled(1), clock, 2.0)
    assert tier.lookup(KEYS[0]) is None
    tier.flush()
    clock.now += 1.9
    assert tier.lookup(KEYS[0]) is None
    clock.now += 0.2
    assert [tier.lookup(KEYS[0]) for _ in range(3)] == [False] * 3
    assert tier.counts.take() == {"lookup_timeouts": 1}
    clock.now += 2.0
    tier.flush()
    assert tier.lookup(KEYS[0]) is None, "forgotten: asked again"
    stub.go.set()
    tier.close(WAIT_S)


def test_lookups_that_nobody_waits_for_any_more_are_not_asked(
    stub: Stub, wait_until: WaitUntil
) -> None:
    clock = Clock()
    stub.go.clear()
    tier = make(stub, filled(1), clock, 2.0)
    for key in KEYS:
        tier.lookup(key)
        tier.flush()
    wait_until(lambda: stub.calls == 1, WAIT_S, "the first is being asked")
    clock.now += 2.1
    stub.go.set()
    tier.close(WAIT_S)
    assert stub.asked == [1]


def test_with_the_store_away_all_misses_and_nothing_is_named_as_moved(
    stub: Stub, wait_until: WaitUntil
) -> None:
    stub.away = True
    tier = make(stub, filled(1))
    assert answers(tier, KEYS, wait_until) == [False] * 4
    tier.store(1, KEYS, [0, 1, 2, 3])
    assert ended(tier) == Moved(1, [], False, 0, 0.0)
    tier.load(2, KEYS, [0, 1, 2, 3])
    assert ended(tier) == Moved(2, [], False, 0, 0.0)
    assert tier.counts.take() == {"store_failed_chunks": 4, "load_failed_chunks": 4}
    tier.close(WAIT_S)


def test_unanswered_lookups_are_bounded(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tiering.LOOKUPS_MAX == 65_536
    monkeypatch.setattr(tiering, "LOOKUPS_MAX", 2)
    tier = make(stub, filled(1))
    assert [tier.lookup(key) for key in KEYS] == [None, None, False, False]
    assert tier.counts.take() == {"lookups_refused": 2}
    tier.close(WAIT_S)


def test_what_was_found_and_did_not_come_is_a_miss_until_it_is_stored_again(
    store: KVStore, wait_until: WaitUntil
) -> None:
    tier = make(store, filled(1))
    tier.load(1, KEYS[:1], [0])
    assert ended(tier).good == []
    assert tier.lookup(KEYS[0]) is False, "or vLLM would load it forever"
    tier.store(2, KEYS[:1], [1])
    assert ended(tier).whole
    assert answers(tier, KEYS[:1], wait_until) == [True]
    tier.close(WAIT_S)


def test_a_job_number_is_not_taken_twice_while_its_job_moves(stub: Stub) -> None:
    stub.go.clear()
    tier = make(stub, filled(1))
    tier.store(1, KEYS[:1], [0])
    with pytest.raises(AssertionError, match="job 1 has not ended"):
        tier.load(1, KEYS[:1], [1])
    stub.go.set()
    assert ended(tier).number == 1
    tier.close(WAIT_S)


@pytest.mark.parametrize("load", [False, True])
def test_a_refused_chunk_is_not_named_as_good_and_costs_the_others_nothing(
    stub: Stub, load: bool
) -> None:
    stub.refused = {page(KEYS[1])}
    tier = make(stub, filled(1))
    (tier.load if load else tier.store)(1, KEYS[:3], [0, 1, 2])
    assert ended(tier) == Moved(1, [KEYS[0], KEYS[2]], False, 2 * ROW, 0.0)
    tier.close(WAIT_S)


def test_a_job_that_breaks_its_worker_has_failed_and_the_next_one_moves(stub: Stub) -> None:
    stub.refused, stub.error = {page(KEYS[1])}, ValueError
    tier = make(stub, filled(1))
    tier.store(1, KEYS[:3], [0, 1, 2])
    assert ended(tier) == Moved(1, KEYS[:1], False, ROW, 0.0)
    tier.store(2, KEYS[2:], [2, 3])
    assert ended(tier).whole
    tier.close(WAIT_S)


def test_a_job_keeps_its_chunks_until_it_has_ended_however_long_that_takes(stub: Stub) -> None:
    stub.go.clear()
    rows = filled(1)
    tier = make(stub, rows)
    tier.load(1, KEYS[:3], [0, 1, 2])
    for stop in (tier.drain, tier.close):
        with pytest.raises(TransferTimeout):
            stop(0.01)
    assert tier.finished() == [], "its chunks are not vLLM's yet"
    stub.go.set()
    moved = ended(tier)
    assert (rows[:3] == 7).all(1).tolist() == [key in moved.good for key in KEYS[:3]]
    tier.close(WAIT_S)


def test_a_drain_that_takes_too_long_ends_jobs_at_their_next_chunk(
    stub: Stub, wait_until: WaitUntil
) -> None:
    stub.go.clear()
    tier = make(stub, filled(1))
    tier.store(1, KEYS[:3], [0, 1, 2])
    wait_until(lambda: stub.calls == 1, WAIT_S, "the first chunk is being stored")
    timer = threading.Timer(0.2, stub.go.set)
    timer.start()
    tier.drain(0.15)
    timer.join()
    (moved,) = tier.finished()
    assert moved.good == KEYS[:1]
    tier.close(WAIT_S)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "revision"),
        ({"revision": ""}, "revision"),
        ({"revision": "1", "adress": "unix:///x"}, "unknown key adress; did you mean address?"),
        ({"revision": "1", "load": "async"}, "unknown key load"),
        ({"revision": "1", "address": "tcp://x"}, "is not unix:///absolute/path"),
        ({"revision": "1", "lookup_timeout_ms": 0}, "lookup_timeout_ms"),
    ],
)
def test_a_wrong_option_of_the_tier_is_named(values: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match="secondary_tiers: ") as raised:
        read_tier_options(values)
    assert named in str(raised.value)


def test_under_other_names_nothing_that_was_stored_or_answered_before_is_there(
    store: KVStore, wait_until: WaitUntil
) -> None:
    tier = make(store, filled(1))
    tier.store(1, KEYS, [0, 1, 2, 3])
    assert ended(tier).whole
    assert answers(tier, KEYS, wait_until) == [True] * 4
    identity = SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=16, revision="other")
    one, two, three = (Opening(store, identity, [SHARD], monotonic) for _ in range(3))
    tier.rename((one, two, three))
    assert answers(tier, KEYS, wait_until) == [False] * 4
    tier.load(2, KEYS, [0, 1, 2, 3])
    assert ended(tier).good == []
    tier.close(WAIT_S)


def test_a_job_goes_on_under_the_names_it_was_begun_with(stub: Stub) -> None:
    renamed = Stub()
    stub.go.clear()
    tier = make(stub, filled(12))
    tier.store(1, KEYS[:1], [0])
    tier.store(2, KEYS[1:2], [1])
    tier.load(3, KEYS[2:3], [2])
    openings = [Opening(renamed, IDENTITY, [SHARD], monotonic) for _ in range(3)]
    tier.rename((openings[0], openings[1], openings[2]))

    stub.go.set()
    tier.drain(WAIT_S)

    assert [moved.whole for moved in tier.finished()] == [True, True, True]
    assert (stub.calls, renamed.calls) == (3, 0)
    tier.close(WAIT_S)
