"""All caches of a simulation, and where the KV of a prompt comes from. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from conductor.routing.columns import Matches
from conductor.simulator.caches import BlockCache, Expectations, Holders, Tiers
from conductor.simulator.trace import BLOCK_TOKENS, TracedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLimits:
    """Bounds of the caches of one engine and its node, in blocks.

    Attributes:
        local: of the engine's own memory.
        host: of the node's memory.
        disk: of the node's disk.
    """

    local: int
    host: int
    disk: int


class Sources(NamedTuple):
    """From where the KV of a prompt would come beyond the engine's own cache, in blocks.

    Attributes:
        start: blocks that the engine has, or has soon.
        host: next blocks from the memory of its node.
        disk: blocks among the next ones from the disk of its node.
        peer: engine whose node has the blocks behind these; None = nobody.
        more: how many that peer has.
    """

    start: int
    host: int
    disk: int
    peer: str | None
    more: int


class Caching:
    """The caches of all engines, and of their nodes: each engine has a node of its own."""

    def __init__(self, engines: dict[str, CacheLimits]) -> None:
        self._bits = {name: 1 << at for at, name in enumerate(engines)}
        self._names = {bit: name for name, bit in self._bits.items()}
        self._expected = Expectations()
        self._holders = Holders({}, {}, {}, self._expected.held)
        self._limits = engines
        local, host, disk = self._holders.local, self._holders.host, self._holders.disk
        self._local = {
            name: BlockCache(limits.local, local, self._bits[name])
            for name, limits in engines.items()
        }
        self._tiers = {
            name: Tiers(
                BlockCache(limits.host, host, self._bits[name]),
                BlockCache(limits.disk, disk, self._bits[name]),
            )
            for name, limits in engines.items()
        }

    def matches(self, request: TracedRequest) -> Matches:
        """The prefix of a prompt at each engine."""
        return self._holders.prefixes(request.blocks, request.tokens, self._names)

    def sources(self, request: TracedRequest, engine: str) -> Sources:
        """What an engine that gets a prompt now would find, besides in its own cache."""
        bit, blocks = self._bits[engine], request.blocks
        have = len(blocks) if len(blocks) * BLOCK_TOKENS < request.tokens else len(blocks) - 1
        local, expected, tiers = self._local[engine], self._expected.held, self._tiers[engine]
        at = 0
        while at < have and (blocks[at] in local or expected.get(blocks[at], 0) & bit):
            at += 1
        start = at
        host = disk = 0
        while at < have and blocks[at] in tiers:
            if blocks[at] in tiers.host:
                host += 1
            else:
                disk += 1
            at += 1
        peers, behind = ~bit, at
        while at < have:
            has = self._holders.host.get(blocks[at], 0) | self._holders.disk.get(blocks[at], 0)
            if not peers & has:
                break
            peers, at = peers & has, at + 1
        # Of several, one by chance, but always the same: the prompt's number decides.
        names = [name for name, one in self._bits.items() if peers & one] if at > behind else []
        peer = names[request.number % len(names)] if names else None
        return Sources(start, host, disk, peer, at - behind)

    def expect(self, request: TracedRequest, engine: str) -> None:
        """A prompt was sent to an engine, which will soon have its blocks."""
        self._expected.add(request.blocks, self._bits[engine])

    def unexpect(self, request: TracedRequest, engine: str) -> None:
        """The blocks are there, or the prompt has left."""
        self._expected.remove(request.blocks, self._bits[engine])

    def prefix(self, request: TracedRequest, engine: str, fetched: range) -> int:
        """Tokens that an engine need not compute which starts with a prompt now.

        Args:
            request: the prompt.
            engine: the engine.
            fetched: positions of blocks that were fetched for it.
        """
        local, count = self._local[engine], 0
        for at, block in enumerate(request.blocks):
            if at not in fetched and block not in local:
                break
            count = at + 1
        return min(count * BLOCK_TOKENS, request.tokens - 1)

    def fetched(self, request: TracedRequest, engine: str, blocks: range) -> None:
        """Blocks of a prompt at these positions were fetched: who comes next finds them."""
        self._local[engine].put(request.blocks[: blocks.stop] if blocks else ())

    def computed(self, request: TracedRequest, engine: str, reserved: int) -> None:
        """An engine has the KV of a prompt, and has stored it at its node.

        Args:
            request: the prompt.
            engine: the engine.
            reserved: tokens of KV that its requests hold now.
        """
        self.received(request, engine, reserved)
        self._tiers[engine].put(request.blocks)

    def received(self, request: TracedRequest, engine: str, reserved: int) -> None:
        """An engine has got the KV of a prompt from another."""
        local = self._local[engine]
        local.shrink(max(0, self._limits[engine].local - -(-reserved // BLOCK_TOKENS)))
        local.put(request.blocks)

    def brought(self, request: TracedRequest, engine: str, blocks: int) -> None:
        """The first blocks of a prompt were brought into the memory of an engine's node."""
        self._tiers[engine].put(request.blocks[:blocks])

    def lose(self, engine: str, *, node: bool) -> None:
        """An engine has died, with its own cache, and perhaps its node with the memory."""
        self._local[engine].clear()
        if node:
            self._tiers[engine].host.clear()

    def copies(self) -> dict[int, int]:
        """In the memories of how many nodes each block is; blocks that are in none are left out."""
        return {block: bits.bit_count() for block, bits in self._holders.host.items() if bits}

    def check(self, sent: Iterable[tuple[TracedRequest, str]]) -> None:
        """Assert that exactly the blocks of these prompts are expected, each at an engine."""
        self._expected.check([(one.blocks, self._bits[engine]) for one, engine in sent])
