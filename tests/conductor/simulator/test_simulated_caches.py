"""Simulated caches: who leaves first, and which prefix each engine has."""

from hypothesis import given
from hypothesis import strategies as st

from conductor.routing.columns import Prefix
from conductor.simulator.caches import BlockCache, Expectations, Holders, Tiers
from conductor.simulator.caching import CacheLimits, Caching, Sources
from conductor.simulator.trace import BLOCK_TOKENS, TracedRequest

MANY = CacheLimits(local=100, host=100, disk=100)


def request(*blocks: int, number: int = 1, more: int = 10) -> TracedRequest:
    tokens = len(blocks) * BLOCK_TOKENS + more
    return TracedRequest(number, 0.0, tokens, 1, blocks, "")


def test_the_end_of_a_prompt_leaves_before_its_beginning():
    held: dict[int, int] = {}
    cache = BlockCache(5, held, 1)

    cache.put([1, 2, 3])
    assert cache.put([7, 8, 9]) == [3]
    assert cache.put([1]) == []
    assert cache.put([20, 21]) == [2, 9]

    assert sorted(held) == [1, 7, 8, 20, 21]


def test_what_leaves_memory_is_on_disk_and_returns_when_it_is_used():
    host, disk = {}, {}
    tiers = Tiers(BlockCache(3, host, 1), BlockCache(3, disk, 1))
    tiers.put([1, 2, 3])
    tiers.put([4, 5])
    assert sorted(host) == [1, 4, 5]
    assert sorted(disk) == [2, 3]

    tiers.put([1, 2])

    assert 2 in tiers
    assert sorted(host) == [1, 2, 4]
    assert sorted(disk) == [3, 5]


def test_a_block_is_expected_until_every_prompt_with_it_is_there():
    expected = Expectations()
    expected.add([1, 2], 4)
    expected.add([1], 4)
    expected.add([1], 8)

    expected.remove([1, 2], 4)
    assert expected.held == {1: 12}

    expected.remove([1], 4)
    expected.remove([1], 8)
    assert expected.held == {}


def test_a_prompt_finds_its_prefix_where_it_was_computed():
    caching = Caching({"p0": MANY, "p1": MANY})
    first = request(1, 2, 3)
    caching.computed(first, "p0", reserved=0)

    found = caching.matches(request(1, 2, 9))

    two = 2 * BLOCK_TOKENS
    assert found == {"p0": Prefix(two, two, two, 0, 0), "p1": Prefix(0, 0, 0, 0, two)}


def test_blocks_that_are_computed_now_are_usable_soon():
    caching = Caching({"p0": MANY, "p1": MANY})
    first = request(1, 2, 3)
    caching.expect(first, "p1")
    assert caching.matches(first)["p1"] == Prefix(0, 0, 3 * BLOCK_TOKENS, 0, 0)

    caching.unexpect(first, "p1")

    assert caching.matches(first)["p1"] == Prefix(0, 0, 0, 0, 0)


def test_the_last_token_of_a_prompt_is_always_computed():
    caching = Caching({"p0": MANY})
    whole = request(1, 2, more=0)
    caching.computed(whole, "p0", reserved=0)

    assert caching.prefix(whole, "p0", range(0)) == 2 * BLOCK_TOKENS - 1


def test_sources_go_on_where_the_nearer_place_ends():
    limits = CacheLimits(local=1, host=2, disk=2)
    caching = Caching({"p0": limits, "p1": MANY})
    caching.computed(request(1, 2, 3, 4), "p0", reserved=0)
    caching.computed(request(1, 2, 3, 4, 5, 6), "p1", reserved=0)

    found = caching.sources(request(1, 2, 3, 4, 5, 6), "p0")

    assert found == Sources(start=1, host=1, disk=2, peer="p1", more=2)


def test_what_an_engine_computes_now_is_not_fetched():
    caching = Caching({"p0": MANY, "p1": MANY})
    caching.computed(request(1, 2, 3), "p1", reserved=0)
    caching.expect(request(1, 2), "p0")

    found = caching.sources(request(1, 2, 3), "p0")

    assert found == Sources(start=2, host=0, disk=0, peer="p1", more=1)


def test_an_engine_that_dies_has_lost_everything_in_memory():
    caching = Caching({"p0": MANY})
    caching.computed(request(1, 2), "p0", reserved=0)

    caching.lose("p0", node=True)

    assert caching.matches(request(1, 2))["p0"] == Prefix(0, 0, 0, 0, 0)


def test_requests_that_run_leave_less_room_for_the_cache():
    caching = Caching({"p0": CacheLimits(local=4, host=0, disk=0)})
    caching.received(request(1, 2, 3, 4), "p0", reserved=0)
    caching.received(request(7), "p0", reserved=2 * BLOCK_TOKENS + 1)

    assert caching.prefix(request(7), "p0", range(0)) == BLOCK_TOKENS
    assert caching.prefix(request(1), "p0", range(0)) == 0


sets = st.lists(st.sets(st.integers(0, 7)), min_size=1, max_size=4)


@given(st.data())
def test_prefixes_are_those_that_one_engine_after_another_would_give(data: st.DataObject):
    count = data.draw(st.integers(1, 4))
    kinds = [
        [data.draw(st.sets(st.integers(0, 6))) for _ in range(count)] for _ in range(4)
    ]  # local, host, disk, expected
    bits = [
        {
            block: mask
            for block in range(7)
            if (mask := sum(1 << at for at, held in enumerate(kind) if block in held))
        }
        for kind in kinds
    ]
    blocks = data.draw(st.permutations(range(7)))[: data.draw(st.integers(0, 7))]
    tokens = len(blocks) * BLOCK_TOKENS + 3
    names = {1 << at: f"p{at}" for at in range(count)}

    found = Holders(*bits).prefixes(blocks, tokens, names)

    def leading(held: set[int]) -> int:
        return next((at for at, one in enumerate(blocks) if one not in held), len(blocks))

    nodes = [leading(kinds[1][at] | kinds[2][at]) for at in range(count)]
    for at in range(count):
        usable = leading(kinds[0][at] | kinds[1][at] | kinds[2][at] | kinds[3][at])
        peer = max([n for other, n in enumerate(nodes) if other != at], default=0)
        numbers = (leading(kinds[0][at]), nodes[at], usable)
        own = leading(kinds[0][at] | kinds[3][at])
        in_memory = max(own, leading(kinds[1][at]))
        fetched = (max(0, peer - usable), in_memory - own, max(0, nodes[at] - in_memory))
        expected = [one * BLOCK_TOKENS for one in (*numbers, *fetched)]
        assert found[f"p{at}"] == Prefix(*expected[:3], 0, *expected[3:])
