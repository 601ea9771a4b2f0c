"""Goal: the directory says how much of a prefix each other node has, and nothing of dead ones."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvstore.cluster.directory import PeersDirectory, index_settings
from kvstore.cluster.membership import LocalMembership
from kvstore.cluster.records import SCHEME, NodeRecord
from kvstore.index.control import IndexSettings, SourceBounds
from kvstore.index.credentials import PeerCredentials
from kvstore.index.face import PrefixIndex
from kvstore.index.process import IndexProcess
from kvstore.process.tls import CertificateFiles
from kvstore.protocol import wire
from kvstore.protocol.page import PrefixKeys, ShardSpec, SpaceIdentity, page_keys
from kvstore.state.remote.jobs import Holding, Locate
from tests.cluster.nodes import SPACE, PeerNode, files, nodes, shard
from tests.local_index import LocalIndex
from tests.loops import eventually, in_loop

KEYS = page_keys(np.arange(16 * 16), 16)
SETTINGS = index_settings(65_536)
ONE = (shard(0),)


class Asking:
    """A node, and the answers of its directory."""

    def __init__(
        self, index: PrefixIndex, membership: LocalMembership, show: CertificateFiles | None
    ) -> None:
        credentials = PeerCredentials("c", "self", SCHEME, show)
        self.index = index
        self.membership = membership
        self.directory = PeersDirectory(index, membership, credentials)

    def holds(
        self,
        shards: tuple[ShardSpec, ...] = ONE,
        keys: PrefixKeys = KEYS,
        space: SpaceIdentity = SPACE,
    ) -> dict[str, int]:
        answers: list[tuple[int, list[Holding]]] = []
        self.directory.locate(
            Locate(7, space, shards, keys.packed), lambda n, found: answers.append((n, list(found)))
        )
        [(number, found)] = answers
        assert number == 7
        assert [one.pages for one in found] == sorted((one.pages for one in found), reverse=True)
        return dict(found)

    def current(self, peer: PeerNode) -> bool:
        known = self.index.present().worker(peer.name)
        return known is not None and known.current

    def why(self, name: str) -> str:
        known = self.index.present().worker(name)
        return known.why if known is not None else ""


@asynccontextmanager
async def asking(
    *peers: PeerNode, show: CertificateFiles | None = None, index: PrefixIndex | None = None
) -> AsyncIterator[Asking]:
    membership = LocalMembership({peer.name: peer.endpoint for peer in peers})
    it = Asking(index or LocalIndex(SETTINGS), membership, show)
    running = asyncio.create_task(it.directory.run())
    try:
        async with asyncio.timeout(50):
            await membership.join(NodeRecord(name="self", boot=b"b" * 16, endpoint="127.0.0.1:1"))
            yield it
    finally:
        running.cancel()
        await asyncio.wait([running])


@in_loop
async def test_an_index_process_follows_two_nodes_over_tls_and_tells_what_each_has() -> None:
    async with nodes("a", "b", certificates=files()) as (a, b):
        a.store(KEYS[:4], *ONE)  # before anybody follows: it comes by the snapshot
        async with asking(a, b, show=files(), index=IndexProcess(SETTINGS)) as it:
            await eventually(lambda: it.holds() == {"a": 4})
            b.store(KEYS[:9], *ONE)
            await eventually(lambda: it.holds() == {"a": 4, "b": 9})
            a.store(KEYS[4:], *ONE)
            b.remove(KEYS[6:9], *ONE)
            await eventually(lambda: it.holds() == {"a": 16, "b": 6})
            assert {hello.node for hello in a.hellos + b.hellos} == {"self"}
            assert {hello.replay for hello in a.hellos} == {True, False}
            assert (a.hellos[0].cluster, a.hellos[0].scheme) == ("c", SCHEME)
            await eventually(lambda: it.directory.stats().entries == 16)


@in_loop
async def test_the_nodes_that_have_one_page_are_told_with_its_shards() -> None:
    two = (shard(0), shard(1))
    async with nodes("a", "b") as (a, b):
        a.store(KEYS[:4], *two)
        b.store(KEYS[:2], two[1])
        async with asking(a, b) as it:
            await eventually(lambda: it.holds((two[1],)) == {"a": 4, "b": 2})
            await eventually(lambda: it.holds((two[0],)) == {"a": 4})
            asked: list[dict[str, list[int]]] = []
            for at in (1, 3, 9):
                it.directory.holders(SPACE, two, KEYS[at], asked.append)

            assert asked == [{"a": [0, 1], "b": [1]}, {"a": [0, 1]}, {}]


@in_loop
async def test_pages_that_a_snapshot_lists_leave_with_their_removal() -> None:
    async with nodes("a") as (a,):
        a.store(KEYS, *ONE)
        async with asking(a) as it:
            await eventually(lambda: it.holds() == {"a": 16})
            a.remove(KEYS[3:], *ONE)
            await eventually(lambda: it.holds() == {"a": 3})


@in_loop
async def test_a_prefix_counts_only_as_far_as_all_shards_that_are_asked_for_have_it() -> None:
    two = (shard(0), shard(1))
    async with nodes("a", "b") as (a, b), asking(a, b) as it:
        a.store(KEYS[:8], shard(0))
        a.store(KEYS[:3], shard(1))
        b.store(KEYS[:5], shard(1))
        await eventually(lambda: it.holds(two) == {"a": 3})
        await eventually(lambda: it.holds((shard(1),)) == {"a": 3, "b": 5})
        assert it.holds() == {"a": 8}
        assert it.holds((shard(2),)) == {}


class Counted(PeersDirectory):
    """A directory of two nodes that have some of the first keys; counts those that it looks for."""

    def __init__(self, held: dict[str, int]) -> None:
        self.held = held
        self.parts: list[int] = []

    def _holdings(self, asked: Locate) -> list[Holding]:
        first, pages = KEYS.packed.index(asked.keys[:32]) // 32, len(asked.keys) // 32
        self.parts.append(pages)
        return [Holding(name, min(n - first, pages)) for name, n in self.held.items() if n > first]


@pytest.mark.parametrize(
    ("held", "parts", "answer"),
    [
        ({"a": 3, "b": 2}, [4], {"a": 3, "b": 2}),
        ({"a": 2, "b": 4}, [4, 4], {"b": 4, "a": 2}),
        ({"a": 10, "b": 6}, [4, 4, 4], {"a": 10, "b": 6}),
        ({"a": 16}, [4, 4, 4, 4], {"a": 16}),
        ({}, [4], {}),
    ],
)
@in_loop
async def test_what_a_long_question_asks_further_is_looked_for_in_later_turns(
    monkeypatch: pytest.MonkeyPatch, held: dict[str, int], parts: list[int], answer: dict[str, int]
) -> None:
    monkeypatch.setattr("kvstore.cluster.directory.TURN_KEYS", 4)
    directory, answers = Counted(held), []
    asked = Locate(7, SPACE, ONE, KEYS.packed)
    directory.locate(asked, lambda number, found: answers.append((number, list(found))))
    assert directory.parts == [4]

    await eventually(lambda: answers)
    assert directory.parts == parts
    assert answers == [(7, [Holding(*one) for one in answer.items()])]


@in_loop
async def test_pages_in_memory_and_on_disk_make_one_prefix() -> None:
    async with nodes("a") as (a,), asking(a) as it:
        a.store(KEYS[:4], *ONE, medium="STORAGE")
        a.store(KEYS[4:6], *ONE)
        await eventually(lambda: it.holds() == {"a": 6})
        a.remove(KEYS[1:4], *ONE, medium="STORAGE")
        await eventually(lambda: it.holds() == {"a": 1})


@in_loop
async def test_a_group_with_a_window_needs_its_last_pages_only() -> None:
    window = shard(1, window=2)
    asked = (shard(0), window)
    async with nodes("a") as (a,), asking(a) as it:
        a.store(KEYS[:8], shard(0))
        a.store(KEYS[4:7], window)
        await eventually(lambda: it.holds(asked) == {"a": 7})
        a.remove(KEYS[6:7], window)
        await eventually(lambda: it.holds(asked) == {"a": 6})
        a.remove(KEYS[5:6], window)
        await eventually(lambda: it.holds(asked) == {})


@in_loop
async def test_pages_of_another_tenant_or_scope_are_not_found() -> None:
    others = [
        SpaceIdentity(model="m", kv_dtype="bfloat16", page_tokens=16, tenant="t"),
        SpaceIdentity(model="m", kv_dtype="bfloat16", page_tokens=16, scope="s"),
    ]
    async with nodes("a") as (a,), asking(a) as it:
        a.store(KEYS[:4], *ONE)
        a.store(KEYS[:2], *ONE, space=others[0])
        await eventually(lambda: it.holds() == {"a": 4})
        await eventually(lambda: it.holds(space=others[0]) == {"a": 2})
        assert it.holds(space=others[1]) == {}


@in_loop
async def test_a_node_that_has_lost_the_head_of_a_chain_has_nothing_of_it() -> None:
    async with nodes("a", "b") as (a, b), asking(a, b) as it:
        for one in (a, b):
            one.store(KEYS, *ONE)
        await eventually(lambda: it.holds() == {"a": 16, "b": 16})
        a.remove(KEYS[:1], *ONE)
        await eventually(lambda: it.holds() == {"b": 16})


@in_loop
async def test_a_node_that_dies_has_nothing_until_it_is_back_with_what_its_new_start_has() -> None:
    async with (
        nodes("a", "b", certificates=files()) as (a, b),
        asking(a, b, show=files(), index=IndexProcess(SETTINGS)) as it,
    ):
        for one in (a, b):
            one.store(KEYS, *ONE)
        await eventually(lambda: it.holds() == {"a": 16, "b": 16})
        first = a.boot
        await a.stop()
        await eventually(lambda: it.holds() == {"b": 16})
        await a.start(files())
        a.store(KEYS[:2], *ONE)
        await eventually(lambda: it.holds() == {"a": 2, "b": 16})
        assert a.boot != first


@in_loop
async def test_a_killed_index_process_is_started_again_and_knows_the_same() -> None:
    index = IndexProcess(SETTINGS)
    async with nodes("a") as (a,), asking(a, index=index) as it:
        a.store(KEYS, *ONE)
        await eventually(lambda: it.holds() == {"a": 16})
        before = index.present().table
        assert index._life is not None
        index._life._process.kill()
        await eventually(lambda: index.restarts == 1)
        await eventually(lambda: index.present().table not in (None, before))
        await eventually(lambda: it.holds() == {"a": 16})
        assert it.holds((shard(5),)) == {}


@in_loop
async def test_nodes_come_and_go_with_the_membership() -> None:
    async with nodes("a", "b") as (a, b), asking(a) as it:
        for one in (a, b):
            one.store(KEYS, *ONE)
        await eventually(lambda: it.holds() == {"a": 16})
        it.directory._follow({"b": NodeRecord(name="b", endpoint=b.endpoint)})
        await eventually(lambda: it.holds() == {"b": 16})
        await eventually(lambda: not a.tunnels.stats().following)


@in_loop
async def test_more_nodes_than_can_be_followed_are_named() -> None:
    index = LocalIndex(SETTINGS)
    many = {f"n{number:02}": "127.0.0.1:1" for number in range(17)}
    directory = PeersDirectory(
        index, LocalMembership(many), PeerCredentials("c", "n00", SCHEME, None)
    )
    directory._follow({name: NodeRecord(name=name, endpoint=at) for name, at in many.items()})
    assert directory.refused == ["n16"]
    assert directory.stats().refused == ["n16"]
    assert len(index.present().report.workers) == 15


@in_loop
async def test_new_nodes_do_not_take_the_place_of_one_that_is_followed() -> None:
    index = LocalIndex(SETTINGS)
    directory = PeersDirectory(
        index, LocalMembership({}), PeerCredentials("c", "own", SCHEME, None)
    )
    real = {"z": NodeRecord(name="z", endpoint="127.0.0.1:1")}
    directory._follow(real)
    made_up = [f"a{number:02}" for number in range(20)]
    directory._follow(real | {name: NodeRecord(name=name, endpoint="h:1") for name in made_up})

    assert directory.refused == made_up[14:]
    assert "z" in {one.worker for one in index.present().report.workers}


def test_a_node_that_cannot_be_followed_is_counted_and_fills_no_log(caplog) -> None:
    async def away() -> None:
        async with nodes("a") as (a,):
            a.refuse_with = wire.encode(wire.Failure(0, "invalid_argument", "cluster: 'c'"))
            async with asking(a) as it:

                def counted() -> dict[str, int]:
                    known = it.index.present().worker("a")
                    return known.faults if known is not None else {}

                await eventually(lambda: counted().get("refused"))
                await a.stop()
                await eventually(lambda: counted().get("connection"))

    caplog.set_level("WARNING", "kvstore.index.followers")
    asyncio.run(away())
    assert not [one for one in caplog.records if one.name == "kvstore.index.followers"]


@in_loop
async def test_who_refuses_to_be_followed_says_why() -> None:
    async with nodes("a") as (a,), asking(a) as it:
        a.refuse_with = wire.encode(wire.Failure(0, "invalid_argument", "cluster: 'c' is not d"))
        await eventually(lambda: "refuses to be followed: cluster: 'c' is not d" in it.why("a"))
        a.store(KEYS, *ONE)
        assert it.holds() == {}
        a.refuse_with = b""
        await eventually(lambda: it.holds() == {"a": 16})


@pytest.mark.parametrize(
    "garbage",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\x05\0\0\0junk!", b"\xff" * 200, b"\x02\0",
     b"\xff" + bytes(8) + b"\x7f\x03\x00"],
)  # fmt: skip
@in_loop
async def test_garbage_in_place_of_events_costs_that_node_only(garbage: bytes) -> None:
    async with nodes("a", "b") as (a, b), asking(a, b) as it:
        a.refuse_with = garbage
        for one in (a, b):
            one.store(KEYS, *ONE)
        await eventually(lambda: it.holds() == {"b": 16})
        await eventually(lambda: len(a.hellos) >= 3 and not it.current(a))
        assert it.why("a")
        a.refuse_with = b""
        await eventually(lambda: it.holds() == {"a": 16, "b": 16})


@pytest.mark.parametrize(
    ("serves", "shows", "says"),
    [
        (files(), files("stranger", "authority"), "does it accept this node's certificate?"),
        (files("stranger", "other"), files(), "TLS: CERTIFICATE_VERIFY_FAILED"),
        (files(), None, "127.0.0.1"),
        (None, files(), "127.0.0.1"),
        (files(), files("missing"), "certificate: "),
    ],
    ids=["stranger", "false node", "without TLS", "node without TLS", "no such file"],
)
@in_loop
async def test_a_wrong_certificate_is_refused_on_both_sides(
    serves: CertificateFiles | None, shows: CertificateFiles | None, says: str
) -> None:
    async with nodes("a", certificates=serves) as (a,), asking(a, show=shows) as it:
        a.store(KEYS, *ONE)
        await eventually(lambda: says in it.why("a"))
        assert it.holds() == {}
        assert not a.hellos


@in_loop
async def test_a_table_that_is_gone_means_that_nobody_has_anything() -> None:
    class Gone(LocalIndex):
        away = False

        def present(self):
            there = super().present()
            return there._replace(table=None) if self.away else there

    index = Gone(SETTINGS)
    async with nodes("a") as (a,), asking(a, index=index) as it:
        a.store(KEYS, *ONE)
        await eventually(lambda: it.holds() == {"a": 16})
        index.away = True
        assert it.holds() == {}
        index.away = False
        assert it.holds() == {"a": 16}
        assert it.holds(keys=KEYS[:0]) == {}


@in_loop
async def test_what_is_prepared_for_spaces_and_shards_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.cluster.directory._SPACES_MAX", 2)
    monkeypatch.setattr("kvstore.cluster.directory._SHAPES_MAX", 2)
    async with nodes("a") as (a,), asking(a) as it:
        a.store(KEYS, *ONE)
        await eventually(lambda: it.holds() == {"a": 16})
        for number in range(10):
            space = SpaceIdentity(model=f"m{number}", kv_dtype="bfloat16", page_tokens=16)
            assert it.holds((shard(number + 5),), space=space) == {}
        assert len(it.directory._seeds) <= 2
        assert len(it.directory._needs) <= 2
        assert it.holds() == {"a": 16}


@in_loop
async def test_a_node_that_stops_is_no_holder_within_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvstore.index.followers._BEAT_S", 0.05)
    quiet = IndexSettings(65_536, SourceBounds(replay_s=30.0, verify_s=30.0, foreign_blocks=1))
    async with nodes("a") as (a,), asking(a, index=LocalIndex(quiet)) as it:
        a.store(KEYS, *ONE)
        await eventually(lambda: it.holds() == {"a": 16})
        a.hold()  # its connections stay open, and nothing answers
        await eventually(lambda: it.holds() == {})
        assert it.why("a")
        a.let_go()
        await eventually(lambda: it.holds() == {"a": 16})
