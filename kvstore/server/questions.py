"""Answers the questions of followers of KV events: which pages the node has.

A question comes from the publisher's thread. The answer is made on the loop that owns the state, in
turns, and a follower that does not read stops it. :mod:`kvstore.state.ask.inventory` says why a
snapshot that was made in turns is exact with the events that follow it.
"""

import asyncio
import random
from collections.abc import Iterator
from time import monotonic
from typing import Final

from kvstore.events.publisher import wall_clock
from kvstore.events.questions import (
    AUDIT,
    END,
    HEAD,
    MESSAGE_KEYS,
    PAGES,
    SNAPSHOT,
    TIERS,
    HeldEvent,
    OpenQuestion,
    RefusedError,
    encode_keys,
)
from kvstore.node.desk import Desk
from kvstore.protocol.page import KEY_BYTES
from kvstore.server.publish import MEDIA, Publication
from kvstore.server.turns import Turns, Work
from kvstore.state.ask.inventory import HOST, SSD, HeldPages, sample, shard_of, tiers_of, walk
from kvstore.state.tree.prefix_tree import PrefixTree

_POLL_S: Final = 0.005
"""How often the node looks whether a follower has read."""
_BITS: Final = {"host": HOST, "ssd": SSD}


class FollowerQuestions:
    """The questions that are answered now; create it on the running loop of the desk.

    Args:
        desk: the node's desk.
        publication: its events; their sequence is the time of an answer.
    """

    def __init__(self, desk: Desk, publication: Publication) -> None:
        self._table = desk.node.pages
        self._publication = publication
        self._turns = Turns(desk, "a question of a follower")
        self._loop = asyncio.get_running_loop()
        publication.answer_with(self._ask)

    def close(self) -> None:
        """Answer no more; the loop may have ended."""
        self._publication.answer_with(None)
        self._turns.close()

    def _ask(self, question: OpenQuestion) -> None:
        """Take a question, on the publisher's thread.

        Raises:
            RefusedError: the node is stopping.
        """
        try:
            self._loop.call_soon_threadsafe(self._begin, question)
        except RuntimeError as error:  # the loop is closed
            raise RefusedError("unavailable", "the node is stopping") from error

    def _begin(self, question: OpenQuestion) -> None:
        asked = question.asked
        if asked.kind == AUDIT:
            work = self._audit(question)
        elif asked.kind == SNAPSHOT:
            work = self._pages(question, walk(self._table))
        else:
            chosen = sample(self._table, asked.keys, random.randrange, random.random)
            work = self._pages(question, chosen)
        self._turns.start(work, lambda _: None, asked.kind.decode())

    def _pages(self, question: OpenQuestion, steps: Iterator[list[HeldPages]]) -> Work[None]:
        """Send the pages of some steps."""
        self._head(question)
        pages, message = 0, _PagesMessage()
        for held in steps:
            message.add(held)
            if message.keys >= MESSAGE_KEYS:
                pages += message.keys
                question.put(PAGES, message.batch())
                message = _PagesMessage()
                while question.is_full and not _is_over(question):
                    yield _POLL_S
            if _is_over(question):
                return
            yield None
        if message.keys:
            pages += message.keys
            question.put(PAGES, message.batch())
        yield from self._end(question, pages)

    def _audit(self, question: OpenQuestion) -> Work[None]:
        """Send the tiers of some pages; a space or shard that is not known has none."""
        self._head(question)
        asked, found = question.asked, bytearray()
        where = shard_of(self._table, asked.space, asked.shard)
        yield None
        for tiers in tiers_of(*where, asked.packed) if where is not None else ():
            found += tiers
            yield None
        media = [MEDIA[tier] for tier, _ in sorted(_BITS.items(), key=lambda one: one[1])]
        tiers = bytes(found) or bytes(asked.keys)
        question.put(TIERS, {"media": media, "tiers": tiers})
        yield from self._end(question, asked.keys - tiers.count(0))

    def _head(self, question: OpenQuestion) -> None:
        publication = self._publication
        head = {"boot": publication.boot, "sequence_first": publication.sequence_next}
        question.put(HEAD, head)

    def _end(self, question: OpenQuestion, pages: int) -> Work[None]:
        """End an answer once the events of all that it has seen are numbered."""
        yield 0.0  # the desk publishes at the end of a turn
        end = {"sequence_end": self._publication.sequence_next, "pages": pages}
        question.put(END, end)


class _PagesMessage:
    """Pages that are sent together.

    Attributes:
        keys: how many.
    """

    def __init__(self) -> None:
        self.keys = 0
        self._held: dict[tuple[int, int, str], tuple[PrefixTree, bytearray]] = {}

    def add(self, held: list[HeldPages]) -> None:
        """Add some pages."""
        for space, shard, tier, packed in held:
            self.keys += len(packed) // KEY_BYTES
            _, known = self._held.setdefault((space.number, shard, tier), (space, bytearray()))
            known += packed

    def batch(self) -> list[object]:
        """The message, as an :class:`~kvstore.events.publisher.EventBatch` is encoded."""
        events = [
            HeldEvent(
                block_hashes=encode_keys(packed),
                block_size=space.identity.page_tokens,
                medium=MEDIA[tier],
                space=space.label,
                shard=shard,
                shard_digest=space.shards[shard].event_label,
                group=space.shards[shard].spec.group,
                window_pages=space.shards[shard].window_pages,
            )
            for (_, shard, tier), (space, packed) in self._held.items()
        ]
        return [wall_clock(), events, None]


def _is_over(question: OpenQuestion) -> bool:
    """Whether nobody waits for the answer any more."""
    return question.given_up or monotonic() > question.deadline
