"""An operator of a node that is alone: asks as the admin process does, over no socket.

Operations are carried out by the daemon's own code, in turns on a loop; each turn is watched.
"""

from itertools import count
from time import monotonic
from typing import Any, Final

import msgspec

from bench.node_alone import LoneNode
from bench.node_watch import Watch, WatchedLoop
from kvstore.config import EventsConfig, SocketConfig
from kvstore.protocol.counts import AdminCounts
from kvstore.protocol.errors import CapacityError
from kvstore.server import operations
from kvstore.server.channel import Answered, Ask, Caller, Refused
from kvstore.server.dispatch import Dispatcher
from kvstore.server.publish import Publication
from kvstore.server.status import DaemonSources, NodeStatus
from kvstore.server.turns import Turns
from kvstore.tier.host import HostMemory

TICK_S: Final = 0.02
"""As long as the daemon's."""
WAIT_S: Final = 3600.0
"""A job of all pages, on a machine that does other work."""
_BY: Final = Caller("operate", "bench")


class Busy(RuntimeError):
    """An operation finds no room now; it may later."""


class Operator:
    """Asks a node, and waits for what it answers.

    Args:
        lone: the node; it ticks meanwhile.
        watch: takes the turns.
    """

    def __init__(self, lone: LoneNode, watch: Watch) -> None:
        self._lone = lone
        self._numbers = count(1)
        self._loop = WatchedLoop(watch)
        self._turns = Turns(lone.desk)
        #: No bytes are moved.
        self._memory = HostMemory("alone", bytes(16), 1 << 20, prefault=False)
        policy = lone.desk.node.pages.eviction.policy
        silent = Publication(EventsConfig(endpoint=""), SocketConfig(), "n", bytes(16))
        status = NodeStatus(lone.desk, self._memory, policy, monotonic(), silent)
        status.sources = DaemonSources(
            lambda: 0, lambda: 0, lambda: AdminCounts(pid=0, restarts=0), lambda: 0.0
        )
        node = lone.desk.node
        self._dispatcher = Dispatcher(node, self._memory, status, self._turns, self._take)
        self._answers: dict[int, Answered | Refused] = {}

    def close(self) -> None:
        """End what is left, and the loop."""
        self._turns.close()
        self._dispatcher.close()
        self._memory.close()
        self._loop.close()

    def ask(self, operation: operations.Operation, turns: str = "") -> Any:
        """What an operation gives, as plain values.

        Args:
            operation: is asked.
            turns: what the turns are called meanwhile, if not after the operation.

        Raises:
            Busy: there is no room for it now.
            AssertionError: it is refused for another reason.
        """
        name, number = type(operation).__name__, next(self._numbers)
        arguments = msgspec.Raw(msgspec.msgpack.encode(operation))
        self._loop.name = turns or name
        self._loop.call_soon(self._dispatcher.ask, Ask(number, name, _BY, arguments))
        deadline = self._loop.time() + WAIT_S
        while number not in self._answers:
            assert self._loop.time() < deadline, f"{name} does not end"
            self._run()
        answer = self._answers.pop(number)
        if isinstance(answer, Refused) and answer.code == CapacityError.code:
            raise Busy(answer.message)
        assert isinstance(answer, Answered), f"{name}: {answer}"
        return msgspec.msgpack.decode(answer.result)

    def job(self, operation: operations.Change) -> dict[str, Any]:
        """Start a job and wait for its end; the job."""
        name, number = type(operation).__name__, self.ask(operation)["job"]
        deadline = self._loop.time() + WAIT_S
        while (shown := self.ask(operations.ShowJob(job=number), name))["state"] == "running":
            assert self._loop.time() < deadline, f"{name} does not end"
            self._run()
        assert shown["state"] == "done", shown
        found: dict[str, Any] = shown
        return found

    def _run(self) -> None:
        """Run the loop for a tick, or until an answer has come."""
        end = self._loop.call_later(TICK_S, self._loop.stop)
        self._loop.run_forever()
        end.cancel()
        self._lone.tick()

    def _take(self, answer: Answered | Refused) -> None:
        self._answers[answer.id] = answer
        self._loop.stop()
