"""Which spaces exist on a node, and who may use them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from kvstore.errors import CapacityError, InvalidArgument, LayoutMismatch
from kvstore.page import ShardSpec, SpaceIdentity, pack_pair
from kvstore.state.tree.prefix_tree import PrefixTree, Shard
from kvstore.state.tree.sessions import Session
from kvstore.state.tree.slots import SLOT_ALIGNMENT

SPACES_MAX = 4096
"""Spaces of a node, besides the few that every session may open however many there are."""
SESSION_SPACES_MAX = 256
SESSION_SPACES_ALWAYS = 4
SHARDS_MAX: Final = 1024


class Spaces:
    """All spaces of one node. Each has a number, and no number is given twice.

    Args:
        page_bytes_max: no page may be larger.
    """

    def __init__(self, page_bytes_max: int) -> None:
        self._page_bytes_max = page_bytes_max
        self._spaces: dict[int, PrefixTree] = {}
        self._by_digest: dict[bytes, PrefixTree] = {}
        self._next = 0

    def __iter__(self) -> Iterator[PrefixTree]:
        return iter(self._spaces.values())

    def __len__(self) -> int:
        return len(self._spaces)

    def open(
        self, session: Session, identity: SpaceIdentity, shards: Sequence[ShardSpec]
    ) -> tuple[PrefixTree, list[int]]:
        """Find or make the space and its shards.

        Returns:
            the space, and the number of each of ``shards`` in it.

        Raises:
            LayoutMismatch, InvalidArgument: names the field that does not fit what is known.
            CapacityError: the node, or the session, has as many spaces as it may have.
        """
        if session.spaces and session.domain != identity.tenant and not session.remote:
            raise InvalidArgument("tenant", f"this session belongs to {session.domain!r}")
        if not 1 <= len(shards) <= SHARDS_MAX:
            raise InvalidArgument("shards", f"{len(shards)} of them, not 1..{SHARDS_MAX}")
        if len(session.spaces) >= SESSION_SPACES_MAX:
            known = self._by_digest.get(identity.digest)
            if known is None or known.number not in session.spaces:
                raise CapacityError(f"the session has {SESSION_SPACES_MAX} spaces open already")
        most = SPACES_MAX * (2 if len(session.spaces) < SESSION_SPACES_ALWAYS else 1)
        space, numbers = self._find_or_make(identity, shards, most)
        session.domain = identity.tenant
        if space.number not in session.spaces:
            session.spaces[space.number] = space
            space.sessions += 1
        opened = session.shards.get(space.number, 0)
        for number in numbers:
            opened |= 1 << number
        session.shards[space.number] = opened
        return space, numbers

    def adopt(
        self, identity: SpaceIdentity, shards: Sequence[ShardSpec]
    ) -> tuple[PrefixTree, list[int]]:
        """:meth:`open` for pages that nobody has asked for yet."""
        return self._find_or_make(identity, shards, SPACES_MAX)

    def get(self, number: int, session: Session) -> PrefixTree:
        """The space that a session has opened under that number.

        Raises:
            InvalidArgument: it has opened none.
        """
        space = session.spaces.get(number)
        if space is None:
            raise InvalidArgument("space", f"{number} is not open in this session")
        return space

    def left(self, session: Session) -> None:
        """A session has ended: none of its spaces is open for it any more."""
        for space in session.spaces.values():
            assert space.sessions > 0
            space.sessions -= 1
        session.spaces.clear()
        session.shards.clear()

    def close_idle(self, needed: Callable[[PrefixTree], bool]) -> int:
        """Once there are as many spaces as may be, close the idle ones; how many those were.

        Args:
            needed: whether a space must stay that holds no page and that no session has open.
        """
        if len(self._spaces) < SPACES_MAX:
            return 0
        idle = [one for one in self if not one.sessions and not one.nodes and not needed(one)]
        for space in idle:
            del self._spaces[space.number], self._by_digest[space.identity.digest]
        return len(idle)

    def check(self) -> None:
        """Assert that each space is known by both its names."""
        assert len(self._spaces) == len(self._by_digest)
        assert all(self._spaces.get(one.number) is one for one in self._by_digest.values())
        assert all(one.sessions >= 0 for one in self)

    def _find_or_make(
        self, identity: SpaceIdentity, shards: Sequence[ShardSpec], spaces_max: int
    ) -> tuple[PrefixTree, list[int]]:
        for spec in shards:
            pack_pair(identity, spec)  # refused here, or every write of its pages would be
        sizes = [spec.page_bytes(identity) for spec in shards]
        for size in sizes:
            if size > self._page_bytes_max:
                limit = self._page_bytes_max
                raise InvalidArgument("page_bytes", f"{size} is more than an extent ({limit})")
        space = self._by_digest.get(identity.digest)
        needs = dict(space.needs) if space else {}
        for spec in shards:
            _refuse_contradiction(spec, needs)
            needs[spec.group] = _merge(spec, needs)
        if space is None:
            if len(self._spaces) >= spaces_max:
                raise CapacityError(
                    f"{len(self._spaces)} spaces are in use already; one is closed once no engine"
                    " has it open and no page of it is left"
                )
            space = PrefixTree(self._next, identity)
            self._next += 1
            self._spaces[space.number] = self._by_digest[identity.digest] = space
        numbers = [
            _shard_number(space, spec, size) for spec, size in zip(shards, sizes, strict=True)
        ]
        space.needs = needs
        return space, numbers


def _shard_number(space: PrefixTree, spec: ShardSpec, page_bytes: int) -> int:
    number = space.shard_numbers.get(spec)
    if number is None:
        number = len(space.shards)
        if number >= SHARDS_MAX:
            raise CapacityError(f"the space has {SHARDS_MAX} shards already")
        slot_bytes = -(-page_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
        space.shards.append(Shard(spec, page_bytes, slot_bytes))
        space.shard_numbers[spec] = number
        if not spec.window_pages:
            space.full_mask |= 1 << number
    return number


def _merge(spec: ShardSpec, known: dict[str, tuple[int, int]]) -> tuple[int, int]:
    """(window_pages, head_dim) of the group of ``spec``; head_dim 0 = no shard of it tells."""
    _, told = known.get(spec.group, (0, 0))
    return spec.window_pages, told or getattr(spec.layout, "head_dim", 0)


def _refuse_contradiction(spec: ShardSpec, known: dict[str, tuple[int, int]]) -> None:
    """One model has one head size and one need a group; who says otherwise is misconfigured."""
    if spec.group not in known:
        return
    window_pages, head_dim = known[spec.group]
    if spec.window_pages != window_pages:
        raise LayoutMismatch(
            "window_pages", f"{spec.window_pages} here, {window_pages} in the space"
        )
    mine = getattr(spec.layout, "head_dim", 0)
    if mine and head_dim and mine != head_dim:
        raise LayoutMismatch("head_dim", f"{mine} here, {head_dim} in the space")
