"""The KV that moves to and from one engine, and how long that takes. Pure.

::

    assigned ──► a fetch is in flight ──► computed ──► the engine tells how long it took
    Continue ──► a handoff is in flight ──► first token at the decode engine

A fetch brings the beginning of a prompt to the engine that computes the rest: from the memory of
its node, from the disk of its node, or from another node over the network. A handoff brings all of
it to the engine that decodes. A fetch that begins counts as if what is in flight arrived first. A
handoff has an equal share of its links with all others that are in flight.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from conductor.costs.book import EngineCosts


class FetchedTokens(NamedTuple):
    """Tokens of a prompt that an engine brings to itself, by where they are.

    Attributes:
        memory: in the memory of its node.
        disk: on the disk of its node.
        network: at another node.
    """

    memory: float = 0.0
    disk: float = 0.0
    network: float = 0.0


NO_FETCH: Final = FetchedTokens()


class Restored(NamedTuple):
    """What an engine tells of a fetch that has ended.

    Attributes:
        tokens: of the prompt that it brought to itself, more than 0.
        seconds: how long that took.
    """

    tokens: int
    seconds: float


@dataclass(slots=True)
class _Fetch:
    """A fetch, until its request leaves the engine.

    Attributes:
        tokens: what is fetched.
        ahead: what was in flight before it.
        moves: whether it is in flight.
    """

    tokens: FetchedTokens
    ahead: FetchedTokens
    moves: bool = True


@dataclass(slots=True)
class SharedLink:
    """One direction of an engine's network, of which handoffs in flight have equal shares.

    Attributes:
        count: handoffs in flight.
        alone_s: seconds up to ``at``, each divided by the handoffs in flight: for so long one that
            was there all the time would have used the link alone.
        at: time of the last change.
    """

    count: int = 0
    alone_s: float = 0.0
    at: float = 0.0

    def change(self, more: int, now: float) -> float:
        """So many handoffs more are in flight, or fewer; returns ``alone_s`` up to now."""
        self.alone_s += max(0.0, now - self.at) / max(1, self.count)
        self.at = max(self.at, now)
        self.count += more
        assert self.count >= 0
        return self.alone_s


class _Handoff(NamedTuple):
    """A handoff in flight.

    Attributes:
        tokens: tokens of the prompt that the decode engine did not have.
        since: time at which the handoff began.
        transfer_s: seconds that the slower of both links takes by its datasheet, if it does nothing
            else.
        links: links that the handoff uses, and ``alone_s`` of each when it began.
    """

    tokens: int
    since: float
    transfer_s: float
    links: Sequence[tuple[SharedLink, float]]

    def end(self, now: float) -> float:
        """It has ended; returns how many shared the fuller link, in the mean."""
        alone_s = min(link.change(-1, now) - began for link, began in self.links)
        passed = now - self.since
        return passed / alone_s if 0.0 < alone_s < passed else 1.0


@dataclass(slots=True)
class MovingKv:
    """Of one engine.

    Attributes:
        fetches: by request.
        handoffs: to it, by request.
        incoming: its network, to it.
        outgoing: its network, from it.
    """

    fetches: dict[int, _Fetch] = field(default_factory=dict)
    handoffs: dict[int, _Handoff] = field(default_factory=dict)
    incoming: SharedLink = field(default_factory=SharedLink)
    outgoing: SharedLink = field(default_factory=SharedLink)

    @property
    def in_flight(self) -> FetchedTokens:
        """Tokens that are on their way to it, those of handoffs with the others of the network."""
        memory = disk = 0.0
        network = float(sum(one.tokens for one in self.handoffs.values()))
        for one in self.fetches.values():
            if one.moves:
                memory += one.tokens.memory
                disk += one.tokens.disk
                network += one.tokens.network
        return FetchedTokens(memory, disk, network)

    def fetch(self, number: int, tokens: FetchedTokens) -> None:
        """A fetch begins."""
        if any(tokens):
            self.fetches[number] = _Fetch(tokens, self.in_flight)

    def computed(self, number: int) -> None:
        """The prompt of a request is computed, so nothing is fetched for it any more."""
        if number in self.fetches:
            self.fetches[number].moves = False

    def restored(self, number: int, report: Restored, costs: EngineCosts) -> None:
        """Learn how long a fetch took.

        Where the pages were is as it was thought at the assignment. If there were fewer, all parts
        are smaller; what nobody knew of was in the memory of the node.
        """
        one = self.fetches.pop(number, None)
        tokens, ahead = (one.tokens, one.ahead) if one is not None else (NO_FETCH, NO_FETCH)
        thought = sum(tokens)
        part = min(1.0, report.tokens / thought) if thought else 0.0
        rest = max(0.0, report.tokens - thought)
        memory, disk, network = (
            (own * part + before) if own else 0.0 for own, before in zip(tokens, ahead, strict=True)
        )
        size = costs.prior.kv_bytes(1)
        costs.fetched((memory + rest) * size, disk * size, network * size, report.seconds)

    def hand_over(
        self, number: int, tokens: int, transfer_s: float, sender: SharedLink | None, now: float
    ) -> None:
        """A handoff to the engine begins.

        Args:
            number: of the request.
            tokens: of its prompt that the engine does not have.
            transfer_s: that the slower of both links takes by its datasheet.
            sender: the link from where it comes; None = unknown.
            now: time.
        """
        links = [self.incoming] if sender is None else [self.incoming, sender]
        began = [(link, link.change(1, now)) for link in links]
        self.handoffs[number] = _Handoff(tokens, now, transfer_s, began)

    def arrived(self, number: int, now: float, costs: EngineCosts) -> None:
        """A request has its first token at the engine: learn how long the handoff took."""
        one = self.handoffs.pop(number, None)
        if one is not None:
            costs.handed_over(one.transfer_s * one.end(now), now - one.since)

    def left(self, number: int, now: float) -> None:
        """The engine has nothing to do any more with a request."""
        self.fetches.pop(number, None)
        handoff = self.handoffs.pop(number, None)
        if handoff is not None:
            handoff.end(now)

    def check(self) -> None:
        """Assert the invariants."""
        assert self.incoming.count == len(self.handoffs)
