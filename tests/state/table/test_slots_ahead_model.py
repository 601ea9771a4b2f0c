"""Goal: slots that are reserved ahead agree with a plain model, whatever else goes on.

The model knows who may write to which slot. No slot is another's meanwhile, and none is left.
"""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.protocol.page import PrefixKey
from kvstore.state.table import ahead
from kvstore.state.table.ahead import PageAhead
from kvstore.state.table.invariants import check
from kvstore.state.tree.actions import PageStatus, Removed, Stored
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Process
from kvstore.state.tree.slots import Slot, SlotState
from tests.state.world import DIGEST, FULL, FULL_2, WINDOW, World, hold, key

PATHS = st.text("ab", min_size=1, max_size=4)
WHO = st.integers(0, 2)
SHARD = st.integers(0, 2)
SHARE = 4


class SlotsAheadModel(RuleBasedStateMachine):
    """Three clients of two tenants put pages, with one request or two, and come and go."""

    @initialize(slots_each=st.integers(3, 6))
    def begin(self, slots_each: int) -> None:
        ahead.AHEAD_SHARE, self._share = SHARE, ahead.AHEAD_SHARE
        self.world = World(extents=2, slots_each=slots_each, quota=1 << 30)
        self.table = self.world.table
        self.clients: list[tuple[Process, PrefixTree]] = []
        for name in ("red", "red", "blue"):
            self._join(name)
        #: Client and number → its slot.
        self.reserved: dict[tuple[Process, int], Slot] = {}
        self.limbo: dict[Process, set[Slot]] = {}
        self.ready: set[tuple[int, PrefixKey, int]] = set()
        self.names = 1 << 20

    def _join(self, name: str) -> None:
        process = self.world.process(name, pid=len(self.clients))
        space = self.world.space(process, [FULL, FULL_2, WINDOW], tenant=name)
        self.clients.append((process, space))

    def _follow(self) -> None:
        for action in self.table.actions:
            if isinstance(action, Stored):
                self.ready |= {(action.space.number, one, action.shard) for one in action.keys}
            elif isinstance(action, Removed):
                self.ready -= {(action.space.number, one, action.shard) for one in action.keys}
        self.table.actions.clear()

    def _name(self) -> int:
        self.names += 1
        return self.names

    def _own(self, process: Process) -> list[int]:
        return [number for who, number in self.reserved if who is process]

    @rule(who=WHO, shard=SHARD)
    def reserve(self, who: int, shard: int) -> None:
        process, space = self.clients[who]
        number, before = self._name(), self.table.ahead.slots
        put = self.table.ahead.reserve(process, number, space, shard)
        self._follow()
        if put is None:
            assert self.table.ahead.slots == before
            return
        [slot] = put.slots
        others = {*self.reserved.values()}.union(*self.limbo.values())
        assert slot not in others, "somebody may write there"
        self.reserved[process, number] = slot

    @rule(who=WHO, at=st.integers(0, 9), path=PATHS, ttl=st.booleans(), follows=st.booleans())
    def store_ahead(self, who: int, at: int, path: str, *, ttl: bool, follows: bool) -> None:
        process, space = self.clients[who]
        if not (own := self._own(process)):
            return
        number = own[at % len(own)]
        shard, slot = process.puts[number].shard, self.reserved[process, number]
        page = space.number, key(path), shard
        there = page in self.ready
        status = self.table.ahead.store(
            process, number, PageAhead(space, shard, key(path), key(path[:-1]))
        )
        self._follow()
        if status is None:
            assert not there
            [status] = self.table.commit_put(process, number, DIGEST)
            self._follow()
            assert status is PageStatus.STORED
            assert page in self.ready
            assert space.nodes[key(path)].slot(shard) == slot, "its bytes are there"
            del self.reserved[process, number]
        else:
            assert (status is PageStatus.EXISTS) == (page in self.ready)
        if follows:
            following = self._name()
            put = self.table.ahead.go_on(process, number, following, space, shard)
            self._follow()
            self.reserved.pop((process, number), None)
            if put is not None:
                assert status is PageStatus.STORED or put.slots == [slot]
                self.reserved[process, following] = put.slots[0]

    @rule(who=WHO, path=PATHS, shard=SHARD, start=st.integers(0, 3))
    def store(self, who: int, path: str, shard: int, start: int) -> None:
        process, space = self.clients[who]
        start = min(start, len(path) - 1)
        number, _, put = self.world.begin(process, space, path, start=start, shard=shard)
        assert not set(put.slots) & {*self.reserved.values()}, "granted what is reserved"
        if put.slots:
            self.world.commit(process, number)
        self._follow()

    @rule(who=WHO, at=st.integers(0, 9))
    def give_back(self, who: int, at: int) -> None:
        process, _ = self.clients[who]
        if own := self._own(process):
            number = own[at % len(own)]
            self.table.abort_put(process, number)
            assert number not in process.puts
            del self.reserved[process, number]

    @rule(who=WHO)
    def lose(self, who: int) -> None:
        """A connection breaks, and the client comes back with another one."""
        process, _ = self.clients[who]
        self.table.lose(process)
        self._follow()
        mine = {self.reserved.pop((process, number)) for number in self._own(process)}
        self.limbo[process] = mine
        self.clients[who] = self.clients[-1]
        del self.clients[-1]
        self._join(process.session.name)

    @rule()
    def settle(self) -> None:
        """A lost one is known to write no more."""
        if self.limbo:
            process = next(iter(self.limbo))
            del self.limbo[process]
            self.world.end(process)
            self._follow()

    @invariant()
    def reserved_slots_are_one_clients_alone(self) -> None:
        check(self.table)
        for session in self.world.sessions.values():
            hold(session.checks())
        assert self.table.ahead.slots == len(self.reserved)
        assert len({*self.reserved.values()}) == len(self.reserved)
        assert self.table.ahead.size_bytes * SHARE <= self.world.slots.capacity_bytes
        for slot in self.reserved.values():
            assert self.world.slots.state(slot) is SlotState.WRITING
            assert self.table.residents.owner(slot) is None
        for slots in self.limbo.values():
            assert all(self.world.slots.state(slot) is SlotState.LIMBO for slot in slots)

    def teardown(self) -> None:
        """When all clients have ended nothing is written to, or held."""
        if not hasattr(self, "world"):
            return
        ahead.AHEAD_SHARE = self._share
        for process in [*self.limbo, *(one for one, _ in self.clients)]:
            self.world.end(process)
        check(self.table)
        stats = self.world.slots.stats()
        assert stats.writing_bytes == stats.limbo_bytes == 0
        assert self.table.ahead.slots == self.table.ahead.size_bytes == 0


TestSlotsAhead = SlotsAheadModel.TestCase
TestSlotsAhead.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
