"""Goal: a node is told of what is over, and of that only; nothing is forgotten."""

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvstore.client.reconnecting import Effects, Reconnecting, StoreMove


class ModelNode:
    """What a node knows of one origin: its connections, and what each of them holds."""

    def __init__(self) -> None:
        self.held: dict[int, set[StoreMove]] = {}
        self.lost: set[int] = set()

    def hello(self, number: int) -> None:
        assert all(number > other for other in self.held)
        self.lost |= self.held.keys()
        self.held[number] = set()

    def settled(self, number: int, before: int) -> None:
        assert before <= number, "it would be refused"
        for other in list(self.lost):
            if other < before:
                del self.held[other]
                self.lost.discard(other)

    def disconnected(self, number: int) -> None:
        if number in self.held:
            self.lost.add(number)
            if not self.held[number]:
                del self.held[number]
                self.lost.discard(number)

    def restarted(self) -> None:
        self.held.clear()
        self.lost.clear()


class Reconnects(RuleBasedStateMachine):
    """One link and its node; what is said may be read late, or never when the connection breaks."""

    @initialize()
    def begin(self) -> None:
        self.link = Reconnecting()
        self.node = ModelNode()
        self.boot = 1
        self.moves: list[StoreMove] = []
        self.said: list[int] = []
        self.unmapped: set[int] = set()
        #: Of which boot each memory is.
        self.memories: dict[int, int] = {}
        self.hanging = False

    # ---- what happens

    @precondition(lambda self: not self.link.connected and not self.link.closed)
    @rule()
    def connects(self) -> None:
        number = self.link.dial()
        self.node.hello(number)
        effects = self.link.adopt(number, str(self.boot).encode())
        assert effects is not None
        if self.link.memory:
            assert self.memories.setdefault(self.link.memory, self.boot) == self.boot
        self.apply(effects)

    @precondition(lambda self: not self.link.connected and not self.link.closed)
    @rule(heard=st.booleans())
    def fails_to_connect(self, heard: bool) -> None:
        number = self.link.dial()
        if heard:
            self.node.hello(number)
            self.node.disconnected(number)

    @precondition(lambda self: self.link.connected)
    @rule(read=st.integers(0, 3))
    def breaks(self, read: int) -> None:
        """The node reads some of what was said, or none of it; it may not notice until later."""
        number = self.link.connection
        self.deliver(read)
        self.said.clear()
        assert self.link.lose(number)
        assert not self.link.lose(number)
        self.node.disconnected(number)
        self.hanging = False

    @precondition(lambda self: self.link.connected)
    @rule()
    def reads(self) -> None:
        self.deliver(len(self.said))

    @precondition(lambda self: not self.link.connected)
    @rule()
    def restarts(self) -> None:
        """The node does, so that it holds nothing; a link may have noticed that it was away."""
        self.boot += 1
        self.node.restarted()

    @precondition(lambda self: not self.link.connected and not self.link.closed)
    @rule()
    def is_gone(self) -> None:
        self.restarts()
        self.apply(self.link.gone())

    @rule()
    def a_move_begins(self) -> None:
        move = self.link.begin()
        assert (move is None) == (not self.link.connected or self.link.closing)
        if move is not None:
            assert move.memory not in self.unmapped
            self.moves.append(move)
            self.node.held[move.connection].add(move)

    @precondition(lambda self: self.moves)
    @rule(data=st.data())
    def a_move_ends(self, data: st.DataObject) -> None:
        move = self.moves.pop(data.draw(st.integers(0, len(self.moves) - 1)))
        if self.link.connected and move.connection == self.link.connection:
            self.node.held[move.connection].discard(move)  # its Release goes first
        self.apply(self.link.end(move))
        assert self.link.end(move) == Effects(), "it has ended already"

    @rule()
    def closes(self) -> None:
        self.apply(self.link.close())
        assert self.link.closing

    @precondition(lambda self: self.hanging)
    @rule()
    def hangs_up(self) -> None:
        number = self.link.connection
        self.deliver(len(self.said))
        self.node.disconnected(number)
        self.link.hung_up(number, said=True)
        self.hanging = False
        assert self.link.closed
        assert not self.node.held, "a link that has closed leaves nothing behind"

    # ---- what must hold

    @invariant()
    def nothing_is_freed_while_it_moves(self) -> None:
        for move in self.moves:
            if move.memory == self.link.memory and move.connection in self.node.held:
                assert move in self.node.held[move.connection]
            assert move.memory not in self.unmapped
        if not self.link.closed:
            same_boot = [move for move in self.moves if move.memory == self.link.memory]
            assert all(move.connection in self.node.held for move in same_boot if self.is_same())

    def is_same(self) -> bool:
        """Whether the node is still that of the link's memory: a restart forgets all."""
        return self.link._boot == str(self.boot).encode()

    @invariant()
    def memory_stays_as_long_as_it_is_used(self) -> None:
        used = {move.memory for move in self.moves} | {self.link.memory}
        assert self.unmapped == self.memories.keys() - used

    @invariant()
    def nothing_is_left_when_all_is_quiet(self) -> None:
        if self.link.connected and not self.moves and not self.said:
            assert not self.node.lost

    @invariant()
    def it_is_consistent(self) -> None:
        self.link.check()

    # ---- the network

    def apply(self, effects: Effects) -> None:
        for memory in effects.unmap:
            assert memory not in self.unmapped
            self.unmapped.add(memory)
        if effects.settle:
            self.said.append(effects.settle)
        self.hanging = self.hanging or effects.hang_up

    def deliver(self, count: int) -> None:
        for before in self.said[:count]:
            self.node.settled(self.link.connection, before)
        del self.said[:count]


def test_what_is_settled_was_over_and_what_is_over_is_settled():
    run_state_machine_as_test(Reconnects)


@pytest.mark.soak("link", minutes=1)
def test_what_is_settled_was_over_in_many_histories():
    run_state_machine_as_test(Reconnects)


def connected(boot: bytes = b"boot") -> Reconnecting:
    link = Reconnecting()
    assert link.adopt(link.dial(), boot) == Effects()
    return link


def again(link: Reconnecting, boot: bytes = b"boot") -> Effects:
    link.lose(link.connection)
    effects = link.adopt(link.dial(), boot)
    assert effects is not None
    return effects


def test_a_first_connection_has_nothing_to_settle_and_a_second_says_so_at_once():
    link = connected()

    assert again(link).settle == 2


def test_what_moved_on_the_second_connection_is_not_settled_by_the_end_of_the_first_ones():
    link = connected()
    first = link.begin()
    assert again(link).settle == 0
    second = link.begin()
    assert first is not None
    assert second is not None

    assert again(link).settle == 0, "the first one moves"
    assert link.end(first).settle == 2, "only what came before the second connection"
    assert link.end(second).settle == 3


def test_what_is_settled_is_said_again_on_a_later_connection():
    link = connected()
    assert again(link).settle == 2
    assert again(link).settle == 3, "the node may not have read it"


def test_what_a_lost_connection_had_settled_is_said_again_though_no_move_ended_since():
    link = connected()
    again(link)
    assert link.begin() is not None
    assert again(link).settle == 2

    assert again(link).settle == 2


def test_what_is_settled_is_said_once_a_connection():
    link = connected()
    assert again(link).settle == 2
    move = link.begin()
    assert move is not None

    assert link.end(move).settle == 0


def test_a_connection_that_comes_too_late_is_not_wanted():
    link = connected()
    link.lose(1)
    late = link.dial()
    newer = link.dial()

    assert link.adopt(late, b"boot") is None
    assert link.adopt(newer, b"boot") is not None
    assert link.connection == 3


def test_closing_waits_for_the_last_move_and_takes_no_other():
    link = connected()
    move = link.begin()
    assert move is not None

    assert link.close() == Effects()
    assert link.begin() is None
    assert not link.closed
    assert link.end(move) == Effects(unmap=(1,), hang_up=True)
    link.hung_up(1, said=True)
    assert link.closed


def test_a_link_that_closes_while_it_is_away_comes_back_to_say_what_is_over():
    link = connected()
    link.lose(1)
    assert link.close() == Effects(unmap=(1,))
    assert not link.closed

    assert link.adopt(link.dial(), b"boot") == Effects(settle=2, hang_up=True)


def test_a_link_whose_last_words_were_not_read_comes_back():
    link = connected()
    assert link.close().hang_up
    link.hung_up(1, said=False)
    assert not link.closed

    assert link.adopt(link.dial(), b"boot") == Effects(settle=2, hang_up=True)


def test_a_link_that_closes_while_nobody_listens_has_nobody_to_tell():
    link = connected()
    link.lose(1)
    link.close()

    link.gone()

    assert link.closed
    assert link.adopt(link.dial(), b"boot") is None


def test_a_forked_child_owes_nothing_for_its_parent_and_begins_anew():
    link = connected()
    move = link.begin()
    assert move is not None
    opened_on = link.connection

    link.fork()

    assert link.end(move) == Effects()
    assert link.connection > opened_on, "what the parent opened is void"
    assert link.begin() is None
    assert link.adopt(link.dial(), b"boot") == Effects()
    assert link.unfinished() == {}
    link.check()
