"""Goal: the same as with the fake store, with the real one between two engines of one process."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine_adapters.reference.sampler import Sampling
from kvstore.client.store import KVStore
from kvstore.config import DeviceSlabConfig
from tests.conftest import wait_for
from tests.engine_adapters.reference.conftest import Ask, MakeEngine
from tests.engine_adapters.reference.pushed import TEXT, kept_hashes, pair_of, report

WORDS = [
    "page",
    "slot",
    "lease",
    "tier",
    "node",
    "peer",
    "engine",
    "prefix",
    "key",
    "digest",
    "shard",
    "space",
    "pin",
    "job",
]


SEEDED = Sampling(temperature=0.8, top_p=0.9, seed=99)


class Borrowed:
    """A store that several engines use: none of them closes it."""

    def __init__(self, store: KVStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        """The owner does."""


@pytest.fixture
def store() -> Iterator[Borrowed]:
    with KVStore.open(capacity_bytes=64 << 20) as opened:
        yield Borrowed(opened)


def prompts(count: int) -> list[str]:
    """Of 1..600 bytes; about half continue a common beginning."""
    chance = random.Random(11)
    common = " ".join(chance.choices(WORDS, k=60))
    lengths = [1, 63, 64, 65, 128, 256, *(chance.randrange(2, 600) for _ in range(count - 6))]
    made = []
    for number, length in enumerate(lengths):
        own = " ".join(chance.choices(WORDS, k=150))
        made.append(((common[: length // 2] if number % 2 else "") + own)[:length])
    return made


@pytest.mark.parametrize(
    ("sampling", "ranks"),
    [(Sampling(), 1), (SEEDED, 1), (SEEDED, 2)],
    ids=["greedy", "seeded", "two ranks"],
)
def test_prefill_to_decode_through_the_store_equals_mono(
    make_engine: MakeEngine, ask: Ask, store: Borrowed, sampling: Sampling, ranks: int
) -> None:
    mono = make_engine(prefix_cache=False)
    prefill = make_engine(store, mode="prefill", blocks=512, ranks=ranks)
    decode = make_engine(store, mode="decode", blocks=512, prefix_cache=False, ranks=ranks)
    texts = prompts(20)
    names = [f"r{number}" for number in range(len(texts))]
    asked = list(zip(names, texts, strict=True))
    expected = [ask(mono, text, 16, sampling, id=name) for name, text in asked]
    first = [ask(prefill, text, 1, sampling, id=name, to_handoff=True) for name, text in asked]
    answers = [
        ask(decode, text, 16, sampling, id=name, from_handoff=one.wait().handoff)
        for (name, text), one in zip(asked, first, strict=True)
    ]
    for name, text, want, have in zip(names, texts, expected, answers, strict=True):
        assert have.wait().tokens == want.wait().tokens, text
        assert have.request.timings.restored_tokens == len(text), f"{text!r} was computed again"
        hashes = mono.kv_hashes(name)
        assert hashes is not None
        assert prefill.kv_hashes(name) == hashes
        assert decode.kv_hashes(name) == hashes


def test_a_second_engine_does_not_compute_what_the_first_has_stored(
    make_engine: MakeEngine, ask: Ask, store: Borrowed
) -> None:
    text = prompts(7)[5] + " and then something else."
    one, two = make_engine(store), make_engine(store)
    expected = ask(one, text, 80).wait().tokens
    assert one.close(10.0)  # its puts have ended then
    answer = ask(two, text, 80).wait()
    assert answer.tokens == expected
    assert answer.request.timings.restored_tokens == len(text) // 64 * 64


def test_pages_are_stored_with_the_prompts_tokens_and_the_tail_without(
    make_engine: MakeEngine, ask: Ask, store: Borrowed
) -> None:
    text = "a prompt of three pages and some more tokens. " * 5
    engine = make_engine(store, mode="prefill")
    ask(engine, text, 1, to_handoff=True).wait()
    assert engine.close(10.0)  # its puts have ended then

    spaces = store._store._link.node.pages.spaces
    nodes = [node for space in spaces for node in space.nodes.values()]
    known = {node.depth: node.tokens for node in nodes if not node.read_once}
    tokens = text.encode("utf-32-le")  # a byte is a token
    assert known == {at + 1: tokens[256 * at : 256 * at + 256] for at in range(3)}
    assert [node.tokens for node in nodes if node.read_once] == [b""]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_with_a_slab_answers_the_same_and_reads_the_node_once(
    make_engine: MakeEngine, ask: Ask, ranks: int
) -> None:
    text = prompts(7)[5] + " and then something else."
    slab = DeviceSlabConfig(capacity_bytes=8 << 20)
    with KVStore.open(capacity_bytes=64 << 20, device_slab=slab) as opened:
        one = make_engine(Borrowed(opened), ranks=ranks)
        two = make_engine(Borrowed(opened), prefix_cache=False, ranks=ranks)
        expected = ask(one, text, 16).wait().tokens
        assert one.close(10.0)
        for turn in range(2):
            before = opened.stats()["counts"].get("loaded_bytes", 0)
            answer = ask(two, text, 16, id=f"turn-{turn}").wait()
            assert answer.tokens == expected
            assert answer.request.timings.restored_tokens == len(text) // 64 * 64
            assert wait_for(lambda: not opened.stats()["slab"]["pending_bytes"], 10.0)
            read = opened.stats()["counts"]["loaded_bytes"] - before
            assert (read > 0) == (turn == 0)
        assert opened.stats()["slab"]["pages_hit"] == ranks * (len(text) // 64)


def test_pages_of_other_ranks_are_a_miss(
    make_engine: MakeEngine, ask: Ask, store: Borrowed
) -> None:
    text = prompts(7)[5]
    prefill = make_engine(store, mode="prefill")
    decode = make_engine(store, mode="decode", ranks=2)
    handoff = ask(prefill, text, 1, SEEDED, to_handoff=True).wait().handoff
    answer = ask(decode, text, 16, SEEDED, from_handoff=handoff).wait()
    assert answer.tokens == ask(make_engine(), text, 16, SEEDED).wait().tokens
    assert answer.request.timings.restored_tokens == 0


def test_pushes_between_two_ranks_begin_behind_what_the_store_has(
    make_engine: MakeEngine, ask: Ask, store: Borrowed
) -> None:
    mono = make_engine(prefix_cache=False)
    sides: dict[str, Any] = {"ranks": 2, "prefix_cache": False}
    pair = pair_of(make_engine, ask, (store, store), prefill=sides, decode=sides)
    for length, restored in ((200, 0), (390, 192)):
        text, name = TEXT[:length], f"r{length}"
        expected = ask(mono, text, 12, SEEDED, id=name).wait()
        here, there = pair.ask(text, 12, SEEDED, name=name)
        assert there.wait().tokens == expected.tokens
        assert report(here.wait()) == report(there) == ("success", None)
        assert kept_hashes(pair, name) == [mono.kv_hashes(name)] * 2
        assert there.request.timings.restored_tokens == restored
        assert wait_for(lambda: pages_of_both_ranks(store) >= length // 64, 10.0)  # noqa: B023


def pages_of_both_ranks(store: Borrowed) -> int:
    spaces = store._link.node.pages.spaces
    return sum(len(node.digests) == 2 for space in spaces for node in space.nodes.values())


@pytest.mark.parametrize("shard", [0, 1])
def test_a_page_that_is_wrong_at_one_rank_is_computed_again_at_all(
    make_engine: MakeEngine, ask: Ask, store: Borrowed, shard: int
) -> None:
    text = prompts(7)[5]
    prefill = make_engine(store, mode="prefill", ranks=2)
    decode = make_engine(store, mode="decode", ranks=2, prefix_cache=False)
    handoff = ask(prefill, text, 1, SEEDED, to_handoff=True).wait().handoff
    assert flip_a_byte_of_every_page(store, shard) > 3
    answer = ask(decode, text, 16, SEEDED, from_handoff=handoff).wait()
    assert answer.tokens == ask(make_engine(), text, 16, SEEDED).wait().tokens
    assert answer.request.timings.restored_tokens == 0


def flip_a_byte_of_every_page(store: Borrowed, shard: int | None = None) -> int:
    """In the node's memory itself, as a fault would; returns how many pages there are.

    With a ``shard``, only pages of that one.
    """
    link = store._link
    slots = link.node.pages.slots
    flipped = 0
    for space in link.node.pages.spaces:
        for node in space.nodes.values():
            for number, slot in node.slots.items():
                if shard not in (None, number):
                    continue
                extent, _, offset = slots.address(slot)
                descriptor = link.memory.descriptor(extent)
                at = offset + 4 * 37 + 3  # sign and exponent of some K of the first layer
                byte = os.pread(descriptor, 1, at)
                os.pwrite(descriptor, bytes([byte[0] ^ 0xFF]), at)
                flipped += 1
    return flipped


@pytest.mark.parametrize("verified", [True, False], ids=["verified", "verification off"])
def test_flipped_bytes_change_tokens_only_when_verification_is_off(
    make_engine: MakeEngine,
    ask: Ask,
    store: Borrowed,
    monkeypatch: pytest.MonkeyPatch,
    verified: bool,
) -> None:
    """What the decode engine reads is what prefill stored; and wrong bytes never pass."""
    mono = make_engine(prefix_cache=False)
    prefill = make_engine(store, mode="prefill", blocks=512)
    decode = make_engine(store, mode="decode", blocks=512, prefix_cache=False)
    text = prompts(9)[8] * 2
    expected = ask(mono, text, 16, id="r").wait().tokens
    handoff = ask(prefill, text, 1, id="r", to_handoff=True).wait().handoff
    assert flip_a_byte_of_every_page(store) >= len(text) // 64
    monkeypatch.setattr("kvstore.client.loads.VERIFY", verified)
    answer = ask(decode, text, 16, id="r", from_handoff=handoff).wait()
    hashes_equal = decode.kv_hashes("r") == mono.kv_hashes("r")
    if verified:
        assert answer.tokens == expected
        assert hashes_equal
        assert answer.request.timings.restored_tokens == 0
        assert store.troubles["corrupt"] >= 1
        assert store.stats()["counts"]["removed_corrupt"] >= 1
    else:
        assert not hashes_equal
        assert answer.tokens != expected


def test_an_engine_whose_node_is_not_there_serves(
    make_engine: MakeEngine, ask: Ask, tmp_path: Path
) -> None:
    store = KVStore.connect(f"unix://{tmp_path}/nobody.sock", name="P1", timeout_s=0.2)
    engine = make_engine(store)
    expected = ask(make_engine(), "hello " * 30, 8).wait().tokens
    assert ask(engine, "hello " * 30, 8).wait().tokens == expected
    assert ask(engine, "hello " * 31, 8, to_handoff=True).wait().handoff is not None
    assert store.troubles["peer_unreachable"] >= 1
    ask(engine, "one more step", 2).wait()
    errors = engine.metrics.store_errors.labels("peer_unreachable")._value.get()
    assert errors >= store.troubles["peer_unreachable"]
