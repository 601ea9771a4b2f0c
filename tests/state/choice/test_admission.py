"""Goal: admission writes no tail without its head, keeps to its budget, and writes what returns."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.protocol.errors import InvalidArgument
from kvstore.protocol.page import CanonicalLayout, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.state.choice.admission import DAY_NS, WRITE_SHARE, Admission
from kvstore.state.choice.returns import Kind, Returns
from kvstore.state.disk.log import SegmentLog
from kvstore.state.tree.columns import pack_place
from kvstore.state.tree.node import PrefixNode
from kvstore.state.tree.prefix_tree import PrefixTree, Shard
from kvstore.state.tree.slots import Slot

SIZE = 4096


def a_chain(
    uses: Sequence[int], numbers: Sequence[int] | None = None
) -> list[tuple[PrefixNode, int]]:
    """Nodes one below the other, each with the uses that ended at it; keys by their numbers."""
    space = PrefixTree(
        0,
        SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=1),
        [Shard(ShardSpec(layout=CanonicalLayout(2048), layers=(0, 1), heads=(0, 1)), 4096, 4096)],
    )
    nodes, parent = [], PrefixKey(b"")
    for at, ended in enumerate(uses):
        number = numbers[at] if numbers is not None else at
        key = PrefixKey(number.to_bytes(32, "little"))
        node = space.node(key, parent)
        node.uses = ended
        if not node.memory:
            node.begin(0, Slot(at))
        nodes.append((node, 0))
        parent = key
    return nodes


@given(
    chains=st.lists(
        st.tuples(st.lists(st.integers(0, 5), max_size=6), st.integers(0, DAY_NS // 20))
    ),
    budget=st.integers(1, 1 << 20),
    name=st.sampled_from(["all", "evidence", "learned", "none"]),
)
def test_admission_takes_a_leading_part_and_never_more_than_the_budget(chains, budget, name):
    admission, now, written, refused = Admission(name, budget, 1 << 20), 0, 0, 0
    for tick, (uses, elapsed) in enumerate(chains):
        now += elapsed
        admitted = admission.admit(a_chain(uses), SIZE, now, tick)
        assert 0 <= admitted <= len(uses)
        written += admitted * SIZE
        refused += admitted < len(uses)
        assert written <= budget / 24 + budget * now / DAY_NS + 1
    wear = admission.wear()
    assert wear.admitted * SIZE == written
    assert wear.refused == refused


def test_a_page_that_a_used_one_needs_is_admitted_with_it_and_the_unused_tail_is_not():
    admission = Admission("evidence", 0, 1 << 20)

    assert admission.admit(a_chain([0, 0, 1, 0]), SIZE, 0, 1) == 3
    assert admission.admit(a_chain([0, 0]), SIZE, 0, 1) == 0


def test_an_unknown_admission_is_refused_and_the_known_ones_are_named():
    with pytest.raises(InvalidArgument, match="'some' is not one of all, none, evidence, learned"):
        Admission("some", 0, 1 << 20)


def test_what_is_carried_over_empties_the_budget_and_what_found_no_room_does_not():
    admission = Admission("all", 24 * 10 * SIZE, 1 << 30)
    admission.charge(4 * SIZE)
    assert admission.admit(a_chain([0] * 8), SIZE, 0, 1) == 6

    admission.take_back(5, SIZE)
    assert admission.admit(a_chain([0] * 8), SIZE, 0, 2) == 5
    assert admission.wear().admitted == 6
    assert admission.wear().today_bytes == 10 * SIZE


class Prompts:
    """Prompts that leave memory whole, one after the other; none of them is ever on disk."""

    def __init__(self, admission: Admission) -> None:
        self.admission = admission
        self.tick = 0
        self.offered = 0

    def leave(self, name: int, pages: int) -> int:
        """How many pages are admitted of a prompt whose last page is never the same again."""
        self.tick += 1
        self.offered += pages
        ends = self.tick << 32 | 1
        numbers = [name << 32 | 2 + at for at in range(pages - 1)] + [ends]
        chain = a_chain([0] * pages, numbers)
        for node, _ in chain:
            node.access = self.tick
        return self.admission.admit(chain, SIZE, 0, self.tick)


def conversations_and_one_shots(prompts: Prompts, rounds: int) -> None:
    """Five turns of eight new pages each among prompts of forty pages that never come back."""
    for conversation in range(rounds):
        for turn in range(5):
            prompts.leave(1_000_000 + prompts.tick, 40)
            prompts.leave(10_000_000 + conversation, 8 * (turn + 1))


def test_what_returned_is_admitted_without_its_end_and_one_shots_are_not():
    admission = Admission("learned", 0, 4000 * SIZE)
    prompts = Prompts(admission)
    conversations_and_one_shots(prompts, 100)

    assert prompts.leave(1, 40) == 0, "a long first prompt has never returned"
    prompts.leave(2, 8)
    assert prompts.leave(2, 16) >= 7, "what came a second time comes a third time"
    assert prompts.leave(2, 24) in range(15, 24), "but its last page never does"


def test_without_a_budget_a_quarter_of_what_is_offered_is_written():
    capacity = 4000
    admission = Admission("learned", 0, capacity * SIZE)
    prompts = Prompts(admission)
    conversations_and_one_shots(prompts, 100)

    written = admission.wear().admitted
    bucket = capacity / 4
    assert written <= bucket + WRITE_SHARE * prompts.offered
    assert written >= WRITE_SHARE * prompts.offered - bucket


def test_a_prompt_that_is_told_of_twice_has_not_returned():
    returns, chain = Returns(), a_chain([0] * 8)
    end = chain[-1][0]
    assert returns.left(end, 5)
    first = chain[0][0]
    rate = returns.rate(first.space, first.key)
    for tick in range(6, 500):
        assert not returns.left(end, tick)
    assert returns.rate(first.space, first.key) == rate

    end.access = 501
    assert returns.left(end, 502), "it was used in between"
    assert returns.rate(first.space, first.key) > rate


def test_two_prompts_of_one_stay_in_memory_are_no_return_of_what_they_share():
    returns, first = Returns(), a_chain([0] * 4)
    last = first[-1][0]
    other = last.space.node(PrefixKey(b"o" * 32), first[-2][0].key)
    last.access, other.access = 1, 2
    returns.left(last, 10)
    returns.left(other, 11)
    assert sum(returns._returned.values()) == 0


def test_what_returns_are_learned_from_is_bounded(monkeypatch):
    monkeypatch.setattr("kvstore.state.choice.returns.REMEMBERED_MAX", 64)
    admission = Admission("learned", 0, 1 << 20)
    prompts = Prompts(admission)
    for name in range(1000):
        prompts.leave(name, 40)
    assert len(admission.returns) == 64


def test_a_smaller_budget_writes_less():
    written = []
    for budget in (24 * SIZE * 8000, 24 * SIZE * 2000, 24 * SIZE * 500):
        admission = Admission("learned", budget, 1 << 30)
        conversations_and_one_shots(Prompts(admission), 100)
        written.append(admission.wear().admitted)
    assert written[0] > written[1] > written[2] > 0


@pytest.mark.parametrize(("name", "carried"), [("all", [2, 3]), ("learned", [3])])
def test_learned_carries_over_what_was_used_in_the_later_half_of_its_time_on_disk(name, carried):
    log, chain = SegmentLog(8, 1 << 20), a_chain([0] * 4)
    for node, shard in chain:
        placed = log.place(node.space, shard, node.keys, 100)
        assert placed is not None
        node.commit(shard, bytes(16))
        node.adopt(shard, pack_place(placed.place), bytes(16))
        node.access = 100
    last_uses = {1: 100, 2: 140, 3: 160}
    for at, tick in last_uses.items():
        chain[at][0].access = tick
    chain[0][0].above = None  # the head stands alone: nothing is carried for another's sake
    for (node, _), (above, _) in zip(chain[2:], chain[1:], strict=False):
        node.above = above.space.root

    *_, plan = log.plan(log.segments[1], 200, Admission(name, 0, 1 << 20).carry_from)

    carry = b"".join(part.keys for part in plan.carry)
    assert [at for at, (node, _) in enumerate(chain) if node.key in carry] == carried
    assert sum(part.pages for part in (*plan.carry, *plan.drop)) == 4


def test_leaves_behind_one_long_prompt_that_leave_at_one_tick_are_not_each_examined_to_its_start(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("kvstore.state.choice.returns.WALK_TICK_MAX", 600)
    shared = a_chain([0] * 500)[-1][0]
    space = shared.space
    leaves: list[PrefixNode] = []
    for number in range(600, 700):
        leaf = space.node(PrefixKey(number.to_bytes(32, "little")), shared.key)
        leaf.begin(0, Slot(number))
        leaf.access = 1
        leaves.append(leaf)
    returns, examined = Returns(), [0]
    remember = Returns._remember

    def counted(self: Returns, name: int, kind: Kind, sights: int, tick: int) -> None:
        examined[0] += 1
        remember(self, name, kind, sights, tick)

    monkeypatch.setattr(Returns, "_remember", counted)

    for leaf in leaves:
        assert returns.left(leaf, 2)
    assert examined[0] <= 600 + 100 * 2
    assert len(returns) == 600, "each is remembered"
    assert returns.left(space.node(PrefixKey((700).to_bytes(32, "little")), shared.key), 3)
    assert examined[0] > 600 + 500, "a later tick examines all again"
