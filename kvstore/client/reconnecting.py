"""What a client knows of its connections, and of the moves that began on them. Pure.

A client has one connection at a time and numbers them. A **move** is anything that touches the
node's memory, a view included; it belongs to the connection it began on, and to the memory (of one
boot of the node) that was mapped then.

::

    AWAY ──dial, adopt──► CONNECTED          begin: only here, and not when closing
      ▲                       │
      └────────lose───────────┘

    closing: no move begins; once none goes on and the node knows it, or is gone, all is CLOSED.

Three things are decided here, each at one moment and by number, so that nothing that happens
between the decision and what it leads to makes it wrong:

* **settled**: no move of a connection before number n goes on, and none will ever begin, because
  moves begin on the present connection only. Said again on every connection, as the one it was
  said on may have broken before the node read it.
* **retired**: memory of an earlier boot is unmapped when the last move in it has ended.
* **hang up**: a client that is closing ends its connection when its last move has ended.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class StoreMove:
    """One move under way.

    Attributes:
        connection: number of the connection it began on.
        memory: number of the memory it touches.
    """

    connection: int
    memory: int


class Effects(NamedTuple):
    """What the link must do after a change.

    Attributes:
        settle: say on the present connection that all before this number is settled; 0 = nothing.
        unmap: memories that no move touches and none will.
        hang_up: end the present connection, once what waits to be said is said, and tell
            :meth:`Reconnecting.hung_up`.
    """

    settle: int = 0
    unmap: tuple[int, ...] = ()
    hang_up: bool = False


class Reconnecting:
    """The connections and moves of one link.

    Attributes:
        connection: number of the latest connection that was adopted; 0 before the first.
        connected: whether that one still stands.
        memory: number of the memory of the node's present boot; 0 while there is none.
        closing: no move may begin any more.
        closed: nothing goes on, and no connection will be adopted.
    """

    def __init__(self) -> None:
        """Be away, with no memory."""
        self.connection = 0
        self.connected = False
        self.memory = 0
        self.closing = False
        self.closed = False
        self._boot = b""
        self._dialled = 0
        self._memories = 0
        #: The first connection that broke while it may have held something at the node; 0 = none.
        self._first_lost = 0
        #: Up to where the present connection has settled.
        self._told = 0
        self._moves: set[StoreMove] = set()
        #: Memories that are not the present one and still touched.
        self._retired: set[int] = set()

    # ---- connections ------------------------------------------------------------------------

    def dial(self) -> int:
        """The number of the connection that is to be made now."""
        assert not self.connected
        self._dialled += 1
        return self._dialled

    def adopt(self, number: int, boot: bytes) -> Effects | None:
        """Connection ``number`` stands, to a node of this boot; None = it is wanted no more."""
        if self.closed or self.connected or number != self._dialled:
            return None
        self.connection, self.connected, self._told = number, True, 0
        unmap: tuple[int, ...] = ()
        if not self.memory or boot != self._boot:
            unmap = self._retire()
            if not self.closing:
                self._boot = boot
                self._memories += 1
                self.memory = self._memories
        return self._after(unmap)

    def lose(self, number: int) -> bool:
        """Connection ``number`` is broken; False when it was not the present one."""
        if not self.connected or number != self.connection:
            return False
        self.connected = False
        self._first_lost = self._first_lost or number
        return True

    def gone(self) -> Effects:
        """Nobody listens where the node was: its memory is that of a boot that has ended."""
        if self.connected:
            return Effects()
        if self.closing and not self._moves:
            self.closed = True  # there is nobody to settle anything with
        return Effects(unmap=self._retire())

    # ---- moves ------------------------------------------------------------------------------

    def begin(self) -> StoreMove | None:
        """A move begins now; None when it may not."""
        if not self.connected or self.closing:
            return None
        move = StoreMove(self.connection, self.memory)
        self._moves.add(move)
        return move

    def end(self, move: StoreMove) -> Effects:
        """A move has ended, its bytes are let go of; one of before a fork is nobody's."""
        if move not in self._moves:
            return Effects()
        self._moves.remove(move)
        used = any(other.memory == move.memory for other in self._moves)
        if used or move.memory not in self._retired:
            return self._after()
        self._retired.remove(move.memory)
        return self._after((move.memory,))

    def unfinished(self) -> dict[int, int]:
        """Moves that go on, by the number of their connection."""
        return dict(Counter(move.connection for move in self._moves))

    # ---- ends -------------------------------------------------------------------------------

    def close(self) -> Effects:
        """Let no move begin; all ends when those that go on have ended."""
        if self.closing:
            return Effects()
        self.closing = True
        if not self._first_lost and not self.connected and not self._moves:
            self.closed = True
        return self._after(self._retire())

    def hung_up(self, number: int, *, said: bool) -> None:
        """Connection ``number`` was ended; ``said``: the node knows all it was to be told."""
        self.lose(number)
        self.closed = self.closed or said
        self.connected = self.connected and not self.closed

    def give_up(self) -> Effects:
        """Closing has taken too long: the node must learn from this process's end what it held."""
        assert self.closing
        self.closed = True
        self.connected = False
        return Effects(unmap=self._retire())

    def fork(self) -> None:
        """In a forked child: nothing of the parent's is ours, what it opened is void."""
        self._dialled += 1
        self.connection = self._dialled
        self.connected = False
        self.closed = self.closing
        self.memory, self._boot = 0, b""
        self._first_lost = self._told = 0
        self._moves, self._retired = set(), set()

    def check(self) -> None:
        """Assert what must always hold."""
        assert self._told <= self.connection <= self._dialled
        assert all(move.connection <= self.connection for move in self._moves)
        assert not self.closed or not self.connected
        used = {move.memory for move in self._moves}
        assert used - {self.memory} == self._retired
        if self.connected and self._told:
            assert all(move.connection >= self._told for move in self._moves)

    # ---- inside -----------------------------------------------------------------------------

    def _retire(self) -> tuple[int, ...]:
        """The present memory is no more; what of it may be unmapped now."""
        old, self.memory = self.memory, 0
        if not old:
            return ()
        if any(move.memory == old for move in self._moves):
            self._retired.add(old)
            return ()
        return (old,)

    def _after(self, unmap: tuple[int, ...] = ()) -> Effects:
        """What is to be said now, beside what is to be unmapped."""
        if not self.connected:
            return Effects(unmap=unmap)
        settled = min((move.connection for move in self._moves), default=self.connection)
        settle = settled if self._first_lost and settled > max(self._told, self._first_lost) else 0
        self._told = settle or self._told
        return Effects(settle, unmap, self.closing and not self._moves)
