"""Which peers have which chain: queries in progress, and answers that are remembered. Pure.

::

    ask ──► ASKING ──answer──► FRESH ──1 s──► STALE ──3 s──► forgotten
               └──50 ms──► FRESH, and no peer has it

Only a fresh answer is used for a new request; a request that has started to fetch keeps using the
answer with which it started. Queries and answers are bounded; the oldest answers are removed first.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, NamedTuple

from kvstore.protocol.page import KEY_BYTES, PrefixKey
from kvstore.state.remote.jobs import Holding, Locate, PeerJob
from kvstore.state.tree.prefix_tree import PrefixTree

STRETCH_KEYS: Final = 128
"""Keys that one stretch of the self-check looks up."""
LOCATE_NS: Final = 50_000_000
"""If a query is not answered by then, no peer is assumed to have the pages."""
FRESH_NS = 1_000_000_000
"""How long an answer is used for new requests."""
KEPT_NS: Final = 4_000_000_000
"""How long an answer is kept for fetches that started with it: longer than any of them lasts."""
ASKING_MAX = 64
"""Maximum queries in progress; further pages count as missing at all peers."""
CHAINS_MAX = 256
"""Maximum remembered queries and answers."""
LOCATE_KEYS_MAX = 16_384
"""Maximum leading keys of a chain in one query."""
KEYS_MAX = 1 << 20
"""Maximum keys of all remembered chains; 32 MiB."""
LACKS_MAX = 1_024
"""Maximum pages that are remembered as missing at a peer that was said to have them."""


@dataclass(slots=True, eq=False)
class LocatedChain:
    """Which peers have one chain; requests wait for it while the query is in progress.

    Attributes:
        number: of the query.
        space: of the pages.
        mask: bit i set = the answer covers shard i.
        windowed: the shards need only the last pages of a hit, or some of them do.
        keys: consecutive, 32 bytes each.
        first: index of the first page that was missing here.
        asked_ns: time of the query.
        asking: there is no answer yet.
        answered_ns: time of the answer.
        holdings: peer → how many leading pages it has.
        end: the pages from ``first`` up to this index can be found by their keys.
        believed: it is a claim, and the directory was not asked.
    """

    number: int
    space: PrefixTree
    mask: int
    windowed: bool
    keys: bytes
    first: int
    asked_ns: int
    asking: bool = True
    answered_ns: int = 0
    holdings: dict[str, int] = field(default_factory=dict)
    end: int = 0
    believed: bool = False

    @property
    def most(self) -> int:
        """The maximum of leading pages that a peer has."""
        return max(self.holdings.values(), default=0)

    def key(self, position: int) -> PrefixKey:
        """The key of a page."""
        return PrefixKey(self.keys[position * KEY_BYTES : (position + 1) * KEY_BYTES])

    def from_peer(self, peer: str, position: int, window: int) -> int:
        """The index up to which a peer has this page and the following ones; 0 if it has not."""
        pages = self.holdings.get(peer, 0)
        first = max(0, pages - window) if window else 0
        return pages if first <= position < pages else 0

    def lacks(self, peer: str, position: int) -> None:
        """A peer did not deliver this page: it has at most the pages before it."""
        assert 0 <= position < len(self.keys) // KEY_BYTES
        if self.windowed:  # and then it may have none of those that such a hit needs
            self.holdings.pop(peer, None)
        elif peer in self.holdings:
            self.holdings[peer] = min(self.holdings[peer], position)


class Span(NamedTuple):
    """The position of a request's keys in a chain.

    Attributes:
        chain: the chain.
        start: index in the chain of the first missing page of the request.
        pages: number of equal keys from there on.
    """

    chain: LocatedChain
    start: int
    pages: int

    def tells_all(self, left: int) -> bool:
        """Whether an answer about the chain also covers ``left`` pages of another one."""
        chain, end = self.chain, self.start + self.pages
        if self.pages == left and (not chain.windowed or end * KEY_BYTES == len(chain.keys)):
            return True
        return not chain.asking and chain.most <= end  # nobody has more than they have in common

    def agrees(self, promise: Holding, pages: int) -> bool:
        """Whether it is known already that a peer has the promised pages after ``pages``."""
        known = self.chain.holdings.get(promise.peer, 0) - self.start
        return min(known, self.pages) >= promise.pages - pages


class LocatedChains:
    """All queries and answers of a node.

    Args:
        jobs: gets the queries.
        counts: of the node.

    Attributes:
        answered: queries that were answered, for requests that wait for them.
    """

    def __init__(self, jobs: list[PeerJob], counts: dict[str, int]) -> None:
        self._jobs = jobs
        self._counts = counts
        self.answered: list[LocatedChain] = []
        self._number = count(1)
        #: Every chain, the first asked first.
        self._chains: OrderedDict[int, LocatedChain] = OrderedDict()
        self._asking: dict[int, LocatedChain] = {}
        #: Number of a space → key → the chain that tells of this page.
        self._by_key: dict[int, dict[PrefixKey, LocatedChain]] = {}
        #: Keys of all chains.
        self._keys = 0
        #: Number of a space, first missing page of a chain, peer that did not give it all → until
        #: when nobody is believed who says that it has.
        self._lacks: OrderedDict[tuple[int, PrefixKey, str], int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._chains)

    @property
    def asking(self) -> int:
        """Number of queries in progress."""
        return len(self._asking)

    def find(
        self, space: PrefixTree, mask: int, packed: bytes, at: int, oldest_ns: int,
        answer: LocatedChain | None = None,
    ) -> Span | None:  # fmt: skip
        """What is known of page ``at`` and the following ones, for all shards of a mask.

        Args:
            space: of the pages.
            mask: bit i set = shard i is required.
            packed: keys of a chain.
            at: index of the page in ``packed``.
            oldest_ns: ignore older answers.
            answer: use this one, however old; None = the last one that covers the page.
        """
        key = PrefixKey(packed[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        chain = answer or self._by_key.get(space.number, {}).get(key)
        if chain is None or mask & ~chain.mask or chain.space is not space:
            return None
        if answer is None and not chain.asking and chain.answered_ns < oldest_ns:
            return None
        start = _position(chain.keys, key, at)
        return Span(chain, start, _alike(packed, at, chain.keys, start)) if start >= 0 else None

    def ask(
        self, space: PrefixTree, shards: Sequence[int], packed: bytes, at: int, now_ns: int
    ) -> LocatedChain | None:
        """Query which peers have this chain, whose page ``at`` is missing here.

        None: there are too many queries, or the chain is too long for one.
        """
        self.expire(now_ns)
        if len(self._asking) >= ASKING_MAX or at >= LOCATE_KEYS_MAX:
            self._counts["locates_refused"] += 1
            return None
        made = self._begin(space, shards, packed, at, now_ns)
        self._asking[made.number] = made
        self._remember(made, at + 1)
        specs = tuple([space.shards[shard].spec for shard in shards])
        self._jobs.append(Locate(made.number, space.identity, specs, made.keys))
        self._counts["locates"] += 1
        return made

    def believe(
        self, space: PrefixTree, shards: Sequence[int], packed: bytes, at: int, now_ns: int,
        promise: Holding,
    ) -> Span:  # fmt: skip
        """Remember a claim of what a peer has of a chain, without a query."""
        self.expire(now_ns)
        made = self._begin(space, shards, packed, at, now_ns)
        pages = len(made.keys) // KEY_BYTES
        made.asking, made.believed, made.answered_ns = False, True, now_ns
        made.holdings = {promise.peer: min(promise.pages, pages)}
        self._remember(made, max(at + 1, made.most))
        self._counts["located_by_engines"] += 1
        return Span(made, at, pages - at)

    def located(self, number: int, holdings: Sequence[Holding], now_ns: int) -> None:
        """The answer to a query; a late one is still used for later requests."""
        chain = self._chains.get(number)
        if chain is None:
            return
        pages = len(chain.keys) // KEY_BYTES
        chain.holdings = {
            one.peer: min(one.pages, pages)
            for one in holdings
            if one.pages > 0
            and not self._was_wrong(chain.space, chain.keys, chain.first, one, now_ns)
        }
        self._answer(chain, now_ns)
        self._remember(chain, max(chain.first + 1, chain.most))

    def lacks(self, chain: LocatedChain, peer: str, position: int, now_ns: int) -> None:
        """A peer did not deliver a page of a chain, and who says so for a while is not believed.

        A claim that was wrong is forgotten: the directory may know who has the pages.
        """
        chain.lacks(peer, position)
        about = chain.space.number, chain.key(chain.first), peer
        self._lacks[about] = now_ns + FRESH_NS
        self._lacks.move_to_end(about)
        if len(self._lacks) > LACKS_MAX:
            self._lacks.popitem(last=False)
        if chain.believed and chain.number in self._chains:
            self._forget(chain)

    def credited(
        self, space: PrefixTree, packed: bytes, at: int, claim: Holding | None, now_ns: int
    ) -> Holding | None:
        """A claim about page ``at``, the first that is missing here, if it may be right."""
        if claim is None or claim.pages <= at:
            return None
        return None if self._was_wrong(space, packed, at, claim, now_ns) else claim

    def _was_wrong(
        self, space: PrefixTree, packed: bytes, at: int, claim: Holding, now_ns: int
    ) -> bool:
        key = PrefixKey(packed[at * KEY_BYTES : (at + 1) * KEY_BYTES])
        return now_ns < self._lacks.get((space.number, key, claim.peer), 0)

    def _begin(
        self, space: PrefixTree, shards: Sequence[int], packed: bytes, at: int, now_ns: int
    ) -> LocatedChain:
        packed = packed[: LOCATE_KEYS_MAX * KEY_BYTES]
        self._make_room(len(packed) // KEY_BYTES)
        mask = 0
        for shard in shards:
            mask |= 1 << shard
        windowed = any(space.shards[shard].window_pages for shard in shards)
        made = LocatedChain(next(self._number), space, mask, windowed, packed, at, now_ns)
        self._chains[made.number] = made
        self._keys += len(packed) // KEY_BYTES
        assert len(self._chains) <= CHAINS_MAX
        return made

    def expire(self, now_ns: int) -> None:
        """Remove queries and answers whose time is over."""
        while self._asking:
            number, chain = next(iter(self._asking.items()))
            if now_ns < chain.asked_ns + LOCATE_NS:
                break
            self._counts["locates_timed_out"] += 1
            self._answer(chain, now_ns)
            del number
        while self._chains:
            number, chain = next(iter(self._chains.items()))
            if chain.asking or now_ns < chain.answered_ns + KEPT_NS:
                break
            self._forget(chain)

    def next_deadline_ns(self) -> int:
        """When the first query times out; 0 = none is in progress."""
        first = next(iter(self._asking.values()), None)
        return first.asked_ns + LOCATE_NS if first is not None else 0

    def checks(self) -> Iterator[None]:
        """Assert, a stretch at a time, that keys name remembered chains only."""
        assert len(self._asking) <= ASKING_MAX
        assert len(self._chains) <= CHAINS_MAX
        assert all(self._chains[number] is one for number, one in self._asking.items())
        assert all(one.asking == (number in self._asking) for number, one in self._chains.items())
        assert self._keys == sum(len(one.keys) // KEY_BYTES for one in self._chains.values())
        assert all(self._by_key.values()), "a space of which nothing is known"
        named, found, before = sum(map(len, self._by_key.values())), 0, self._ends()
        yield
        for chain in list(self._chains.values()):
            for first in range(chain.first, chain.end, STRETCH_KEYS):
                known = self._by_key.get(chain.space.number, {})
                for at in range(first, min(first + STRETCH_KEYS, chain.end)):
                    found += known.get(chain.key(at)) is chain
                yield
        assert found >= named or self._ends() != before, "a key of a chain that is forgotten"

    def _ends(self) -> list[tuple[int, int, int]]:
        """The keys that are known of each chain."""
        return [(number, one.first, one.end) for number, one in self._chains.items()]

    def _answer(self, chain: LocatedChain, now_ns: int) -> None:
        assert chain.asking == (chain.number in self._asking)
        if chain.asking:
            chain.asking = False
            del self._asking[chain.number]
            self.answered.append(chain)
        chain.answered_ns = now_ns

    def _remember(self, chain: LocatedChain, end: int) -> None:
        assert chain.number in self._chains
        keys = [chain.key(at) for at in range(max(chain.first, chain.end), end)]
        if keys:
            self._by_key.setdefault(chain.space.number, {}).update(dict.fromkeys(keys, chain))
        chain.end = max(chain.end, end)

    def _make_room(self, keys: int) -> None:
        """Remove the oldest answers until there is room for one more query."""
        answers = [one for one in self._chains.values() if not one.asking]
        for oldest in answers:
            if len(self._chains) < CHAINS_MAX and self._keys + keys <= KEYS_MAX:
                return
            self._forget(oldest)

    def _forget(self, chain: LocatedChain) -> None:
        assert not chain.asking, "a request waits for its answer"
        del self._chains[chain.number]
        self._keys -= len(chain.keys) // KEY_BYTES
        assert self._keys >= 0
        known = self._by_key.get(chain.space.number, {})  # a later chain may have had all its keys
        for at in range(chain.first, chain.end):
            key = chain.key(at)
            if known.get(key) is chain:
                del known[key]
        if not known:
            self._by_key.pop(chain.space.number, None)


def _position(keys: bytes, key: PrefixKey, expected: int) -> int:
    """The index of a key, -1 = none; most requests start where the chain does."""
    if keys.startswith(key, expected * KEY_BYTES):
        return expected
    at = keys.find(key)
    while at > 0 and at % KEY_BYTES:
        at = keys.find(key, at + 1)
    return at // KEY_BYTES


def _alike(packed: bytes, at: int, keys: bytes, start: int) -> int:
    """How many keys of two chains are equal from here on; each is a hash of all before it."""
    most = min(len(packed) // KEY_BYTES - at, len(keys) // KEY_BYTES - start)
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        key = packed[(at + middle - 1) * KEY_BYTES : (at + middle) * KEY_BYTES]
        if keys.startswith(key, (start + middle - 1) * KEY_BYTES):
            low = middle
        else:
            high = middle - 1
    return low
