"""Goal: in a simulation nodes bring KV for who waits, as the Conductor lets them."""

import pytest

from conductor.simulator.simulation import Simulation
from conductor.simulator.trace import BLOCK_TOKENS
from tests.conductor.simulator.test_simulation import fleet, outcomes, simulated, trace_of

BLOCK_BYTES = 1e5 * BLOCK_TOKENS
"""Of :func:`fleet`."""


def waiting_for_pages(**fields: object) -> Simulation:
    """The last prompt waits for the only place; its pages have gone to the disk meanwhile."""
    trace = trace_of(
        (0.0, 3 * BLOCK_TOKENS + 9, 2, [1, 2, 3]), (3.0, 3 * BLOCK_TOKENS + 9, 2, [4, 5, 6]),
        (6.0, 300, 200, []), (6.01, 3 * BLOCK_TOKENS + 9, 2, [1, 2, 3]),
    )  # fmt: skip
    memory = {"host_bytes": 3.5 * BLOCK_BYTES, "disk_bytes": 1e12, "disk_bytes_per_s": 2e9}
    one = fleet(mixed=1, places=1, room_tokens=4 * BLOCK_TOKENS)
    return simulated(trace, one, **{"policy": "longest-prefix", **memory, **fields})


def test_pages_on_disk_are_in_memory_when_the_request_that_waited_has_its_engine():
    brought, left, no_room = (
        waiting_for_pages(bring_bytes=size) for size in (1e9, 0.0, BLOCK_BYTES)
    )
    assert [done.records[3].hit_tokens for done in (brought, left)] == [1_536, 1_536]
    disk_s = 3 * BLOCK_BYTES / 2e9
    assert left.records[3].assigned == brought.records[3].assigned
    assert left.records[3].ttft_s - brought.records[3].ttft_s == pytest.approx(
        disk_s - 3 * BLOCK_BYTES / 5e9, rel=0.02
    )
    assert outcomes(no_room) == outcomes(left)
    counts = brought.prefetching.brought
    assert (counts.begun, counts.come, counts.come_bytes) == (1, 1, 3 * BLOCK_BYTES)
    assert no_room.prefetching.brought.looks
    assert not no_room.prefetching.brought.begun


def test_what_is_brought_for_a_request_that_leaves_is_given_up():
    done = waiting_for_pages(bring_bytes=1e9, wait_s=0.1, disk_bytes_per_s=1e9)
    assert done.records[3].code == "queue_timeout"
    assert not done.prefetching.moving
    assert not len(done.links)
    counts = done.prefetching.brought
    assert (counts.begun, counts.come, counts.given_up) == (1, 0, 1)
