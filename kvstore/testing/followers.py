"""A simulated follower of a node's events: checks that it knows the place of every page."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from kvstore.events.publisher import BlockHash, Event, RemovedEvent, StoredEvent
from kvstore.protocol.page import KEY_BYTES
from kvstore.server.publish import MEDIA, events_of
from kvstore.state.ask.inventory import HeldPages, walk
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.actions import Action

Page = tuple[object, object, BlockHash]
"""Space, shard, key."""


def page_token(key: BlockHash) -> bytes:
    """The only token of a page in simulations; different for the pages of one prompt."""
    assert isinstance(key, bytes)
    return key[:4]


class KnownPages:
    """Two indexes: one with the media of each page, one that ignores media.

    Again and again it also makes a third one, of a snapshot and the events since that began.
    """

    def __init__(self) -> None:
        self._snapshot: Iterator[list[HeldPages]] | None = None
        self._shown: dict[Page, set[str]] = defaultdict(set)
        self._since: list[Event] = []
        self._media: dict[Page, set[str]] = defaultdict(set)
        self._plain: set[Page] = set()

    def begin(self, table: PageTable) -> None:
        """A follower learns what is there from a snapshot, before the first event."""
        for step in walk(table):
            for space, shard, tier, packed in step:
                for at in range(0, len(packed), KEY_BYTES):
                    page = (space.label, shard, packed[at : at + KEY_BYTES])
                    self._media[page].add(MEDIA[tier])
                    self._plain.add(page)

    def follow(self, actions: Sequence[Action]) -> None:
        """Apply the events that the node publishes."""
        for event in events_of(actions, tokens=True):
            assert isinstance(event, StoredEvent | RemovedEvent)
            self._since.append(event)
            if isinstance(event, StoredEvent) and event.token_ids:
                tokens = [int.from_bytes(page_token(one), "little") for one in event.block_hashes]
                assert event.token_ids == tokens, "the tokens of other pages"
            for one in event.block_hashes:
                page = (event.space, event.shard, one)
                if isinstance(event, StoredEvent):
                    self._media[page].add(event.medium)
                    self._plain.add(page)
                else:
                    assert event.medium in self._media[page], "removed from where it never was"
                    self._media[page].remove(event.medium)
                    self._plain.discard(page)

    def check(self, table: PageTable) -> None:
        """Assert that both indexes match the page table."""
        there: dict[Page, set[str]] = {}
        for space in table.spaces:
            for node in space.nodes.values():
                assert node.tokens in (b"", page_token(node.key)), "the tokens of another page"
                for shard in node.digests:
                    media = {MEDIA["host"]} if shard in node.slots else set()
                    media |= {MEDIA["ssd"]} if shard in node.disk else set()
                    there[space.label, shard, node.key] = media
        assert {page: media for page, media in self._media.items() if media} == there
        assert self._plain == there.keys()
        self._go_on(table, there)

    def _go_on(self, table: PageTable, there: dict[Page, set[str]]) -> None:
        """Take the next step of the snapshot; after the last one it must match, with the events."""
        if self._snapshot is None:
            self._snapshot = walk(table)
            self._shown.clear()
            self._since.clear()
        held = next(self._snapshot, None)
        for space, shard, tier, packed in held or ():
            for at in range(0, len(packed), KEY_BYTES):
                self._shown[space.label, shard, packed[at : at + KEY_BYTES]].add(MEDIA[tier])
        if held is not None:
            return
        for event in self._since:
            assert isinstance(event, StoredEvent | RemovedEvent)
            for one in event.block_hashes:
                media = self._shown[event.space, event.shard, one]
                if isinstance(event, StoredEvent):
                    media.add(event.medium)
                else:
                    media.discard(event.medium)
        assert {page: media for page, media in self._shown.items() if media} == there
        self._snapshot = None
