"""The tier in vLLM's real manager of tiers: chunks come back as they were, or they are misses."""

import os
import signal
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Spawn, WaitUntil
from tests.vllm.conftest import Node, flip_stored_bytes
from tests.vllm.engines import Engine, EngineError, Imported

FOUR = [1, 2, 3, 4]
FAILED_LOADS = "vllm:kv_offload_tiering_promotion_job_failures:('1:KVStoreTier',)"
FAILED_STORES = "vllm:kv_offload_tiering_cascade_job_failures:('1:KVStoreTier',)"
LOADED_BYTES = "vllm:kv_offload_tiering_read_bytes:('1:KVStoreTier',)"
ROW = 1 << 16
LATE_S = 10.0
"""A lookup's limit, of 2 s at most, and what a busy machine may add; without one it takes 20 s."""

New = Callable[..., Engine]
_names = count()


@pytest.fixture(scope="module")
def process(imported: Imported, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """The process of :mod:`tests.vllm.tier_process`."""
    made = Engine(imported, tmp_path_factory.mktemp("tier") / "log", "tests.vllm.tier_process")
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def new(process: Engine) -> Iterator[New]:
    """``new(address, **options)`` ends the manager before and makes another, with an empty primary
    tier; the last one ends with the test."""

    def make(address: str, **options: Any) -> Engine:
        process.ask("end")
        name = f"kvstore-test-{os.getpid()}-{next(_names)}"
        process.ask("new", name=name, address=address, **{"revision": "1", **options})
        return process

    yield make
    process.ask("end")


def comes_back(manager: Engine, wait_until: WaitUntil) -> int:
    """Store new chunks until one reaches the node; its number."""
    numbers, stored = count(100), []

    def reached() -> bool:
        stored.append(next(numbers))
        return FAILED_STORES not in manager.ask("store", numbers=stored[-1:])["counted"]

    wait_until(reached, 30.0, "the node is used")
    return stored[-1]


def test_chunks_come_back_byte_equal_through_a_new_manager_and_what_never_was_misses(
    node: Node, new: New
) -> None:
    stored = new(node.address).ask("store", numbers=FOUR)
    answer = new(node.address).ask("load", numbers=[*FOUR, 5, 6])
    assert FAILED_STORES not in stored["counted"]
    assert (answer["hits"], answer["right"]) == (FOUR, True)
    assert answer["counted"][LOADED_BYTES] == len(FOUR) * ROW
    assert FAILED_LOADS not in answer["counted"]


def test_after_vllm_has_reset_its_caches_nothing_stored_before_is_used_or_shared(
    node: Node, new: New
) -> None:
    manager = new(node.address)
    manager.ask("store", numbers=FOUR)
    manager.ask("load", numbers=[5])
    manager.ask("reset")
    assert manager.ask("load", numbers=FOUR)["hits"] == [], "the weights may be others now"
    stored = manager.ask("store", numbers=[5])
    assert FAILED_STORES not in stored["counted"]
    assert new(node.address).ask("load", numbers=[*FOUR, 5])["hits"] == FOUR


@pytest.mark.parametrize("options", [{"revision": "2"}, {"tenant": "other"}])
def test_another_revision_or_tenant_shares_nothing(
    node: Node, new: New, options: dict[str, str]
) -> None:
    new(node.address).ask("store", numbers=FOUR)
    assert new(node.address, **options).ask("load", numbers=FOUR)["hits"] == []


def test_without_a_node_all_misses_within_the_deadline_and_a_node_that_comes_is_used(
    spawn: Spawn, tmp_path: Path, new: New, wait_until: WaitUntil
) -> None:
    socket = tmp_path / "kv.sock"
    manager = new(f"unix://{socket}", lookup_timeout_ms=2000)
    stored = manager.ask("store", numbers=FOUR)
    answer = manager.ask("load", numbers=[5, 6])
    assert stored["counted"][FAILED_STORES] == 1
    assert stored["counted"]["kvstore:tier_store_failed_chunks"] == 4
    assert answer["hits"] == []
    assert answer["seconds"] < LATE_S
    later = Node(spawn, socket)
    number = comes_back(manager, wait_until)
    assert new(later.address).ask("load", numbers=[number])["hits"] == [number]


def test_a_node_that_stops_answering_costs_a_request_no_more_than_the_deadline(
    node: Node, new: New
) -> None:
    new(node.address).ask("store", numbers=FOUR)
    manager = new(node.address, lookup_timeout_ms=300)
    node.process.send_signal(signal.SIGSTOP)
    try:
        answer = manager.ask("load", numbers=FOUR)
    finally:
        node.process.send_signal(signal.SIGCONT)
    assert answer["hits"] == []
    assert answer["seconds"] < LATE_S
    assert answer["counted"]["kvstore:tier_lookup_timeouts"] == 4


def test_a_node_killed_between_lookup_and_load_fails_the_job_and_the_manager_goes_on(
    node: Node, new: New, wait_until: WaitUntil
) -> None:
    new(node.address).ask("store", numbers=FOUR)
    manager = new(node.address)
    manager.ask("find", numbers=FOUR)
    node.process.kill()
    node.process.wait()
    answer = manager.ask("load", numbers=FOUR)
    assert answer["hits"] == []
    assert answer["counted"][FAILED_LOADS] == 1
    assert answer["counted"]["kvstore:tier_load_failed_chunks"] == 4
    node.start()
    number = comes_back(manager, wait_until)
    answer = new(node.address).ask("load", numbers=[*FOUR, number])
    assert (answer["hits"], answer["right"]) == ([number], True)


def test_a_corrupt_chunk_is_a_failed_key_and_never_wrong_bytes(node: Node, new: New) -> None:
    new(node.address).ask("store", numbers=[1])
    assert flip_stored_bytes(node) > 0
    new(node.address).ask("store", numbers=[2, 3])
    answer = new(node.address).ask("load", numbers=[1, 2, 3])
    assert (answer["hits"], answer["right"]) == ([2, 3], True)
    assert answer["counted"][FAILED_LOADS] == 1
    assert answer["counted"][LOADED_BYTES] == 2 * ROW
    assert answer["counted"]["kvstore:tier_corrupt_pages"] == 1


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"adress": "unix:///x"}, "unknown key adress; did you mean address?"),
        ({"revision": ""}, "revision"),
        ({"device_slab_bytes": 1 << 20}, "unknown key device_slab_bytes"),
    ],
)
def test_a_wrong_option_is_named_at_start(
    node: Node, new: New, options: dict[str, Any], named: str
) -> None:
    with pytest.raises(EngineError, match="secondary_tiers: ") as raised:
        new(node.address, **options)
    assert named in str(raised.value)
