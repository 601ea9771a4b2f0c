"""Goal: pages that another node reads stay there no longer than at their owner."""

from contextlib import AsyncExitStack
from time import monotonic_ns

from kvstore.protocol.page import DIGEST_BYTES
from tests.cluster.whole_node import KEYS, linked, reading, serving, two_nodes
from tests.loops import eventually, in_loop


@in_loop
async def test_pages_to_be_read_once_stay_until_a_reader_has_got_all_of_them():
    async with AsyncExitStack() as undo:
        a, b = await two_nodes(undo)
        a.store(read_once=True)
        service = await undo.enter_async_context(serving(a))
        async with reading(b, {"a": service.endpoint}):
            await eventually(b.up)
            b.transport.held = []
            b.fetch(b.room(KEYS))
            await eventually(lambda: b.transport.held)
        await eventually(lambda: not a.pinned_bytes())
        assert a.stored() == 6, "its reader has left"

        b.transport.held = None
        await eventually(lambda: not b.standing["a"])
        await undo.enter_async_context(reading(b, {"a": service.endpoint}))
        await eventually(lambda: b.standing["a"])
        for damaged, left in ({4}, 6), (set(), 0):
            b.transport.damaged = damaged
            number = b.fetch(b.room(KEYS, f"t{left}"))
            await eventually(lambda number=number: b.end(number) and not a.pinned_bytes())
            assert len(b.ends[-1].digests) == (4 if damaged else 6) * DIGEST_BYTES
            assert a.stored() == left


@in_loop
async def test_pages_stay_no_longer_at_the_reader_than_at_their_owner():
    async with AsyncExitStack() as undo:
        a, b = await linked(undo)
        before_ns = monotonic_ns()
        a.store(KEYS[:2], ttl_ms=60_000, read_once=True)
        a.store(tenant="t")
        space = next(iter(a.node.pages.spaces))
        expires_ns = space.nodes[KEYS[0]].expires[0]

        b.fetch(b.room(KEYS[:2]), keys=KEYS[:2])
        b.fetch(b.room(KEYS, "t"), tenant="t")
        await eventually(lambda: len(b.ends) == 2)

        apart = next(one for one in b.ends if len(one.digests) == 2 * DIGEST_BYTES)
        ordinary = next(one for one in b.ends if one is not apart)
        assert not ordinary.kept
        assert [(one.read_once, one.memory_only) for one in apart.kept] == [(True, True)] * 2
        assert before_ns < apart.kept[0].expires_ns - 30_000 * 1_000_000 < expires_ns
        assert all(one.expires_ns <= expires_ns for one in apart.kept)
