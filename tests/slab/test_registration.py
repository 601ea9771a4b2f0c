"""Goal: the node's memory is registered in the background, and never unmapped while it is."""

import threading

import numpy as np
import pytest

from kvstore.client import KVStore
from kvstore.tier.registration import PORTABLE, READ_ONLY, HostRegistration
from tests.client.conftest import SLAB, content, new_keys, open_space


class Cudart:
    """A CUDA runtime of which only the two calls exist."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.registered: dict[int, int] = {}
        self.calls: list[tuple[int, int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> int:  # noqa: N802
        self.entered.set()
        assert self.gate.wait(10.0)
        self.calls.append((ptr, size, flags))
        if self.code == -1:
            raise RuntimeError("CUDA error: out of memory")
        if not self.code:
            self.registered[ptr] = size
        return self.code

    def cudaHostUnregister(self, ptr: int) -> int:  # noqa: N802
        return 0 if self.registered.pop(ptr, None) else 713


def test_what_is_mapped_is_registered_to_be_read_by_every_context():
    cudart = Cudart()
    registration = HostRegistration(cudart)
    registration.mapped(1 << 20, 4096)
    registration.mapped(1 << 21, 8192)
    assert registration.wait_idle(10.0)
    assert cudart.calls == [
        (1 << 20, 4096, PORTABLE | READ_ONLY), (1 << 21, 8192, PORTABLE | READ_ONLY)
    ]  # fmt: skip
    assert registration.stats() == {
        "state": "done", "mapped_bytes": 12_288, "registered_bytes": 12_288, "failed_extents": 0,
        "why": "",
    }  # fmt: skip
    registration.unmapping(1 << 20)
    assert cudart.registered == {1 << 21: 8192}
    assert registration.stats()["registered_bytes"] == 8192
    registration.unmapping(1 << 20)


def test_progress_shows_while_it_runs_and_unmapping_waits_for_its_extent(wait_until):
    cudart = Cudart()
    cudart.gate.clear()
    registration = HostRegistration(cudart)
    for at in (1, 2):
        registration.mapped(at << 20, 4096)
    assert cudart.entered.wait(10.0)
    stats = registration.stats()
    assert (stats["state"], stats["mapped_bytes"], stats["registered_bytes"]) == (
        "running", 8192, 0
    )  # fmt: skip
    registration.unmapping(2 << 20)
    waiting = threading.Thread(target=registration.unmapping, args=(1 << 20,))
    waiting.start()
    assert waiting.is_alive()
    cudart.gate.set()
    waiting.join(10.0)
    assert registration.wait_idle(10.0)
    assert (len(cudart.calls), cudart.registered) == (1, {}), "the second one was gone in time"


@pytest.mark.parametrize(("code", "why"), [(2, "CUDA error 2"), (-1, "out of memory")])
def test_memory_that_cannot_be_registered_is_said_once_and_goes_on_unregistered(code, why, caplog):
    cudart = Cudart(code)
    registration = HostRegistration(cudart)
    for at in (1, 2, 3):
        registration.mapped(at << 20, 4096)
    assert registration.wait_idle(10.0)
    stats = registration.stats()
    assert (stats["state"], stats["failed_extents"], stats["registered_bytes"]) == ("failed", 3, 0)
    assert why in stats["why"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert why in said
    assert "ulimit -l" in said
    for at in (1, 2, 3):
        registration.unmapping(at << 20)
    assert registration.stats()["state"] == "done"


def test_a_device_that_cannot_be_chosen_fails_everything_and_is_tried_again(caplog):
    tries: list[int] = []

    def prepare() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise RuntimeError("CUDA error: no device")

    cudart = Cudart()
    registration = HostRegistration(cudart, prepare)
    registration.mapped(1 << 20, 4096)
    assert registration.wait_idle(10.0)
    assert "no device" in registration.stats()["why"]
    registration.mapped(2 << 20, 4096)
    assert registration.wait_idle(10.0)
    assert cudart.registered == {2 << 20: 4096}


def test_memory_that_cannot_be_unregistered_is_said(caplog):
    cudart = Cudart()
    registration = HostRegistration(cudart)
    registration.mapped(1 << 20, 4096)
    assert registration.wait_idle(10.0)
    cudart.registered.clear()
    registration.unmapping(1 << 20)
    assert "713" in caplog.text


def test_a_store_registers_the_extents_it_reads_and_unregisters_them_before_they_go(wait_until):
    cudart = Cudart()
    store = KVStore.open(16 << 20, extent_bytes=4 << 20, device_slab=SLAB)
    slab = store._services.promotion.slab
    slab.registration = HostRegistration(cudart)
    space = open_space(store)
    keys, pages = new_keys(space, 4), content(4, space.page_bytes[0])
    space.put(keys, pages)
    out = [np.zeros(space.page_bytes[0], dtype=np.uint8) for _ in range(4)]
    assert space.get(keys[:1], out[:1]) == 1
    with store._link.moving() as memory:
        store._services.promotion.watch(memory)
        store._services.promotion.watch(memory)
    assert slab.registration.wait_idle(10.0)
    assert list(cudart.registered.values()) == [4 << 20], "one extent, told once"
    assert store.stats()["slab"]["registration"]["registered_bytes"] == 4 << 20
    other = open_space(store)
    big = new_keys(other, 1000)
    other.put(big, content(1000, other.page_bytes[0]))
    with other.get(big) as views:
        assert len(views) > 0
        wait_until(lambda: len(cudart.registered) > 1)
    store.close()
    assert cudart.registered == {}


def test_a_client_shows_its_slab_as_prometheus_series():
    from kvstore.server.metrics import render_slab

    with KVStore.open(16 << 20, extent_bytes=4 << 20, device_slab=SLAB) as store:
        space = open_space(store)
        keys, pages = new_keys(space, 2), content(2, space.page_bytes[0])
        space.put(keys, pages)
        out = [np.zeros(space.page_bytes[0], dtype=np.uint8) for _ in range(2)]
        store._services.promotion._worker.close()
        assert space.get(keys, out) == space.get(keys, out) == 2
        text = render_slab(store.slab_stats()).decode()
    assert "kvstore_slab_pages_hit_total 2.0" in text
    assert "kvstore_slab_pages_promoted_total 2.0" in text
    assert f'kvstore_slab_bytes{{state="ready"}} {2.0 * space.page_bytes[0]}' in text
    assert "kvstore_registration_registered_bytes 0.0" in text
    assert "kvstore_slab_broken 0.0" in text
