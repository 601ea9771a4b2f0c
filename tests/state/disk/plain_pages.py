"""Two tiers of single pages in plain dicts: what a page table that keeps runs is compared with.

It knows pages as (space, path of letters, shard) and follows the answers and actions of the table,
as any index that follows the events does. Every slot has its content here, as every record has in
:mod:`tests.state.disk.plain_files`: so a page that is one off in any column is seen where its bytes
are read. Nothing here asks for a page in a way that makes the table split its run.
"""

from dataclasses import dataclass, field

from kvstore.protocol.page import PrefixKey, SpaceIdentity
from kvstore.state.disk.jobs import Durable
from kvstore.state.disk.log import SegmentLog
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.actions import Abandoned, Removed, Stored, TierRemoved, TierStored
from kvstore.state.tree.match import longest_match
from kvstore.state.tree.node import PrefixNode, Retention
from kvstore.state.tree.places import Tier
from kvstore.state.tree.prefix_tree import PrefixTree
from kvstore.state.tree.sessions import Process
from kvstore.state.tree.slots import Slot
from tests.state.disk.plain_files import Content, PlainFiles
from tests.state.single_pages import PATH_OF, SHARDS, WINDOW_SHARD, Page, longest, slot_of
from tests.state.world import chain, identity, key

MODELS = (identity(), identity(model="other"))
BURIED = ("operator", "cleared", "corrupt")


@dataclass
class Kept:
    """What the model knows of a READY page; ``tiers``: where it is."""

    digest: bytes
    tiers: set[Tier]
    keep: Retention


@dataclass
class OpenPut:
    """Pages that somebody writes; ``alive`` are those of them that are in the index still."""

    pages: list[tuple[Page, Slot]]
    alive: set[Page]


@dataclass
class Reading:
    """A lease, and what must be in its slots until it is released."""

    until_ns: int
    slots: list[tuple[Slot, Content]]


@dataclass
class Names:
    """What the table calls the spaces and shards of the model."""

    spaces: list[PrefixTree]
    shards: list[list[int]]

    @staticmethod
    def open(table: PageTable, engine: Process) -> "Names":
        """Open all spaces; a start may have given the shards that it found other numbers."""
        opened = [table.spaces.open(engine.session, model, list(SHARDS)) for model in MODELS]
        return Names([space for space, _ in opened], [numbers for _, numbers in opened])

    def page(self, of: SpaceIdentity, shard: int, name: PrefixKey) -> Page:
        """The page that the table calls so."""
        at = MODELS.index(of)
        return at, PATH_OF[name], self.shards[at].index(shard)

    def record_bytes(self, page: Page) -> int:
        """What it takes on disk."""
        return self.spaces[page[0]].shards[self.shards[page[0]][page[2]]].record_bytes

    def slot(self, page: Page) -> Slot | None:
        """Where the table has it in memory."""
        at, path, shard = page
        return slot_of(self.spaces[at], path, self.shards[at][shard])


@dataclass
class PlainPages:
    """All pages of one life of a node.

    Attributes:
        names: of the table.
        files: of its disk.
        now_ns: the time.
        pages: what is READY.
        committing: what is to become READY by the message that is being carried out.
        content: what is in each slot; None while it is being written.
        puts: by number.
        leases: by number.
        durable: what a sync was acknowledged for, and has not left since.
        buried: what was taken out on purpose and no sync is waited for yet.
        gone: what was, and is acknowledged: no start may find it.
        may_leave: causes of removals that somebody gave reason for.
        holes: pages that left before pages behind them, which leave in later turns → causes.
    """

    names: Names
    files: PlainFiles
    now_ns: int = 0
    pages: dict[Page, Kept] = field(default_factory=dict)
    committing: dict[Page, Kept] = field(default_factory=dict)
    content: dict[Slot, Content | None] = field(default_factory=dict)
    puts: dict[int, OpenPut] = field(default_factory=dict)
    leases: dict[int, Reading] = field(default_factory=dict)
    durable: set[Page] = field(default_factory=set)
    buried: set[Page] = field(default_factory=set)
    gone: set[Page] = field(default_factory=set)
    may_leave: set[str] = field(default_factory=set)
    holes: dict[Page, set[str]] = field(default_factory=dict)
    _syncing: list[tuple[Durable, set[Page]]] = field(default_factory=list)
    _burying: list[tuple[Durable, set[Page]]] = field(default_factory=list)

    def writing(self) -> set[Page]:
        """Pages that are granted, and not READY."""
        return {page for put in self.puts.values() for page in put.alive}

    # ---- what the table says ------------------------------------------------------------------

    def follow(self, table: PageTable) -> None:
        """Apply all actions, and check each against what must never happen."""
        actions, table.actions[:] = list(table.actions), []
        for one in actions:
            if isinstance(one, Abandoned):
                self._abandoned(one)
                continue
            pages = [self.names.page(one.space.identity, one.shard, name) for name in one.keys]
            match one:
                case Stored():
                    self._runs_on(pages, one.parent, one.tokens)
                    for page in pages:
                        assert page not in self.pages, "stored twice"
                        self.pages[page] = self.committing.pop(page)
                case TierStored():
                    self._runs_on(pages, one.parent, one.tokens)
                    for page in pages:
                        kept = self.pages[page]
                        assert one.tier not in kept.tiers, "it is there already"
                        assert one.tier != "ssd" or not kept.keep.memory_only
                        kept.tiers.add(one.tier)
                case TierRemoved():
                    for page in pages:
                        self.pages[page].tiers.remove(one.tier)
                        assert self.pages[page].tiers, "it is nowhere now, and still in the index"
                        if one.tier == "ssd":
                            self.durable.discard(page)
                case Removed():
                    self._removed(pages, one)
        self._acknowledge()

    def _runs_on(self, pages: list[Page], parent: PrefixKey, tokens: bytes) -> None:
        """Assert that pages follow each other, and have these tokens if any are told."""
        path = PATH_OF[parent]
        for at, page in enumerate(pages):
            assert page[1][:-1] == path, "told as following another page"
            path = page[1]
            letter = tokens[4 * at : 4 * at + 4].decode("utf-32-le")
            assert letter in ("", path[-1]), "told with the tokens of another page"
        assert len(tokens) in (0, 4 * len(pages))

    def _removed(self, pages: list[Page], action: Removed) -> None:
        pinned = [lease for lease in self.leases.values() if lease.until_ns > self.now_ns]
        leased = {content for lease in pinned for _, content in lease.slots}
        for page in pages:
            kept = self.pages.pop(page)
            assert kept.tiers == set(action.tiers)
            self.durable.discard(page)
            number, path, shard = page
            if action.cause in self.leave(page, action.cause):
                continue  # with a page before it
            heads = [self.pages.get((number, path[:end], shard)) for end in range(1, len(path))]
            keeps = [kept.keep, *(head.keep for head in heads if head is not None)]
            match action.cause:
                case "evicted":
                    assert kept.tiers == {"host"}
                    assert (page, kept.digest) not in leased, "evicted under a lease"
                case "expired":
                    assert any(0 < keep.expires_ns <= self.now_ns for keep in keeps)
                case "read_once":
                    assert any(keep.read_once for keep in keeps)
                case "reclaimed":
                    chain = [kept, *(head for head in heads if head is not None)]
                    assert any(one.tiers == {"ssd"} for one in chain), "what is in memory stays"
                case cause:
                    assert cause in self.may_leave, f"{page} has left: {cause}"

    def leave(self, page: Page, cause: str) -> set[str]:
        """A page has left; returns why those before it did whose followers leave in turns."""
        number, path, shard = page
        if cause in BURIED:
            self.buried.add(page)
        if shard == WINDOW_SHARD:
            return set()
        behind = self._behind(page)
        self.durable -= behind  # a start finds none of them
        if behind:
            self.holes.setdefault(page, set()).add(cause)
        heads = [(number, path[:end], shard) for end in range(1, len(path))]
        return set[str]().union(*(self.holes.get(head, ()) for head in heads))

    def _behind(self, head: Page) -> set[Page]:
        """The pages of a shard that follow a page."""
        number, path, shard = head
        return {
            page
            for page in self.pages.keys() | self.writing()
            if page[0] == number and page[2] == shard and page[1].startswith(path) and page != head
        }

    def _abandoned(self, action: Abandoned) -> None:
        """The action does not say of which shard; the tree does."""
        at = MODELS.index(action.space.identity)
        gone = {PATH_OF[name] for name in action.keys}
        for put in self.puts.values():
            for page, slot in put.pages:
                left = page in put.alive and page[0] == at and page[1] in gone
                if left and self.names.slot(page) != slot:
                    put.alive.discard(page)
                    self.leave(page, "head_lost")

    # ---- promises -----------------------------------------------------------------------------

    def await_durable(self, durable: Durable, pages: set[Page]) -> None:
        """Pages are on their way to the disk; their put is acknowledged once they are synced."""
        self._syncing.append((durable, pages))

    def await_buried(self, durable: Durable) -> None:
        """All that was taken out on purpose until now stays away once this is acknowledged."""
        self._burying.append((durable, self.buried))
        self.buried = set()

    def written_again(self, page: Page) -> None:
        """Its newest record is newer than its tombstone: it may be found again."""
        for pages in (self.gone, self.buried, *(pages for _, pages in self._burying)):
            pages.discard(page)

    def _acknowledge(self) -> None:
        for durable, pages in self._syncing:
            if durable.ended and durable.error is None:
                for page in pages:
                    assert "ssd" in self.pages[page].tiers, "acknowledged, and not on disk"
                self.durable |= pages
        for durable, pages in self._burying:
            if durable.ended and durable.error is None:
                self.gone |= pages
        self._syncing = [one for one in self._syncing if not one[0].ended]
        self._burying = [one for one in self._burying if not one[0].ended]

    def found_at_start(self, before: "PlainPages") -> None:
        """The files are those of an earlier life: what a start finds, and what it must not."""
        expected = self.files.reachable()
        assert before.durable <= expected.keys(), "what was acknowledged as durable is lost"
        assert not before.gone & expected.keys(), "what was taken out on purpose is there again"
        for page, record in expected.items():
            assert record.content is not None
            self.pages[page] = Kept(record.content[1], set(), Retention())
        self.durable, self.gone = set(expected), before.gone

    # ---- what must hold -----------------------------------------------------------------------

    def check(self) -> None:
        """Assert that the table has all and only these pages, where they are here."""
        found: set[Page] = set()
        present: set[Page] = set()
        for at, space in enumerate(self.names.spaces):
            for node in set(space.index.values()):
                for position in range(node.count):
                    page = at, PATH_OF[node.key_at(position)], 0
                    if position or node.above is not space.root:
                        assert node.key_before(position) == key(page[1][:-1])
                    letter = node.tokens[4 * position : 4 * position + 4].decode("utf-32-le")
                    assert letter in ("", page[1][-1])
                    for shard, number in enumerate(self.names.shards[at]):
                        if node.present >> number & 1:
                            present.add((*page[:2], shard))
                        if node.ready >> number & 1:
                            found.add((*page[:2], shard))
                            self._check_page((*page[:2], shard), node, number, position)
        assert found == self.pages.keys()
        assert present == found | self.writing()
        self.holes = {page: causes for page, causes in self.holes.items() if self._behind(page)}
        self._check_closed(present)
        self._check_lookups(present)
        for lease in self.leases.values():
            for slot, content in lease.slots:
                assert self.content[slot] == content, "what is lent changed"

    def check_settled(self, log: SegmentLog) -> None:
        """Assert that the log counts these records, and no job."""
        on_disk = [page for page, kept in self.pages.items() if "ssd" in kept.tiers]
        sizes = [self.names.record_bytes(page) for page in on_disk]
        assert log.stats().live_bytes == sum(sizes)
        assert not any(one.writing or one.readers for one in log.segments.values())

    def _check_page(self, page: Page, node: PrefixNode, shard: int, position: int) -> None:
        kept = self.pages[page]
        assert node.digest_at(shard, position) == kept.digest
        assert set(node.tiers(shard)) == kept.tiers
        assert node.expires.get(shard, 0) == kept.keep.expires_ns
        assert node.read_once >> shard & 1 == kept.keep.read_once
        assert node.memory_only >> shard & 1 == kept.keep.memory_only
        if "host" in kept.tiers:
            assert self.content[node.slots_of(shard)[position]] == (page, kept.digest)
        if "ssd" in kept.tiers:
            record = self.files.at(node.place_at(shard, position))
            assert record.content == (page, kept.digest)

    def _check_lookups(self, present: set[Page]) -> None:
        """Assert that a lookup finds no page behind one that has left before it."""
        for page in {page for head in self.holes for page in self._behind(head)}:
            at, path, shard = page
            number, packed = self.names.shards[at][shard], b"".join(chain(path))
            match = longest_match(self.names.spaces[at], [number], packed)
            assert match.pages == longest(self.pages, at, path, [shard])
            assert match.pages + match.pending == longest(present, at, path, [shard])

    def _check_closed(self, present: set[Page]) -> None:
        on_disk = {page for page, kept in self.pages.items() if "ssd" in kept.tiers}
        for number, path, shard in present:
            if shard != WINDOW_SHARD and len(path) > 1:
                head = (number, path[:-1], shard)
                if head in self.holes:
                    assert head not in present, "filled before what followed it has left"
                    continue
                assert head in present, f"{path} lost its head"
                assert (number, path, shard) not in on_disk or head in on_disk, "on disk without it"
