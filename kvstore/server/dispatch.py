"""Runs the operations of the admin process: each is work in turns, its answer a frame.

A refused operation has changed nothing. An internal failure stops the node (through the loop's
handler), because a state that failed an assertion must not be used.
"""

import logging
from collections.abc import Callable
from typing import Any, Final

import msgspec

from kvstore.node.node import Node
from kvstore.process.logs import audit
from kvstore.server import operations
from kvstore.server.channel import ASKS_MAX, Abandon, Answered, Ask, Caller, Refused
from kvstore.server.inspect import Inspection
from kvstore.server.operate import OperatorRequests
from kvstore.server.refusal import Refusal
from kvstore.server.status import NodeStatus
from kvstore.server.turns import Task, Turns, Work
from kvstore.tier.host import HostMemory

log = logging.getLogger(__name__)

_ENCODER: Final = msgspec.msgpack.Encoder()


class Dispatcher:
    """All operations of one node.

    Args:
        node: the node.
        memory: the bytes of the host tier.
        status: the node's status.
        turns: runs the operations.
        send: sends an answer to the admin process.
    """

    def __init__(
        self, node: Node, memory: HostMemory, status: NodeStatus, turns: Turns,
        send: Callable[[Answered | Refused], None],
    ) -> None:  # fmt: skip
        self._turns = turns
        self._send = send
        self._tasks: dict[int, Task] = {}
        inspection = Inspection(node, status)
        self._operation = OperatorRequests(node.pages, memory, status, turns)
        self._handlers: dict[str, tuple[type[operations.Operation], Any]] = {}
        for kind, handler in inspection.handlers.items():
            self._handlers[kind.__name__] = (kind, handler)
        for kind, change in self._operation.handlers.items():
            self._handlers[kind.__name__] = (kind, change)
        self._changes = set(self._operation.handlers)

    def close(self) -> None:
        """Release everything; the turns have ended."""
        self._operation.close()

    def forget(self) -> None:
        """The admin process has ended: cancel its operations; jobs continue."""
        for task in self._tasks.values():
            self._turns.abandon(task)
        self._tasks.clear()

    def abandon(self, message: Abandon) -> None:
        """Cancel an operation whose client does not wait any more."""
        task = self._tasks.pop(message.id, None)
        if task is not None:
            self._turns.abandon(task)

    def ask(self, message: Ask) -> None:
        """Start an operation."""
        number = message.id
        if message.operation == operations.PingNode.__name__:
            self._send(Answered(number, msgspec.Raw(_ENCODER.encode({"status": "ok"}))))
            return
        if len(self._tasks) >= ASKS_MAX or number in self._tasks:
            self._refuse(number, Refusal(503, "busy", "too many requests at a time; try again"))
            return
        if message.operation not in self._handlers:
            refusal = Refusal(400, "invalid_argument", f"{message.operation[:80]!r} is unknown")
            self._refuse(number, refusal)
            return
        kind, handler = self._handlers[message.operation]
        try:
            asked = msgspec.msgpack.decode(message.arguments, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._refuse(number, Refusal(400, "invalid_argument", str(error)))
            return
        work: Work[Any] = handler(asked, message.by) if kind in self._changes else handler(asked)
        ended: list[Any] = []

        def end(result: Any) -> None:
            ended.append(result)
            self._tasks.pop(number, None)
            self._answer(number, asked, message.by, result)

        task = self._turns.start(work, end, message.operation)
        if not ended:
            self._tasks[number] = task

    def _answer(self, number: int, asked: operations.Operation, by: Caller, result: Any) -> None:
        if isinstance(asked, operations.Change | operations.ShowTokens):
            _log_operation(asked, by, result)
        if isinstance(result, Refusal):
            self._refuse(number, result)
            return
        try:
            encoded = _ENCODER.encode(result)
        except (TypeError, ValueError, OverflowError):  # for example a name that is not UTF-8
            log.exception("%s cannot be answered", type(asked).__name__)
            self._refuse(number, Refusal(500, "internal", "see the node's log"))
            return
        self._send(Answered(number, msgspec.Raw(encoded)))

    def _refuse(self, number: int, refusal: Refusal) -> None:
        self._send(Refused(number, refusal.status, refusal.code, str(refusal), refusal.field))


def _log_operation(asked: operations.Operation, by: Caller, result: Any) -> None:
    """Log who changed what, or saw whose prompt, and the result."""
    fields: dict[str, object] = {"operation": type(asked).__name__}
    fields |= {"role": by.role, "address": by.address}
    for name in asked.__struct_fields__:
        value = getattr(asked, name)
        if value is not None:
            fields[name] = len(value) if isinstance(value, list) else value
    if isinstance(result, Refusal):
        audit(log, "operation refused", **fields, code=result.code, why=str(result))
        return
    shown = ((name, getattr(result, name, None)) for name in ("job", "pin", "pages", "previous"))
    audit(log, "operation done", **(fields | {k: v for k, v in shown if v is not None}))
