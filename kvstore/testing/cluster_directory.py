"""A simulated directory: each node follows the events of the others; it lags, lies or is away."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from kvstore.events.publisher import Event, RemovedEvent, StoredEvent
from kvstore.protocol.page import KEY_BYTES
from kvstore.server.publish import MEDIA, events_of
from kvstore.state.ask.inventory import walk
from kvstore.state.remote.jobs import Holding, Locate
from kvstore.state.table.pages import PageTable
from kvstore.state.tree.actions import Action
from kvstore.testing.cluster_wires import Circuit, CircuitEnd, Turn, Wires
from kvstore.testing.timeline import Timeline

Where = tuple[str, str, bytes]
"""Digest of the space, label of the shard, key."""
Known = dict[Where, set[str]]
"""The media of each page."""

MODES: Final = ("honest", "honest", "honest", "lies", "away")
"""One is chosen each time it changes."""
ANSWER_NS_MAX: Final = 3_000_000


def held_pages(table: PageTable) -> Known:
    """All pages of a node."""
    known: Known = defaultdict(set)
    for step in walk(table):
        for space, shard, tier, packed in step:
            label = space.shards[shard].event_label
            for at in range(0, len(packed), KEY_BYTES):
                known[space.label, label, packed[at : at + KEY_BYTES]].add(MEDIA[tier])
    return known


class SimulatedPublication:
    """The events of one life of a node, and who follows them."""

    def __init__(self, table: PageTable) -> None:
        self._table = table
        self._followers: list[Circuit] = []

    def accept(self, circuit: Circuit) -> None:
        """A node follows: it gets all pages there are, then what changes."""
        self._followers.append(circuit)
        circuit.send(1, {page: set(media) for page, media in held_pages(self._table).items()})

    def left(self, circuit: Circuit) -> None:
        """It does not follow any more."""
        if circuit in self._followers:
            self._followers.remove(circuit)

    def publish(self, actions: Sequence[Action]) -> None:
        """Tell all followers what has changed."""
        if self._followers:
            events = events_of(actions)
            for circuit in self._followers:
                circuit.send(1, events)


class SimulatedDirectory:
    """What one node knows of the others by their events.

    Args:
        time: timeline of the simulation.
        turn: of its node.
        peers: names of the other nodes.

    Attributes:
        mode: ``honest``, ``lies`` or ``away``.
    """

    def __init__(self, time: Timeline, turn: Turn, peers: Sequence[str]) -> None:
        self.mode = "honest"
        self._time = time
        self._random = time.random
        self._turn = turn
        self._peers = peers
        self._known: dict[str, Known] = {}

    def follow(self, wires: Wires, node: str, peer: str, turn: Turn, events: SimulatedPublication,
               again: Callable[[], None]) -> None:  # fmt: skip
        """Connect to a peer's publication; ``again`` is called when the connection is gone."""

        def closed() -> None:
            self._known.pop(peer, None)
            again()

        def left() -> None:
            events.left(circuit)

        circuit = wires.connect(
            CircuitEnd(peer, turn, lambda _: None, left),
            CircuitEnd(node, self._turn, lambda message: self._hear(peer, message), closed),
        )
        turn(lambda: events.accept(circuit))

    def knows(self, peer: str) -> Mapping[Where, set[str]]:
        """What it knows of a peer now."""
        known = self._known.get(peer, {})
        return {page: media for page, media in known.items() if media}

    def locate(self, asked: Locate, found: Callable[[int, Sequence[Holding]], None]) -> None:
        """See :class:`kvstore.cluster.side.Locating`."""
        if self.mode == "away":
            return
        holdings = self._invented(asked) if self.mode == "lies" else self._holdings(asked)
        delay_ns = self._random.randrange(ANSWER_NS_MAX)
        self._time.at(delay_ns, lambda: self._turn(lambda: found(asked.number, holdings)))

    def _hear(self, peer: str, message: Known | list[Event]) -> None:
        if isinstance(message, dict):
            self._known[peer] = defaultdict(set, message)
            return
        known = self._known[peer]
        for event in message:
            assert isinstance(event, StoredEvent | RemovedEvent)
            for key in event.block_hashes:
                page = (str(event.space), str(event.shard_digest), bytes(key))
                if isinstance(event, StoredEvent):
                    known[page].add(event.medium)
                else:
                    assert event.medium in known[page], "removed from where it never was"
                    known[page].discard(event.medium)

    def _holdings(self, asked: Locate) -> list[Holding]:
        space = asked.identity.digest.hex()
        labels = {shard.digest.hex()[:16]: shard.window_pages for shard in asked.shards}
        keys = [asked.keys[at : at + KEY_BYTES] for at in range(0, len(asked.keys), KEY_BYTES)]

        def is_hit(known: Known, pages: int) -> bool:
            return all(
                known.get((space, label, key))
                for label, window in labels.items()
                for key in keys[max(0, pages - window) if window else 0 : pages]
            )

        found: list[Holding] = []
        for peer, known in self._known.items():
            pages = next((n for n in range(len(keys), 0, -1) if is_hit(known, n)), 0)
            if pages:
                found.append(Holding(peer, pages))
        found.sort(key=lambda one: -one.pages)
        return found

    def _invented(self, asked: Locate) -> list[Holding]:
        most = len(asked.keys) // KEY_BYTES
        names = [*self._peers, "nobody"]
        chosen = self._random.sample(names, self._random.randrange(1, len(names) + 1))
        return [Holding(name, self._random.randrange(1, most + 1)) for name in chosen]
