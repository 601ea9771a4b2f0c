"""Goal: what is used stays mapped, what is gone does not, and nothing else is ever touched."""

import ctypes
import mmap
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore import mover
from kvstore.client import forks
from kvstore.client.mapping import Mapping, Region, Use
from kvstore.protocol.errors import ProtocolError, TierUnavailable
from kvstore.protocol.wire import ADDRESS
from tests.client.conftest import mapped_bytes

EXTENT = 4 << 20
SIZE = 1 << 16


class Extents:
    """The node's side: memory by number, and what of it is gone."""

    def __init__(self) -> None:
        self.descriptors: dict[int, int] = {}
        self.gone: set[int] = set()
        self.asked: list[list[int]] = []

    def add(self, number: int) -> None:
        self.descriptors[number] = os.memfd_create(f"extent-{number}")
        os.ftruncate(self.descriptors[number], EXTENT)
        os.pwrite(self.descriptors[number], bytes([number]), 0)

    def fetch(self, numbers: Sequence[int], known: Sequence[int], keep) -> list[int]:
        self.asked.append(list(numbers))
        for number in numbers:
            if number in self.gone:
                raise ProtocolError(f"extent {number} is of nobody")
            keep(os.dup(self.descriptors[number]))
        return [number for number in known if number in self.gone]

    def allocated(self, number: int) -> int:
        return os.fstat(self.descriptors[number]).st_blocks * 512

    def close(self) -> None:
        for descriptor in self.descriptors.values():
            os.close(descriptor)


@pytest.fixture
def extents() -> Iterator[Extents]:
    made = Extents()
    for number in range(4):
        made.add(number)
    yield made
    made.close()


@pytest.fixture
def mapping(extents: Extents) -> Iterator[Mapping]:
    made = Mapping(b"boot", extents.fetch)
    yield made
    made.close()


def at(*numbers: int, offset: int = 0) -> bytes:
    return np.array([(number, 1, offset) for number in numbers], ADDRESS).tobytes()


def first_byte(address: int) -> int:
    return ctypes.c_ubyte.from_address(address).value


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def is_mapped(address: int) -> bool:
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)


def test_an_extent_that_is_gone_is_unmapped_once_no_move_uses_it(mapping, extents):
    reader, writer = mapping.use(), mapping.use()
    addresses = [
        int(reader.locate(at(1), SIZE, write=False)[0]),
        int(writer.locate(at(1), SIZE, write=True)[0]),
    ]
    kept = int(reader.locate(at(2), SIZE, write=False)[0])

    mapping.retire([1, 7])
    mapping.sweep()
    assert [first_byte(address) for address in addresses] == [1, 1]
    reader.end()
    mapping.sweep()
    assert all(map(is_mapped, addresses)), "the writer uses it"
    writer.end()
    mapping.sweep()

    assert not any(map(is_mapped, addresses))
    assert first_byte(kept) == 2
    assert mapping.known() == [2]


def test_mapping_an_extent_tells_which_others_are_gone(mapping, extents):
    mapping.use().locate(at(0), SIZE, write=False)
    use = mapping.use()
    use.locate(at(1), SIZE, write=False)
    use.end()
    extents.gone.add(1)

    mapping.use().locate(at(2), SIZE, write=False)
    mapping.sweep()

    assert sorted(mapping.known()) == [0, 2]
    assert mapped_bytes(mapping) == 2 * EXTENT


def test_an_idle_client_asks_which_extents_are_gone(mapping, extents):
    use = mapping.use()
    use.locate(at(0, 1), SIZE, write=False)
    use.end()
    extents.gone |= {0, 1}

    mapping.ask()
    mapping.sweep()

    assert mapped_bytes(mapping) == 0
    mapping.ask()
    assert extents.asked == [[0, 1], []], "with nothing mapped there is nothing to ask"


def test_arrays_over_an_extent_keep_it_whatever_becomes_of_its_mapping(mapping, extents):
    use = mapping.use()
    (view,) = use.views(at(3), SIZE)
    address = view.__array_interface__["data"][0]
    use.end()
    mapping.close()

    assert view[0] == 3
    assert not view.flags.writeable
    del view
    assert not is_mapped(address)


def test_nothing_is_kept_open_and_nothing_is_mapped_twice(mapping, extents):
    before = descriptors()
    for _ in range(3):
        use = mapping.use()
        use.locate(at(0, 1, 0), SIZE, write=False)
        use.views(at(1), SIZE)
        use.end()

    assert descriptors() == before
    assert extents.asked == [[0, 1]]


@pytest.mark.parametrize("offset", [EXTENT - SIZE + 1, EXTENT, 1 << 60])
def test_a_slot_that_is_not_within_its_extent_is_refused(mapping, offset):
    for call in (
        lambda use: use.locate(at(0, offset=offset), SIZE, write=True),
        lambda use: use.views(at(0, offset=offset), SIZE),
    ):
        with pytest.raises(ProtocolError, match="within"):
            call(mapping.use())


def test_what_could_not_be_mapped_leaves_no_use_and_no_descriptor(mapping, extents, monkeypatch):
    before = descriptors()
    use = mapping.use()

    def refuse(self: Region, descriptor: int, *, write: bool) -> None:
        raise TierUnavailable("no room")

    with monkeypatch.context() as patched:
        patched.setattr(Region, "__init__", refuse)
        with pytest.raises(TierUnavailable):
            use.locate(at(0), SIZE, write=False)
    extents.gone.add(2)
    with pytest.raises(ProtocolError):
        use.locate(at(1, 2), SIZE, write=False)

    assert use.extents == set()
    assert descriptors() == before
    assert first_byte(int(use.locate(at(1), SIZE, write=False)[0])) == 1


def test_reading_touches_no_memory_and_writing_only_what_lies_around_the_slot(mapping, extents):
    before = extents.allocated(0)
    use = mapping.use()

    use.locate(at(0), SIZE, write=False)
    assert extents.allocated(0) == before
    use.locate(at(0, offset=EXTENT - SIZE), SIZE, write=True)

    assert 0 < extents.allocated(0) - before <= EXTENT // 2


def test_each_part_is_touched_once(mapping, extents, monkeypatch):
    touched: list[int] = []
    monkeypatch.setattr(mover, "populate", lambda address, size, write: touched.append(size))
    use = mapping.use()
    for _ in range(2):
        use.locate(at(0, 0), SIZE, write=True)
        use.locate(at(0, offset=EXTENT // 2 - SIZE // 2), SIZE, write=True)

    assert touched == [EXTENT // 2, EXTENT // 2]


def test_memory_that_was_given_back_stays_so(mapping, extents):
    use = mapping.use()
    use.locate(at(0), SIZE, write=True)
    use.locate(at(0), SIZE, write=False)
    use.end()
    with mmap.mmap(extents.descriptors[0], EXTENT) as memory:
        memory.madvise(mmap.MADV_REMOVE)
    assert extents.allocated(0) == 0
    extents.gone.add(0)

    mapping.use().locate(at(1), SIZE, write=True)
    mapping.ask()
    mapping.sweep()

    assert extents.allocated(0) == 0


def test_a_forked_child_unmaps_nothing_and_waits_for_nobody(mapping, extents):
    use = mapping.use()
    address = int(use.locate(at(0), SIZE, write=False)[0])
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with mapping._lock:
            held.set()
            done.wait(10.0)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10.0)
    child = os.fork()
    if not child:
        try:
            signal.alarm(20)
            libc = ctypes.CDLL(None)
            libc.mmap.restype = ctypes.c_void_p
            libc.mmap.argtypes = [
                ctypes.c_void_p,
                ctypes.c_size_t,
                *[ctypes.c_int] * 3,
                ctypes.c_long,
            ]
            fixed, anonymous = 0x10, 0x20
            new = libc.mmap(address, SIZE, 3, mmap.MAP_PRIVATE | anonymous | fixed, -1, 0)
            assert new == address, "the extent was not mapped here, so something else can be"
            ctypes.c_ubyte.from_address(address).value = 7
            mapping.forked()
            use.end()
            mapping.retire([0])
            mapping.close()
            os._exit(0 if first_byte(address) == 7 else 3)
        finally:
            os._exit(2)
    done.set()
    holder.join()

    assert os.waitpid(child, 0)[1] == 0
    assert first_byte(address) == 0
    assert forks.generation() == 0


class Mappings(RuleBasedStateMachine):
    """Moves that use extents, and extents that go, in any order."""

    @initialize()
    def begin(self) -> None:
        self.extents = Extents()
        self.numbers = 0
        self.mapping = Mapping(b"boot", self.extents.fetch)
        self.uses: list[tuple[Use, dict[int, set[int]]]] = []
        self.known: set[int] = set()
        self.new_extent()

    @rule()
    def new_extent(self) -> None:
        if self.numbers < 20:
            self.extents.add(self.numbers)
            self.numbers += 1

    @rule()
    def a_move_begins(self) -> None:
        self.uses.append((self.mapping.use(), {}))

    @precondition(lambda self: self.uses)
    @rule(data=st.data(), write=st.booleans(), view=st.booleans())
    def it_locates(self, data: st.DataObject, write: bool, view: bool) -> None:
        use, found = data.draw(st.sampled_from(self.uses))
        live = sorted(set(range(self.numbers)) - self.extents.gone)
        if not live:
            return
        numbers = data.draw(st.lists(st.sampled_from(live), min_size=1, max_size=3))
        if view:
            places = [
                array.__array_interface__["data"][0] for array in use.views(at(*numbers), SIZE)
            ]
        else:
            places = use.locate(at(*numbers), SIZE, write=write).tolist()
        for number, place in zip(numbers, places, strict=True):
            found.setdefault(number, set()).add(place)
        self.known |= set(numbers)

    @precondition(lambda self: self.uses)
    @rule(data=st.data())
    def a_move_ends(self, data: st.DataObject) -> None:
        use, _ = self.uses.pop(data.draw(st.integers(0, len(self.uses) - 1)))
        use.end()

    @rule(data=st.data())
    def an_extent_is_gone(self, data: st.DataObject) -> None:
        """While nobody uses it, as the node has it; or by force."""
        self.extents.gone.add(data.draw(st.integers(0, self.numbers - 1)))

    @rule()
    def it_asks_and_tidies(self) -> None:
        self.mapping.ask()
        self.mapping.sweep()
        used = {number for _, found in self.uses for number in found}
        self.known -= self.extents.gone - used
        regions = self.mapping._read.keys() | self.mapping._write.keys()
        assert regions == self.known, "what is gone and not used is not mapped"
        assert not self.mapping._dropped
        assert self.mapping._gone == self.known & self.extents.gone
        assert set(self.mapping.known()) == self.known - self.extents.gone

    @invariant()
    def what_is_used_can_be_read(self) -> None:
        for _, found in self.uses:
            for number, places in found.items():
                assert all(first_byte(place) == number for place in places)

    def teardown(self) -> None:
        for use, _ in self.uses:
            use.end()
        self.mapping.close()
        assert mapped_bytes(self.mapping) == 0
        self.extents.close()


def test_what_is_used_stays_and_what_is_gone_goes():
    run_state_machine_as_test(Mappings)


@pytest.mark.soak("link", minutes=2)
def test_what_is_used_stays_in_many_histories():
    run_state_machine_as_test(Mappings)


def test_views_are_what_lies_there(mapping, extents):
    os.pwrite(extents.descriptors[1], b"abc", SIZE)

    (view,) = mapping.use().views(at(1, offset=SIZE), SIZE)

    assert bytes(view[:3]) == b"abc"
    assert view.dtype == np.uint8
    assert view.shape == (SIZE,)
