"""Pages protected from eviction: operators' pins and engines' conversations. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final

from kvstore.protocol.errors import CapacityError, KVStoreError, TierUnavailable
from kvstore.protocol.page import PrefixKey
from kvstore.state.choice.conversations import RELEASE_PAGES, Conversations, KeepCause
from kvstore.state.choice.quotas import Pin
from kvstore.state.table.residents import Residents
from kvstore.state.table.tiers import Tiers
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.places import Tier
from kvstore.state.tree.prefix_tree import PrefixTree

TTL_NS_MAX = 86_400_000_000_000
"""Default maximum time that a conversation is kept after its last request: a day."""
WRITE_PAGES: Final = 32
"""Maximum pages of a pin that one step writes to disk: each is a node, which is asked thrice."""


class Keeping:
    """The pins and the kept conversations of one node.

    Args:
        residents: the pages, and where they are.
        tiers: writes kept pages to disk.

    Attributes:
        pins: of operators.
        conversations: of engines.
        ttl_ns_max: maximum time that a conversation is kept after its last request.
        is_used: whether there are pins or conversations.
    """

    def __init__(self, residents: Residents, tiers: Tiers) -> None:
        self.pins = residents.pins
        self.conversations = Conversations()
        self.ttl_ns_max = TTL_NS_MAX
        self.is_used = False
        self._held = residents
        self._tiers = tiers

    def begin_pin(
        self, space: PrefixTree, key: PrefixKey, expires_ns: int, tier: Tier = "host"
    ) -> Pin:
        """Start to pin a prefix in a tier; :meth:`go_on_with` continues, until it returns True.

        Raises:
            NotFound: no page is stored under the key.
            CapacityError: there are too many pins.
            TierUnavailable: there is no such tier.
        """
        if tier == "ssd" and not self._held.disk.exists:
            raise TierUnavailable("this node has no SSD tier: give it ssd.directories")
        self.is_used = True
        return self.pins.begin(space, key, expires_ns, tier)

    def go_on_with(self, pin: Pin) -> bool:
        """Pin some more pages or, on disk, write some that are not there; whether that was all.

        Raises:
            NotFound: the page has left meanwhile.
            CapacityError: the budget or the disk has no room for it. In both cases
                :meth:`give_up` is to be called.
        """
        if not pin.covers:
            self.pins.cover(pin)
        elif pin.tier == "ssd":
            some = pin.nodes[pin.written : pin.written + WRITE_PAGES]
            written = self._tiers.ensure_all_written(some)
            self.pins.refuse_changed(pin)  # of a page that has left nothing is to be written
            pin.written += written
            if written < len(some):
                if not self._held.disk.limits.is_behind(pin.space):
                    raise CapacityError("the SSD tier does not take all of these pages now")
                self._tiers.go_on()  # it finds more leaves for the space's quota
        if not pin.covers or (pin.tier == "ssd" and pin.written < pin.pages):
            return False
        self.pins.complete(pin)
        return True

    def give_up(self, pin: Pin) -> None:
        """A pin will not be made; of a long one, most pages are let go in later turns."""
        self.pins.give_up(pin)
        self._held.offer_more(RELEASE_PAGES)

    def pin(self, space: PrefixTree, key: PrefixKey, expires_ns: int, tier: Tier = "host") -> Pin:
        """Pin a prefix in a tier at once; on disk, pages that are not there yet are written now.

        Raises:
            NotFound, CapacityError, TierUnavailable: see :meth:`begin_pin`, :meth:`go_on_with`.
        """
        pin = self.begin_pin(space, key, expires_ns, tier)
        try:
            while not self.go_on_with(pin):
                pass
        except KVStoreError:
            self.give_up(pin)
            raise
        return pin

    def unpin(self, number: int) -> Pin:
        """End a pin; of a long one, most pages are let go in later turns.

        Raises:
            NotFound: there is no such pin.
        """
        ended = self.pins.remove(number)
        self._held.offer_more(RELEASE_PAGES)
        return ended

    def keep(
        self, space: PrefixTree, name: str, keys: Sequence[PrefixKey], ttl_ns: int, bytes_max: int
    ) -> tuple[int, KeepCause]:
        """Keep pages of a conversation for a time, on disk if there is one.

        For the arguments see :meth:`kvstore.state.choice.conversations.Conversations.keep`. Kept
        pages count against the space's quota in that tier. A time longer than :attr:`ttl_ns_max` is
        shortened, and counted.

        Returns:
            How many of the leading keys are kept, and why the others are not.
        """
        kept, disk, now_ns = self.conversations, self._held.disk, self._held.moment.now_ns
        tier: Tier = "ssd" if disk.exists else "host"
        quota = (disk.limits.quotas if disk.exists else self._held.quotas).get(space).quota_bytes
        if ttl_ns > self.ttl_ns_max:
            ttl_ns = self.ttl_ns_max
            self._held.counts["shortened_keeps"] += 1
        self._settle()
        self.is_used = True
        until_ns = now_ns + ttl_ns
        out = kept.keep(space, name, keys, now_ns, until_ns, bytes_max, tier, quota)
        self._held.counts["gave_way_pages"] += len(out.lost)
        self._held.unprotected(out.lost)
        pages, cause = out.pages, out.cause
        if tier == "ssd" and (
            refused := out.newly_kept[self._tiers.ensure_all_written(out.newly_kept) :]
        ):
            kept.give_back(space, name, refused)
            self._held.unprotected(refused)
            pages, cause = pages - len(refused), "disk"
        assert 0 <= pages <= len(keys)
        assert cause or pages == len(keys)
        if cause:
            self._held.counts[f"not_kept_pages_{cause}"] += len(keys) - pages
        return pages, cause

    def stored(self, nodes: Iterable[PrefixNode]) -> None:
        """Pages of these nodes became READY; kept ones may have grown."""
        self._held.pinned_changed += [node for node in nodes if node.pins]
        self._settle()

    def end(self, space: PrefixTree, name: str) -> int:
        """Stop keeping the pages of a conversation soon; returns how many there were."""
        return self.conversations.end(space, name)

    def expire(self, now_ns: int) -> None:
        """Release what was kept until now, within one turn's limit."""
        self._settle()
        if len(self.pins):
            self.pins.expire(now_ns)
        if self.pins.ending:
            self._held.unprotected(self.pins.let_go(RELEASE_PAGES))
        self._held.unprotected(self.conversations.expire(now_ns))
        self.is_used = bool(
            len(self.pins) or self.pins.making or self.pins.ending or len(self.conversations)
        )

    def next_deadline_ns(self) -> int:
        """The earliest deadline that :meth:`expire` would apply; 0 = none."""
        if self._held.pinned_changed or self.pins.ending:
            return 1
        due = (self.pins.next_deadline_ns(), self.conversations.next_deadline_ns())
        return min((at for at in due if at), default=0)

    def _settle(self) -> None:
        """Charge kept pages whose shards were added or dropped."""
        changed = self._held.pinned_changed
        if changed:
            gone = self.conversations.changed(changed)
            changed.clear()
            self._held.unprotected(gone)
