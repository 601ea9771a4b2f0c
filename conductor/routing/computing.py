"""How long engines would take to compute prompts if no others came before. Pure.

Several prompts are priced at once: in a round with a long queue, each array operation on one prompt
takes longer to call than to compute.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from conductor.routing.columns import Column, CostInputs
from conductor.routing.groups import Rows
from conductor.routing.policy import Fetches, sooner
from kvstore.index.layout import Words


class Prompt(NamedTuple):
    """The prompt of a request.

    Attributes:
        tokens: their number; 0 = unknown.
        usable: how much of it each engine has; float64 [engines].
        peer: how much more its node could fetch; likewise.
        held: how much of it each engine has now; likewise.
        at_node: of ``usable``, what the engine's node has in memory and on disk; float64
            [2, engines]; None = nothing.
        keys: a chain value for each of its leading pages.
        output: tokens that its answer is expected to have.
    """

    tokens: int
    usable: Column
    peer: Column
    held: Column
    at_node: Column | None
    keys: Words
    output: float

    def own(self, row: int) -> float:
        """How much of it one engine has in its own cache, or will have."""
        if self.at_node is None:
            return float(self.usable[row])
        return float(self.usable[row] - (self.at_node[0, row] + self.at_node[1, row]))


class PromptColumns(NamedTuple):
    """Several prompts: the attributes of :class:`Prompt`, with one row for each prompt.

    Attributes:
        tokens, output: float64 [prompts, 1].
        usable, peer, held: float64 [prompts, engines].
        at_node: float64 [2, prompts, engines]; None = nothing.
    """

    tokens: Column
    usable: Column
    peer: Column
    held: Column
    at_node: Column | None
    output: Column


def prompt_columns(prompts: Sequence[Prompt]) -> PromptColumns:
    """These prompts in columns."""
    at_node = None
    if any(one.at_node is not None for one in prompts):
        at_node = np.zeros((2, len(prompts), len(prompts[0].usable)))
        for row, one in enumerate(prompts):
            if one.at_node is not None:
                at_node[:, row] = one.at_node
    return PromptColumns(
        tokens=np.array([[one.tokens] for one in prompts], dtype=np.float64),
        usable=np.array([one.usable for one in prompts]),
        peer=np.array([one.peer for one in prompts]),
        held=np.array([one.held for one in prompts]),
        at_node=at_node,
        output=np.array([[one.output] for one in prompts], dtype=np.float64),
    )


class Computing(NamedTuple):
    """The estimated times of some engines to compute prompts, if no others come before them.

    Attributes:
        fetch_s: seconds to fetch; float64 [prompts, engines].
        prefill_s: seconds to compute the rest, likewise.
        prefix: prompt tokens that they need not compute, likewise.
        fetched: number of these tokens that each engine fetches from the memory of its node, from
            its disk, and from another node; float64 [3, prompts, engines].
    """

    fetch_s: Column
    prefill_s: Column
    prefix: Column
    fetched: Column

    def of(self, at: int) -> "Computing":
        """One prompt: without the axis of prompts; copied, so that the others can be forgotten."""
        return Computing(
            self.fetch_s[at].copy(), self.prefill_s[at].copy(), self.prefix[at].copy(),
            self.fetched[:, at].copy(),
        )  # fmt: skip


def computing(
    prompts: PromptColumns,
    rows: Rows,
    costs: CostInputs[Column],
    coming_bytes: Column,
    fetches: Fetches,
    expected: Mapping[int, float],
) -> Computing:
    """The estimated times of some engines.

    Args:
        prompts: the prompts.
        rows: rows of the engines.
        costs: of these engines.
        coming_bytes: KV on its way to each of them over the network.
        fetches: decides whether they fetch what others have.
        expected: row of an engine → tokens of each of these prompts that it will have.
    """
    last = np.maximum(prompts.tokens - 1.0, 0.0)
    usable = prompts.usable.take(rows, axis=1)
    ends, prefix = np.minimum(usable, last), usable.copy()
    memory = disk = None
    if prompts.at_node is not None:
        memory, disk = prompts.at_node.take(rows, axis=2)
        prefix -= memory + disk
    for row, tokens in expected.items():
        at = np.flatnonzero(rows == row)
        prefix[:, at] = np.maximum(prefix[:, at], tokens)
    np.minimum(prefix, last, out=prefix)
    step = _Fetching(prompts.tokens, costs)
    found = Computing(
        np.zeros(prefix.shape), step.prefill_s(prefix), prefix, np.zeros((3, *prefix.shape))
    )
    if memory is not None and disk is not None:
        in_memory = np.minimum(usable - disk, last)
        found = step.part(found, 0, in_memory, costs.memory_byte_s, costs.memory_bytes, sooner)
        found = step.part(found, 1, ends, costs.disk_byte_s, costs.disk_bytes, sooner)
    peer = prompts.peer.take(rows, axis=1)
    if not peer.any():
        return found
    there = np.minimum(np.where(found.prefix >= ends, ends + peer, 0.0), last)
    return step.part(found, 2, there, costs.network_byte_s, coming_bytes, fetches)


class _Fetching(NamedTuple):
    """Adds parts of prompts that are fetched.

    Attributes:
        tokens: of the prompts.
        costs: of the engines.
    """

    tokens: Column
    costs: CostInputs[Column]

    def part(
        self,
        found: Computing,
        kind: int,
        end: Column,
        byte_s: Column,
        ahead: Column,
        wanted: Fetches,
    ) -> Computing:
        """What engines take if those for which it is ``wanted`` fetch one more part of the prompts.

        Args:
            found: what they take without.
            kind: row of ``fetched``.
            end: tokens of the prompt up to the end of this part, if it is longer than their prefix.
            byte_s: seconds of a byte.
            ahead: bytes that arrive before it.
            wanted: decides.
        """
        more = np.maximum(end - found.prefix, 0.0)
        if not more.any():
            return found
        constant_s = np.where(found.fetch_s > 0.0, 0.0, self.costs.fetch_s)
        part_s = constant_s + (more * self.costs.token_bytes + ahead) * byte_s
        rest_s = self.prefill_s(found.prefix + more)
        yes = (more > 0.0) & wanted(
            found.prefix, found.prefix + more, part_s + rest_s, found.prefill_s
        )
        fetched = found.fetched.copy()
        fetched[kind] = np.where(yes, more, 0.0)
        return Computing(
            fetch_s=found.fetch_s + np.where(yes, part_s, 0.0),
            prefill_s=np.where(yes, rest_s, found.prefill_s),
            prefix=found.prefix + fetched[kind],
            fetched=fetched,
        )

    def prefill_s(self, prefix: Column) -> Column:
        """Seconds to compute the rest of the prompts, as ``CostPrior.prefill_seconds``."""
        costs = self.costs
        new = np.maximum(self.tokens - prefix, 0.0)
        pairs = new * (prefix + (new + 1.0) / 2.0)
        weights_s = np.maximum(costs.floor_s, costs.token_s * new)
        seconds: Column = costs.constant_s + weights_s + costs.pair_s * pairs
        return seconds
