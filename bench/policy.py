"""How many prompt blocks does each eviction policy keep until their reuse, and the optimum?

The policies are the store's own objects and rank the store's own tree; only slots and bytes are
left out. Every page is stored (no admission), a leaf is evicted when there is no room, and a
prompt that is being stored is in use. The optimum evicts the leaf whose next use is furthest.

``--prefill-tokens-per-s`` adds ``saved/POLICY/BLOCKS``: prefill seconds that the hits saved.
"""

import argparse
import heapq
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from bench.measure import Progress, Report, Result
from bench.trace import BLOCK_TOKENS, blocks
from kvstore.protocol.page import CanonicalLayout, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.choice.policies import POLICIES, new_policy
from kvstore.state.choice.policy import EvictionPolicy, enter, leave
from kvstore.state.tree.node import PrefixNode, is_live
from kvstore.state.tree.prefix_tree import PrefixTree, Shard
from kvstore.state.tree.slots import Slot

SLOT_BYTES: Final = 4096
NEVER: Final = 1 << 60
DAY_MS: Final = 86_400_000
TOKEN_BYTES: Final = 320 << 10
"""KV of one token of a 70B model with 8 KV heads in bfloat16: 80 layers x 2 x 8 x 128 x 2 bytes."""

_IDENTITY: Final = SpaceIdentity(model="trace", kv_dtype="uint8", page_tokens=BLOCK_TOKENS)
_SPEC: Final = ShardSpec(layout=CanonicalLayout(2048), layers=(0, 1), heads=(0, 1))
_DIGEST: Final = bytes(16)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one policy did: blocks asked for, found and stored."""

    asked: int
    hits: int
    stored: int

    @property
    def percent(self) -> float:
        """Hits in percent of the blocks asked for."""
        return 100 * self.hits / self.asked if self.asked else 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the simulator."""
    parser.add_argument("--trace", type=Path, required=True,
                        help="trace file: JSON lines with hash_ids")  # fmt: skip
    parser.add_argument("--capacity-blocks", default="1000,5000,10000,30000",
                        help="cache sizes, comma-separated")  # fmt: skip
    parser.add_argument("--policy", default=",".join(POLICIES),
                        help="eviction policies, comma-separated")  # fmt: skip
    parser.add_argument("--prefill-tokens-per-s", type=float, default=0.0,
                        help="prefill speed; if given, also print the time saved")  # fmt: skip
    parser.add_argument("--block-bytes", type=int, default=BLOCK_TOKENS * TOKEN_BYTES,
                        help="KV bytes of a block of 512 tokens")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Simulate and print; exit status 1 when there is no trace."""
    if not options.trace.exists():
        sys.stderr.write(f"there is no trace at {options.trace}\n")
        return 1
    trace = blocks(options.trace)
    requests = [request.hash_ids for request in trace]
    elapsed_ms = max(1, trace[-1].timestamp - trace[0].timestamp) if trace else 1
    capacities = [int(text) for text in options.capacity_blocks.split(",")]
    names = options.policy.split(",")
    with (
        Report(json=options.json) as report,
        Progress("policy", len(capacities) * (len(names) + 1)) as progress,
    ):
        for capacity in capacities:
            progress.step(f"optimum at {capacity}")
            optimum = simulate(requests, capacity, Furthest(requests))
            for name in ["optimum", *names]:
                outcome = optimum
                if name != "optimum":
                    progress.step(f"{name} at {capacity}")
                    outcome = simulate(requests, capacity, new_policy(name, SLOT_BYTES))
                _report(report, f"{name}/{capacity}", outcome, optimum, options)
                daily = outcome.stored * options.block_bytes * DAY_MS / elapsed_ms
                progress.note(
                    f"{name} at {capacity}: an L3 of this size writes {daily / 1e12:.1f} TB a day"
                    f" ({options.block_bytes} bytes a block)"
                )
    return 0


def _report(
    report: Report, case: str, outcome: Outcome, optimum: Outcome, options: argparse.Namespace
) -> None:
    best = optimum.percent
    ratio = outcome.percent / best if best else None
    report.add(Result(f"hit/{case}", outcome.percent, "%", "optimum", best, ratio))
    if options.prefill_tokens_per_s > 0:
        seconds = BLOCK_TOKENS / options.prefill_tokens_per_s
        saved, most = outcome.hits * seconds, optimum.hits * seconds
        report.add(Result(f"saved/{case}", saved, "s", "optimum", most, ratio))


class Simulation:
    """One tier of ``capacity`` pages of one size, and the policy that empties it."""

    def __init__(self, capacity: int, policy: EvictionPolicy) -> None:
        self.capacity = capacity
        self.policy = policy
        self.space = PrefixTree(0, _IDENTITY, [Shard(_SPEC, SLOT_BYTES, SLOT_BYTES)])
        self.tick = 0
        self.stored = 0

    def request(self, ids: Sequence[int]) -> int:
        """Look a prompt up, use what is there and store the rest; returns the blocks found."""
        self.tick += 1
        at, hits = self.space.root, 0
        keys = [PrefixKey(number.to_bytes(32, "little")) for number in ids]
        for key in keys:
            node = self.space.nodes.get(key)
            if node is None:
                break
            at, hits = node, hits + 1
        if hits:
            at.access = self.tick
            at.uses += 1
            self.policy.used(at, self.tick)
        for key in keys[hits:]:
            # In the tree before room is made, so that its ancestors are no leaves meanwhile.
            node = self.space.node(key, at.key)
            node.begin(0, Slot(0))
            node.access = self.tick
            if len(self.space.nodes) > self.capacity and not self._make_room(node):
                node.forget(0)
                at = self.space.prune(node)
                break
            node.commit(0, _DIGEST)
            self.stored += 1
            self.policy.stored(node, [key], self.tick)
            at = node
        if at is not self.space.root and not at.children:
            self.policy.add_candidate(at, self.tick)
        return hits

    def _make_room(self, wanted: PrefixNode) -> bool:
        victim = self.policy.pop(self.tick)
        while victim is not None and (victim.children or victim is wanted):
            victim = self.policy.pop(self.tick)
        if victim is None:
            return False
        victim.forget(0)
        bare = self.space.prune(victim)
        if bare is not self.space.root and not bare.children:
            self.policy.add_candidate(bare, self.tick)
        return True


def simulate(requests: Sequence[Sequence[int]], capacity: int, policy: EvictionPolicy) -> Outcome:
    """Run a whole trace, each request the ids of its blocks."""
    simulation = Simulation(capacity, policy)
    hits = sum(simulation.request(ids) for ids in requests)
    return Outcome(sum(map(len, requests)), hits, simulation.stored)


class Furthest:
    """The optimum: of the leaves, the one whose next use is furthest, never first.

    Args:
        requests: all that will come; request i is made at tick i + 1.
    """

    def __init__(self, requests: Sequence[Sequence[int]]) -> None:
        self.behind = False
        self._requests = requests
        self._next_uses: list[list[int]] = []
        coming: dict[int, int] = {}
        for at in range(len(requests) - 1, -1, -1):
            self._next_uses.append([coming.get(number, NEVER) for number in requests[at]])
            coming.update(dict.fromkeys(requests[at], at))
        self._next_uses.reverse()
        self._next: dict[bytes, int] = {}
        self._done = 0
        self._heap: list[tuple[int, int, PrefixNode]] = []
        self._sequence = 0

    def stored(self, node: PrefixNode, keys: list[PrefixKey], tick: int) -> None:
        """All is known already."""

    def used(self, node: PrefixNode, tick: int) -> None:
        """Its next use is another one now."""
        self.add_candidate(node, tick)

    def add_candidate(self, node: PrefixNode, tick: int) -> None:
        """Rank it by its next use as of now; older entries of it count no more."""
        while self._done < tick:
            ids, uses = self._requests[self._done], self._next_uses[self._done]
            for number, use in zip(ids, uses, strict=True):
                self._next[number.to_bytes(32, "little")] = use
            self._done += 1
        enter(node, SLOT_BYTES)
        self._sequence += 1
        heapq.heappush(self._heap, (-self._next[node.key], self._sequence, node))

    def forget(self, most: int) -> bool:  # noqa: ARG002
        """It is never replaced."""
        return True

    def sweep(self, most: int) -> int:  # noqa: ARG002
        """Its choices pass over whatever has left."""
        return 0

    def pop(self, tick: int) -> PrefixNode | None:  # noqa: ARG002
        """The leaf needed last."""
        while self._heap:
            rank, _, node = heapq.heappop(self._heap)
            if is_live(node) and node.queued and rank == -self._next[node.key]:
                leave(node, SLOT_BYTES)
                return node
        return None
