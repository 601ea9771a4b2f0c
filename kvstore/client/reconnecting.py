"""The state of a client's connections, and of the moves that began on them. Pure.

A client has one connection at a time, and numbers them. A **move** is any use of the node's memory,
including a view. It belongs to the connection on which it began, and to the memory (of one boot of
the node) that was mapped then.

::

    AWAY ──dial, adopt──► CONNECTED          begin: only here, and not when closing
      ▲                       │
      └────────lose───────────┘

    closing: no move begins; when none is in progress and the node knows it, or is gone: CLOSED.

Three decisions are made here, each at one moment and with numbers, so that later changes do not
make it wrong:

* **settled**: no move of a connection before number n is in progress, and none will begin, because
  moves begin on the current connection only. It is sent again on every connection, because the
  previous connection may have broken before the node read it.
* **retired**: memory of an earlier boot is unmapped when the last move in it has ended.
* **hang up**: a closing client disconnects when its last move has ended.
"""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True, eq=False)
class StoreMove:
    """One move in progress.

    Attributes:
        connection: number of the connection on which it began.
        memory: number of the memory that it uses.
    """

    connection: int
    memory: int


class Effects(NamedTuple):
    """Actions of the link after a change.

    Attributes:
        settle: send on the current connection that all before this number is settled; 0 = nothing.
        unmap: memories that no move uses or will use.
        hang_up: close the current connection after sending posted messages, and call
            :meth:`Reconnecting.hung_up`.
    """

    settle: int = 0
    unmap: tuple[int, ...] = ()
    hang_up: bool = False


class Reconnecting:
    """The connections and moves of one link.

    Attributes:
        connection: number of the latest adopted connection; 0 before the first.
        connected: whether that connection still works.
        memory: number of the memory of the node's current boot; 0 = none.
        closing: no more moves may begin.
        closed: no move is in progress, and no connection will be adopted.
    """

    def __init__(self) -> None:
        self.connection = 0
        self.connected = False
        self.memory = 0
        self.closing = False
        self.closed = False
        self._boot = b""
        self._dialled = 0
        self._memories = 0
        #: The first connection that broke while the node may have held something for it; 0 = none.
        self._first_lost = 0
        #: The number up to which ``settle`` was sent on the current connection.
        self._settle_sent = 0
        self._moves: set[StoreMove] = set()
        #: Memories of earlier boots that moves still use.
        self._retired: set[int] = set()

    # ---- connections ------------------------------------------------------------------------

    def dial(self) -> int:
        """Number for a new connection."""
        assert not self.connected
        self._dialled += 1
        return self._dialled

    def adopt(self, number: int, boot: bytes) -> Effects | None:
        """Adopt connection ``number`` to a node of this boot; None = close it, it is not needed."""
        if self.closed or self.connected or number != self._dialled:
            return None
        self.connection, self.connected, self._settle_sent = number, True, 0
        unmap: tuple[int, ...] = ()
        if not self.memory or boot != self._boot:
            unmap = self._retire()
            if not self.closing:
                self._boot = boot
                self._memories += 1
                self.memory = self._memories
        return self._after(unmap)

    def lose(self, number: int) -> bool:
        """Connection ``number`` is broken; returns False if it is not the current one."""
        if not self.connected or number != self.connection:
            return False
        self.connected = False
        self._first_lost = self._first_lost or number
        return True

    def gone(self) -> Effects:
        """Nothing listens at the socket, so the boot that owned the current memory has ended."""
        if self.connected:
            return Effects()
        if self.closing and not self._moves:
            self.closed = True  # no node to settle anything with
        return Effects(unmap=self._retire())

    # ---- moves ------------------------------------------------------------------------------

    def begin(self) -> StoreMove | None:
        """Start a move; None if not allowed now."""
        if not self.connected or self.closing:
            return None
        move = StoreMove(self.connection, self.memory)
        self._moves.add(move)
        return move

    def end(self, move: StoreMove) -> Effects:
        """End a move, which uses no memory any more; one from before a fork is ignored."""
        if move not in self._moves:
            return Effects()
        self._moves.remove(move)
        if move.memory not in self._retired or any(
            other.memory == move.memory for other in self._moves
        ):
            return self._after()
        self._retired.remove(move.memory)
        return self._after((move.memory,))

    def unfinished(self) -> dict[int, int]:
        """Number of moves in progress, by the number of their connection."""
        return dict(Counter(move.connection for move in self._moves))

    # ---- ends -------------------------------------------------------------------------------

    def close(self) -> Effects:
        """Allow no more moves; closed when those in progress have ended."""
        if self.closing:
            return Effects()
        self.closing = True
        if not self._first_lost and not self.connected and not self._moves:
            self.closed = True
        return self._after(self._retire())

    def hung_up(self, number: int, *, said: bool) -> None:
        """Connection ``number`` was closed; ``said``: all messages to the node were sent."""
        self.lose(number)
        self.closed = self.closed or said
        self.connected = self.connected and not self.closed

    def give_up(self) -> Effects:
        """Closing took too long: the node will learn the rest from the end of this process."""
        assert self.closing
        self.closed = True
        self.connected = False
        return Effects(unmap=self._retire())

    def fork(self) -> None:
        """In a forked child: forget the parent's connections and moves."""
        self._dialled += 1
        self.connection = self._dialled
        self.connected = False
        self.closed = self.closing
        self.memory, self._boot = 0, b""
        self._first_lost = self._settle_sent = 0
        self._moves, self._retired = set(), set()

    def check(self) -> None:
        """Assert the invariants."""
        assert self._settle_sent <= self.connection <= self._dialled
        assert all(move.connection <= self.connection for move in self._moves)
        assert not self.closed or not self.connected
        used = {move.memory for move in self._moves}
        assert used - {self.memory} == self._retired
        if self.connected and self._settle_sent:
            assert all(move.connection >= self._settle_sent for move in self._moves)

    # ---- internal ---------------------------------------------------------------------------

    def _retire(self) -> tuple[int, ...]:
        """Retire the current memory; returns the memories that can be unmapped now."""
        old, self.memory = self.memory, 0
        if not old:
            return ()
        if any(move.memory == old for move in self._moves):
            self._retired.add(old)
            return ()
        return (old,)

    def _after(self, unmap: tuple[int, ...] = ()) -> Effects:
        """The effects of a change: ``unmap``, ``settle`` and ``hang_up``."""
        if not self.connected or not (self._first_lost or self.closing):  # nearly always
            return Effects(unmap=unmap)
        settled = min((move.connection for move in self._moves), default=self.connection)
        is_new = settled > max(self._settle_sent, self._first_lost)
        settle = settled if self._first_lost and is_new else 0
        self._settle_sent = settle or self._settle_sent
        return Effects(settle, unmap, self.closing and not self._moves)
