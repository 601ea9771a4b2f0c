"""The interface of a node for the client: through a socket, or in this process."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from kvstore.client.ahead import ReservedSlots
from kvstore.client.mapping import Use
from kvstore.protocol import wire
from kvstore.protocol.errors import KVStoreError


class NodeLink(Protocol):
    """The interface of a node for the client: through a socket, or in this process."""

    @property
    def epoch(self) -> int:
        """Number of the current connection; spaces opened on an earlier one are invalid."""

    @property
    def connected(self) -> bool:
        """Whether a request can succeed now."""

    @property
    def quota_bytes(self) -> int:
        """Bytes that this engine may have pinned or reserved at the node; 0 = unknown."""

    @property
    def node_name(self) -> str:
        """Name of the node; empty = unknown."""

    @property
    def node_minor(self) -> int:
        """Minor version of the node's protocol; 0 = unknown."""

    @property
    def reserved(self) -> ReservedSlots | None:
        """Slots for the next single pages; None = a put here costs no round trip anyway."""

    def request(
        self, message: wire.Request, timeout_s: float, epoch: int | None = None
    ) -> wire.Answer:
        """Send a request and wait for its answer.

        Args:
            message: the request; this method sets its ``id``.
            timeout_s: maximum wait.
            epoch: the connection that it is for; on another one it is not sent.

        Raises:
            TransferTimeout, PeerUnreachable: no answer.
            KVStoreError: the error with which the node refused.
        """

    def request_all(
        self, messages: Sequence[wire.Request], timeout_s: float, epoch: int
    ) -> list[wire.Answer | KVStoreError]:
        """Send requests of one connection together, and wait for their answers, in their order.

        Args:
            messages: at least one request; at most some hundred KB together, and so their answers.
                No answer waits for anything. This method sets each ``id``.
            timeout_s: maximum seconds until all answers have come.
            epoch: see :meth:`request`.

        Returns:
            For each request its answer, or the error with which the node refused it.

        Raises:
            TransferTimeout, PeerUnreachable: not all requests were answered.
        """

    def send(self, message: wire.Request, epoch: int | None = None) -> None:
        """Send a message without an answer; does not wait.

        It is lost silently if the node is away, or if the link has reconnected since ``epoch``.
        """

    def send_later(self, message: wire.Request, epoch: int | None = None) -> None:
        """As :meth:`send`, but not urgent: sent with the next message, or soon."""

    def moving(self) -> AbstractContextManager[Use]:
        """Context for a use of the node's memory: it stays mapped, and the node learns the end."""

    def close(self) -> None:
        """Disconnect and unmap, as soon as no move is in progress."""
