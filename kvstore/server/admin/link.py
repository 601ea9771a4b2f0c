"""The admin process's end of the channel: requests to the node, and its log."""

import asyncio
import logging
from itertools import count
from typing import Final, TypeVar

import msgspec

from kvstore.protocol.wire import FRAME_BYTES_MAX
from kvstore.server.channel import (
    Abandon,
    Alive,
    Answered,
    Ask,
    Begin,
    Caller,
    Channel,
    FromAdmin,
    FromNode,
    Refused,
    Said,
)
from kvstore.server.operations import Operation
from kvstore.server.refusal import Refusal

T = TypeVar("T")

ANSWER_S: Final = 30.0
"""Timeout of an operation; listings are slow if many are requested at a time."""
NOBODY: Final = Caller()
_ENCODER: Final = msgspec.msgpack.Encoder()


class AdminLink:
    """Sends operations to the node; create it on a running loop.

    Attributes:
        begun: the node's first message.
        lost: the node has ended.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[Begin] = loop.create_future()
        self.lost = asyncio.Event()
        self.channel = Channel(FromNode, self._received, self._end, FRAME_BYTES_MAX)
        self._numbers = count(1)
        self._waiting: dict[int, asyncio.Future[msgspec.Raw]] = {}

    async def ask(
        self, operation: Operation, kind: type[T], by: Caller = NOBODY, timeout_s: float = ANSWER_S
    ) -> T:
        """Run an operation on the node; returns its answer.

        Args:
            operation: the operation.
            kind: type of the answer.
            by: the client, for the log.
            timeout_s: maximum wait.

        Raises:
            Refusal: the node refuses, or does not answer in time (503, ``unavailable``).
        """
        if self.channel.closed:
            raise Refusal(503, "unavailable", "the node is ending")
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        arguments = msgspec.Raw(_ENCODER.encode(operation))
        self.send(Ask(number, type(operation).__name__, by, arguments))
        try:
            async with asyncio.timeout(timeout_s):
                result = await future
        except TimeoutError:
            self.send(Abandon(number))
            raise Refusal(503, "unavailable", "the node does not answer; retry later") from None
        finally:
            self._waiting.pop(number, None)
        return msgspec.msgpack.decode(result, type=kind)

    def send(self, message: FromAdmin) -> None:
        """Send a message to the node."""
        self.channel.send(message)

    async def say_alive(self, every_s: float) -> None:
        """Send :class:`Alive` messages until cancelled."""
        while True:
            self.send(Alive())
            await asyncio.sleep(every_s)

    def _received(self, message: FromNode) -> None:
        match message:
            case Begin():
                self.begun.set_result(message)
            case Answered(number, result):
                future = self._waiting.get(number)
                if future is not None and not future.done():
                    future.set_result(result)
            case Refused():
                future = self._waiting.get(message.id)
                if future is not None and not future.done():
                    refusal = Refusal(message.status, message.code, message.message, message.field)
                    future.set_exception(refusal)

    def _end(self) -> None:
        self.lost.set()
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(Refusal(503, "unavailable", "the node is ending"))


class NodeLog(logging.Handler):
    """Sends log records to the node's log.

    Args:
        link: the link to the node.
    """

    def __init__(self, link: AdminLink) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        """See :class:`logging.Handler`."""
        self._link.send(Said(record.levelno, record.name, self.format(record)))
