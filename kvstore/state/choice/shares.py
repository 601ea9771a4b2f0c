"""Divides a shared budget: how much each tenant keeps, and which one gives way. Pure.

The budget is shared by all tenants, and a tenant may fill it while no other needs it. A tenant that
keeps less takes from the one that keeps most, one page at a time, until both keep the same: from
other tenants first, then from other spaces of its own.
"""

from collections.abc import Callable, Sized
from typing import Generic, TypeVar

from kvstore.state.tree.prefix_tree import PrefixTree

LOOKS_MAX = 16_384
"""Maximum tenants and spaces that one step examines to find the largest; about a millisecond."""

T = TypeVar("T")


class SpaceShare(Generic[T]):
    """The kept size of the conversations of one space.

    Attributes:
        space: the space.
        size_bytes: of their pages; a page shared by several counts once.
        members: name → conversation; the one that was renewed longest ago is the first.
    """

    __slots__ = ("members", "size_bytes", "space")

    def __init__(self, space: PrefixTree) -> None:
        self.space = space
        self.size_bytes = 0
        self.members: dict[str, T] = {}


class _Tenant(Generic[T]):
    """The kept size of the conversations of one tenant."""

    __slots__ = ("count", "size_bytes", "spaces")

    def __init__(self) -> None:
        self.size_bytes = self.count = 0
        self.spaces: dict[int, SpaceShare[T]] = {}


class Shares(Generic[T]):
    """The shares of all spaces that keep something."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant[T]] = {}
        #: How many tenants and spaces were looked at since :meth:`begin`.
        self._looked = 0

    def begin(self) -> None:
        """Start a step."""
        self._looked = 0

    def size_bytes(self, space: PrefixTree) -> int:
        """The kept size of a space."""
        found = self._find(space)
        return found.size_bytes if found is not None else 0

    def members(self) -> int:
        """The number of conversations."""
        return sum(tenant.count for tenant in self._tenants.values())

    def charge(self, space: PrefixTree, size_bytes: int) -> None:
        """Change the kept size of a space by ``size_bytes``, which may be negative."""
        share = self._enter(space)
        share.size_bytes += size_bytes
        self._tenants[space.identity.tenant].size_bytes += size_bytes
        assert share.size_bytes >= 0
        self._tidy(share)

    def renew(self, space: PrefixTree, name: str, member: T) -> None:
        """A conversation is new or was renewed: it is the last one of its space to give way."""
        share = self._enter(space)
        known = share.members.pop(name, None)
        share.members[name] = member
        self._tenants[space.identity.tenant].count += known is None

    def remove(self, space: PrefixTree, name: str) -> None:
        """A conversation has ended."""
        share = self._enter(space)
        del share.members[name]
        tenant = self._tenants[space.identity.tenant]
        tenant.count -= 1
        assert tenant.count >= 0
        self._tidy(share)

    def most_bytes(self, space: PrefixTree, more: int) -> SpaceShare[T] | None:
        """The space that gives way so that ``space`` may keep ``more`` bytes more; None = none."""
        return self._richest(space, more, lambda one: one.size_bytes, lambda one: one.size_bytes)

    def most_members(self, space: PrefixTree) -> SpaceShare[T] | None:
        """The space that gives way so that ``space`` may have one more; None = none."""
        return self._richest(space, 1, lambda one: one.count, lambda one: len(one.members))

    def check(self) -> int:
        """Assert that the sums agree; returns the kept size of all."""
        for tenant in self._tenants.values():
            shares = tenant.spaces.values()
            assert tenant.spaces
            assert tenant.size_bytes == sum(one.size_bytes for one in shares)
            assert tenant.count == sum(len(one.members) for one in shares)
        return sum(tenant.size_bytes for tenant in self._tenants.values())

    # ---- inside -----------------------------------------------------------------------------

    def _richest(
        self, space: PrefixTree, more: int, of_tenant: Callable[[_Tenant[T]], int],
        of_space: Callable[[SpaceShare[T]], int],
    ) -> SpaceShare[T] | None:  # fmt: skip
        """The largest space of the largest tenant, if that keeps more than the asker's tenant.

        Otherwise the largest space of the asker's own tenant, if that keeps more than the asker.
        """
        name = space.identity.tenant
        mine = self._tenants.get(name)
        others = [tenant for other, tenant in self._tenants.items() if other != name]
        if not self._may_look(others):
            return None
        most = max(others, key=of_tenant, default=None)
        has = of_tenant(mine) if mine is not None else 0
        if most is None or of_tenant(most) <= has + more:
            if mine is None:
                return None
            own = mine.spaces.get(space.number)
            most, has = mine, of_space(own) if own is not None else 0
            richest = self._largest(most, of_space)
            return richest if richest is not None and of_space(richest) > has + more else None
        return self._largest(most, of_space)

    def _largest(
        self, tenant: _Tenant[T], of_space: Callable[[SpaceShare[T]], int]
    ) -> SpaceShare[T] | None:
        """The largest space of a tenant; among equals, the one opened first."""
        spaces = tenant.spaces.values()
        if not self._may_look(spaces):
            return None
        return max(spaces, key=lambda one: (of_space(one), -one.space.number))

    def _may_look(self, those: Sized) -> bool:
        self._looked += len(those)
        return self._looked <= LOOKS_MAX

    def _find(self, space: PrefixTree) -> SpaceShare[T] | None:
        tenant = self._tenants.get(space.identity.tenant)
        return tenant.spaces.get(space.number) if tenant is not None else None

    def _enter(self, space: PrefixTree) -> SpaceShare[T]:
        tenant = self._tenants.setdefault(space.identity.tenant, _Tenant())
        share = tenant.spaces.get(space.number)
        if share is None:
            share = tenant.spaces[space.number] = SpaceShare(space)
        return share

    def _tidy(self, share: SpaceShare[T]) -> None:
        if share.size_bytes or share.members:
            return
        name = share.space.identity.tenant
        tenant = self._tenants[name]
        del tenant.spaces[share.space.number]
        if not tenant.spaces:
            assert not tenant.size_bytes
            assert not tenant.count
            del self._tenants[name]
