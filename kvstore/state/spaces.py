"""Which spaces exist on a node, and who may use them."""

from collections.abc import Iterator, Sequence
from typing import Final

from kvstore.errors import CapacityError, InvalidArgument, LayoutMismatch
from kvstore.page import ShardSpec, SpaceIdentity, pack_pair
from kvstore.state.sessions import Session
from kvstore.state.slots import SLOT_ALIGNMENT
from kvstore.state.tree import Shard, Space

SPACES_MAX: Final = 4096
SHARDS_MAX: Final = 1024


class Spaces:
    """All spaces of one node; they are numbered and never closed.

    Args:
        page_bytes_max: no page may be larger.
    """

    def __init__(self, page_bytes_max: int) -> None:
        """Start with none."""
        self._page_bytes_max = page_bytes_max
        self._spaces: list[Space] = []
        self._by_digest: dict[bytes, Space] = {}

    def __iter__(self) -> Iterator[Space]:
        return iter(self._spaces)

    def open(
        self, session: Session, identity: SpaceIdentity, shards: Sequence[ShardSpec]
    ) -> tuple[Space, list[int]]:
        """Find or make the space and its shards.

        Returns:
            the space, and the number of each of ``shards`` in it.

        Raises:
            LayoutMismatch, InvalidArgument: names the field that does not fit what is known.
        """
        if session.domain and session.domain != identity.tenant:
            raise InvalidArgument("tenant", f"this session belongs to {session.domain!r}")
        if not shards:
            raise InvalidArgument("shards", "at least one is needed")
        opened = self.adopt(identity, shards)
        session.domain = identity.tenant
        session.opened(opened[0])
        return opened

    def adopt(
        self, identity: SpaceIdentity, shards: Sequence[ShardSpec]
    ) -> tuple[Space, list[int]]:
        """:meth:`open` for pages that nobody has asked for yet."""
        for spec in shards:
            pack_pair(identity, spec)  # refused here, or every write of its pages would be
        sizes = [spec.page_bytes(identity) for spec in shards]
        for size in sizes:
            if size > self._page_bytes_max:
                limit = self._page_bytes_max
                raise InvalidArgument("page_bytes", f"{size} is more than an extent ({limit})")
        space = self._by_digest.get(identity.digest)
        known = space.shards if space else []
        for spec in shards:
            _refuse_contradiction(spec, known)
        if space is None:
            if len(self._spaces) >= SPACES_MAX:
                raise CapacityError(f"{SPACES_MAX} spaces exist already")
            space = Space(len(self._spaces), identity)
            self._spaces.append(space)
            self._by_digest[identity.digest] = space
        return space, [
            self._shard_number(space, spec, size) for spec, size in zip(shards, sizes, strict=True)
        ]

    def get(self, number: int, session: Session) -> Space:
        """The space of that number.

        Raises:
            InvalidArgument: there is none, or it is another tenant's.
        """
        if not 0 <= number < len(self._spaces):
            raise InvalidArgument("space", f"{number} is not open")
        space = self._spaces[number]
        if space.identity.tenant != session.domain:
            raise InvalidArgument("space", f"{number} belongs to another tenant")
        return space

    def _shard_number(self, space: Space, spec: ShardSpec, page_bytes: int) -> int:
        for number, shard in enumerate(space.shards):
            if shard.spec == spec:
                return number
        if len(space.shards) >= SHARDS_MAX:
            raise CapacityError(f"the space has {SHARDS_MAX} shards already")
        slot_bytes = -(-page_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        space.shards.append(Shard(spec, page_bytes, slot_bytes))
        return len(space.shards) - 1


def _refuse_contradiction(spec: ShardSpec, known: Sequence[Shard]) -> None:
    """One model has one head size and one need a group; who says otherwise is misconfigured."""
    for shard in known:
        other = shard.spec
        if spec.group != other.group:
            continue
        if spec.window_pages != other.window_pages:
            raise LayoutMismatch(
                "window_pages", f"{spec.window_pages} here, {other.window_pages} in the space"
            )
        mine, theirs = getattr(spec.layout, "head_dim", 0), getattr(other.layout, "head_dim", 0)
        if mine and theirs and mine != theirs:
            raise LayoutMismatch("head_dim", f"{mine} here, {theirs} in the space")
