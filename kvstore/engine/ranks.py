"""Which shards the ranks of an engine hold, and which of them writes a page. Pure.

The KV heads of a model are divided into **head groups** of equal size, by a rule that hardly ever
depends on the number of ranks: servers of 1, 2, 4 and 8 ranks have the same groups, so that each
finds the pages that another one stored (docs/decisions/0048-shards-are-head-groups.md). A rank
**covers** one or more groups. If several ranks hold the same heads, these are one shard: each rank
writes some of its pages, in turns, and all of them read it.
"""

from math import gcd
from typing import Final, NamedTuple

from kvstore.protocol.errors import InvalidArgument

SHARING_RANKS: Final = 8
"""Maximum number of ranks whose pages engines with fewer ranks can share; a power of two."""


class HeldShard(NamedTuple):
    """A shard, as seen by one of the ranks that hold it.

    Attributes:
        heads: half-open range of the shard's KV heads among the rank's KV heads.
        number: number of its head group.
        copies: number of ranks that hold it.
        turn: this rank's number among the ranks that hold it; 0 to ``copies`` - 1.
    """

    heads: tuple[int, int]
    number: int
    copies: int
    turn: int

    def own_pages(self, first: int, count: int) -> range:
        """Which of consecutive pages this rank writes: those whose number is its turn.

        Args:
            first: number of the first page in its prompt, starting at 0.
            count: number of pages.

        Returns:
            Indexes of the pages to write, from 0 to ``count`` - 1.
        """
        return range((self.turn - first) % self.copies, count, self.copies)


class HeadSplit(NamedTuple):
    """The KV heads of a model on the ranks of tensor parallelism.

    Attributes:
        heads: KV heads of the model; 1 for latents (MLA), which every rank holds.
        ranks: size of tensor parallelism.
        whole: heads of a rank cannot be separated in its blocks, so they are one group.
    """

    heads: int
    ranks: int
    whole: bool = False

    @property
    def rank_heads(self) -> int:
        """KV heads of one rank.

        Raises:
            InvalidArgument: neither number divides the other, so ranks hold different numbers.
        """
        if (
            self.heads < 1
            or self.ranks < 1
            or (self.heads % self.ranks and self.ranks % self.heads)
        ):
            what = f"{self.heads} KV heads cannot be divided among {self.ranks} ranks"
            raise InvalidArgument("kv_heads", what)
        return max(1, self.heads // self.ranks)

    @property
    def group_heads(self) -> int:
        """KV heads of one head group; divides :attr:`rank_heads`."""
        size = self.heads // gcd(self.heads, SHARING_RANKS)
        return self.rank_heads if self.whole or self.rank_heads % size else size

    def groups(self) -> list[tuple[int, int]]:
        """All head groups in order, as half-open ranges of the model's KV heads."""
        size = self.group_heads
        return [(first, first + size) for first in range(0, self.heads, size)]

    def cover(self, rank: int) -> list[HeldShard]:
        """The head groups that a rank holds, in order.

        Args:
            rank: 0 to ``ranks`` - 1.
        """
        assert 0 <= rank < self.ranks
        size, held = self.group_heads, self.rank_heads
        copies = max(1, self.ranks // self.heads)
        number, turn = rank // copies * held // size, rank % copies
        return [
            HeldShard((first, first + size), number + index, copies, turn)
            for index, first in enumerate(range(0, held, size))
        ]
