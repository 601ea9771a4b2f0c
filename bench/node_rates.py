"""How fast a node puts, lends and looks up pages, alone and in CPU time.

Seconds are those for which the thread had a core, so that work beside it counts little. What the
collector takes is part of them. Messages are made before; prompts have 128 pages. What is leased
and looked up was put with one message a prompt, whatever the cases before it put.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from random import Random
from time import perf_counter, thread_time
from typing import Final, NamedTuple

from bench.node_alone import Clock, Engine, LoneNode
from kvstore.protocol import wire
from kvstore.protocol.page import KEY_BYTES
from kvstore.state.choice.eviction import GRACE_NS

FULL_PAGES: Final = 131_072
"""Of the nodes of these cases: 8 GiB of pages of 64 KiB."""
READ_PAGES_MIN: Final = 4096
"""Of the node of a lookup: twice its pages."""
PROMPT_PAGES: Final = 128
CALL_PROMPTS: Final = 16
BOUND_PAGES: Final = 262_144
"""Keys in the bound's dict: too many for the caches, as those of a node are."""
ROUNDS_MIN: Final = 3
LEASES: Final = 64
LOOKUP_PAGES: Final = 32_768
"""That one call looks up."""
PROMPTS_READ: Final = 256
"""Prompts that leases and lookups go round in."""
POLICIES: Final = ("lru", "kvstore")
SIZES: Final = (128, 8)
"""Pages a message."""
AGES: Final = ("old", "young")
SSD: Final = "+ssd"
READS: Final = ("acquire/128", "lookup/128", "lookup/2048")
MESSAGE_S: Final = 0.001
"""Simulated time between two prompts: a full node's pages come and go within their grace."""
OLD_S: Final = 1.1 * GRACE_NS / 1e9

Measured = Callable[[], float]
"""Does its pages once; the seconds of CPU time that took."""


class Rate(NamedTuple):
    """What a case and its bound took, in all of their calls.

    Attributes:
        pages: of one call of either.
        calls: of each of the two.
    """

    pages: int
    calls: int
    case_s: float
    bound_s: float

    @property
    def pages_per_s(self) -> float:
        """Pages a second of CPU time."""
        return self.pages * self.calls / self.case_s

    @property
    def bound_pages_per_s(self) -> float:
        """What the bound does."""
        return self.pages * self.calls / self.bound_s


def names() -> list[str]:
    """The cases, in the order in which they are measured best."""
    found = [f"put/fresh/{size}/{policy}" for policy in POLICIES for size in SIZES]
    for policy in POLICIES:
        for tier in ("", SSD):
            found += [f"put/full/{size}/{age}{tier}/{policy}" for age in AGES for size in SIZES]
            found += [f"{case}{tier}/{policy}" for case in READS]
    return found


class Rates:
    """All cases; a node that is full is used again.

    Args:
        pages: of a full node, at most.
        seconds: of CPU time, at least, for a case.
    """

    def __init__(self, pages: int, seconds: float) -> None:
        self._pages = min(pages, FULL_PAGES)
        self._seconds = seconds
        self._bound_pages = min(BOUND_PAGES, 2 * self._pages)
        self._bound = dict_bound(self._bound_pages)
        self._full: tuple[tuple[int, str, bool], FullNode] | None = None

    def bound(self) -> float:
        """The bound itself, pages a second."""
        pages = self._bound_pages
        return rate(pages, partial(self._bound, pages), self._bound, self._seconds).pages_per_s

    def measure(self, name: str) -> Rate:
        """Measure one of :func:`names`."""
        case, _, policy = name.rpartition("/")
        verb, *rest = case.removesuffix(SSD).split("/")
        if rest[0] == "fresh":
            self._full = None
            return self._rate(fresh_puts(self._pages, policy, int(rest[1])))
        ssd = case.endswith(SSD)
        pages = self._pages if verb == "put" else max(self._pages, READ_PAGES_MIN)
        if self._full is None or self._full[0] != (pages, policy, ssd):
            self._full = None  # two do not fit small machines
            self._full = (pages, policy, ssd), FullNode(pages, policy, ssd=ssd)
        node = self._full[1]
        if verb == "put":
            return self._rate(node.puts(int(rest[1]), old=rest[2] == "old"))
        if verb == "acquire":
            return self._rate(node.leases())
        return self._rate(node.lookups(int(rest[0])))

    def _rate(self, case: "Calls") -> Rate:
        return rate(case.pages, case.call, self._bound, self._seconds)


class Calls(NamedTuple):
    """What one call of a case does, and how many pages that is."""

    pages: int
    call: Measured


def rate(pages: int, case: Measured, bound: Callable[[int], float], seconds: float) -> Rate:
    """Call a case and its bound in turns, after one call of each that does not count."""
    case()
    bound(pages)
    calls, case_s, bound_s = 0, 0.0, 0.0
    deadline = perf_counter() + 60 * seconds  # where the thread hardly ever has a core
    while calls < ROUNDS_MIN or (case_s < seconds and perf_counter() < deadline):
        case_s += case()
        bound_s += bound(pages)
        calls += 1
    return Rate(pages, calls, case_s, bound_s)


def dict_bound(keys: int) -> Callable[[int], float]:
    """What the interpreter does at best: keys sliced from messages, and put into a dict.

    Args:
        keys: in the dict, at the end.

    Returns:
        takes a number of pages, gives the seconds for so many.
    """
    random = Random(1)
    message_bytes = PROMPT_PAGES * KEY_BYTES
    messages = [random.randbytes(message_bytes) for _ in range(-(-keys // PROMPT_PAGES))]

    def bound(pages: int) -> float:
        found: dict[bytes, int] = {}
        begin = thread_time()
        for message in messages:
            for at in range(0, len(message), KEY_BYTES):
                found[message[at : at + KEY_BYTES]] = at
        return (thread_time() - begin) * pages / len(found)

    return bound


class Node:
    """A node with one engine whose prompts have :data:`PROMPT_PAGES` pages.

    Args:
        pages: that its memory holds.
        policy: what goes first.
        ssd: it has an SSD tier that always has room.
    """

    def __init__(self, pages: int, policy: str, *, ssd: bool = False) -> None:
        self.clock = Clock()
        self.lone = LoneNode(pages, policy, self.clock, ssd_pages=0 if ssd else None)
        self.engine = Engine(self.lone, 1)
        self.prompts: list[tuple[int, bytes]] = []
        """When each prompt was stored, and its keys."""

    @property
    def call_prompts(self) -> int:
        """Prompts of one call: few enough that none evicts what it has put itself."""
        return max(1, min(CALL_PROMPTS, self.lone.pages_max // PROMPT_PAGES // 4))

    def put(self, prompts: int, size: int) -> float:
        """Put so many new prompts, ``size`` pages a message; seconds."""
        messages = []
        for _ in range(prompts):
            keys, parent = self.lone.keys(PROMPT_PAGES), b""
            self.prompts.append((self.clock.now_ns, keys))
            pairs = []
            for part in _parts(keys, size):
                pairs.append(self.engine.put_messages(part, parent))
                parent = part[-KEY_BYTES:]
            messages.append(pairs)
        clock, carry_out = self.clock, self.engine.carry_out
        step_ns = int(MESSAGE_S * 1e9)
        begin = thread_time()
        for pairs in messages:
            clock.now_ns += step_ns
            for begin_put, commit in pairs:
                carry_out(begin_put, commit)
        return thread_time() - begin


def fresh_puts(pages: int, policy: str, size: int) -> Calls:
    """Puts to a node that has room; when it has none there is another."""
    node = Node(pages, policy)
    prompts = node.call_prompts

    def call() -> float:
        nonlocal node
        if (len(node.prompts) + prompts) * PROMPT_PAGES > node.lone.pages_max:
            node = Node(pages, policy)
        return node.put(prompts, size)

    return Calls(prompts * PROMPT_PAGES, call)


class FullNode(Node):
    """A node whose memory is full of prompts that were put and never used."""

    def __init__(self, pages: int, policy: str, *, ssd: bool = False) -> None:
        super().__init__(pages, policy, ssd=ssd)
        self.put(self.lone.pages_max // PROMPT_PAGES, PROMPT_PAGES)

    def puts(self, size: int, *, old: bool) -> Calls:
        """Puts that evict ``old`` pages, or young ones."""

        def call() -> float:
            if old:
                self.clock.skip(OLD_S)
            return self.put(self.call_prompts, size)

        # Of the pages that are there some are old. They go first: all are to be young.
        if not old:
            self.put(self.lone.pages_max // PROMPT_PAGES, PROMPT_PAGES)
        return Calls(self.call_prompts * PROMPT_PAGES, call)

    def leases(self) -> Calls:
        """Leases of prompts, each given back at once."""
        prompts = cycle(self._there())
        desk, connection, answers = self.lone.desk, self.engine.connection, self.engine.answers

        def call() -> float:
            pairs = []
            for _ in range(LEASES):
                acquire = self.engine.acquire_message(next(prompts))
                pairs.append((acquire, wire.Release(acquire.lease)))
            begin = thread_time()
            for acquire, release in pairs:
                desk.receive(connection, acquire)
                desk.receive(connection, release)
            seconds = thread_time() - begin
            for answer in answers:
                assert isinstance(answer, wire.Acquired), answer
                assert len(answer.addresses) == PROMPT_PAGES * wire.ADDRESS.itemsize
            assert len(answers) == LEASES
            answers.clear()
            return seconds

        return Calls(LEASES * PROMPT_PAGES, call)

    def lookups(self, pages: int) -> Calls:
        """Lookups of prompts of so many pages, all hits."""
        if pages > PROMPT_PAGES:
            keys = self.lone.keys(pages)
            for part in _parts(keys, PROMPT_PAGES):
                at = keys.index(part)
                self.engine.put(part, keys[at - KEY_BYTES : at] if at else b"")
            prompts = cycle([keys])
        else:
            prompts = cycle(self._there())
        lookups = LOOKUP_PAGES // pages
        desk, connection, answers = self.lone.desk, self.engine.connection, self.engine.answers

        def call() -> float:
            messages = [self.engine.lookup_message(next(prompts)) for _ in range(lookups)]
            begin = thread_time()
            for message in messages:
                desk.receive(connection, message)
            seconds = thread_time() - begin
            for answer in answers:
                assert isinstance(answer, wire.Found), answer
                assert answer.pages == pages
            assert len(answers) == lookups
            answers.clear()
            return seconds

        return Calls(lookups * pages, call)

    def _there(self) -> list[bytes]:
        """New prompts that were put 128 pages a message, all of which is in memory."""
        self.put(min(PROMPTS_READ, self.lone.pages_max // PROMPT_PAGES), PROMPT_PAGES)
        found = []
        for _, keys in reversed(self.prompts):
            if self.engine.in_memory(keys) == PROMPT_PAGES:
                found.append(keys)
            if len(found) == PROMPTS_READ:
                break
        assert found, "no prompt is whole any more"
        return found


def _parts(keys: bytes, pages: int) -> Iterator[bytes]:
    """So many keys at a time."""
    size = pages * KEY_BYTES
    return (keys[at : at + size] for at in range(0, len(keys), size))
