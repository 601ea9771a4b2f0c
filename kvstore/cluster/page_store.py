"""The entries in which nodes announce their pages; several nodes change them concurrently."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from kvstore.cluster.entries import FoundEntries


class DirectoryFault(Exception):
    """A call to the store failed; it may have been carried out, or may still be.

    Args:
        cause: ``away``, ``late``, ``full`` or ``refused``.
        what: what happened.
    """

    def __init__(self, cause: str, what: str) -> None:
        super().__init__(what)
        self.cause = cause


class ChangedPages(NamedTuple):
    """Pages that a member got or dropped.

    Attributes:
        stored: whether it got them.
        sign: of the member, by medium; see :data:`kvstore.cluster.entries.SIGNS`.
        names: their names, packed.
    """

    stored: bool
    sign: str
    names: bytes


class AnnouncedNumber(NamedTuple):
    """The state of an announcement's number.

    Attributes:
        token: of the announcement.
        batch: the last one that was carried out; 0 = none.
    """

    token: str
    batch: int


class PageStore(Protocol):
    """The entries of a cluster, and the numbers of announcements. Every call has a deadline.

    Each call raises :class:`DirectoryFault`.
    """

    async def claim(self, node: str, boot: bytes, token: str) -> int:
        """Get a number for an announcement; all numbers of other boots of the node become void.

        A number is valid for a limited time; see :meth:`renew`. It is reused only when no entry can
        contain it any more. The same token gets the same number again.
        """
        ...

    async def change(
        self, number: int, token: str, batch: int, changes: Sequence[ChangedPages]
    ) -> bool:
        """Change entries, in order, if all earlier batches of the announcement were carried out.

        A batch that was carried out already is not carried out again.

        Returns:
            False if the number no longer belongs to that announcement, or a batch is missing.
        """
        ...

    async def renew(self, numbers: Mapping[int, AnnouncedNumber]) -> list[int]:
        """Extend the validity of some numbers; returns those that are lost.

        A number is also lost if the store has forgotten a batch: it was restored with older data.
        """
        ...

    async def withdraw(self, number: int, token: str) -> None:
        """Make a number void."""
        ...

    async def find(self, shards: Sequence[bytes]) -> FoundEntries:
        """The entries of some pages: for each shard their names, packed."""
        ...
