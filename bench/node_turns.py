"""The longest turn of a node with millions of pages, whatever is asked of it.

Each case is the worst that this module knows how to ask. Before each the node is filled again.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, NamedTuple

import msgspec

from bench.node_alone import LARGE_PAGE_BYTES, PAGE_BYTES, TICKS_MAX
from bench.node_operator import Busy
from bench.node_watch import Span
from bench.node_world import PROMPT_PAGES, World
from kvstore.process.collector import spare_the_old
from kvstore.protocol import wire
from kvstore.protocol.page import KEY_BYTES
from kvstore.server import operations
from kvstore.state.choice.quotas import PIN_KEYS_MAX
from kvstore.state.tree.places import Tier

PAGES: Final = 2_000_000
LEASE_PAGES: Final = 4096
LOOKUP_PAGES: Final = 65_536
RUN_PAGES: Final = 1024
EXTENTS_TAKEN: Final = 4
STRETCHES: Final = 100
REPEATED: Final = 20
SEGMENTS: Final = 8
"""Reclaimed by one case."""
LEASE_S: Final = 250
TTL_S: Final = 3600


class Outcome(NamedTuple):
    """What a case found.

    Attributes:
        longest: of its turns.
        turns: how many there were.
        over: how many took longer than they may.
        note: what else is to be said.
    """

    longest: Span
    turns: int
    over: int
    note: str = ""


# What is asked of the node


def stats(world: World) -> None:
    """A snapshot of all that is counted."""
    world.begin()
    for _ in range(REPEATED):
        shown = world.operator.ask(operations.ShowStats())
        world.operator.ask(operations.ListTiers())
    assert shown["pages"] > 0.9 * world.pages


def listing(world: World) -> None:
    """Pages in stretches, with a filter that finds none, below a page; spaces and the rest."""
    head, below = world.family()
    label, ask = world.label(world.engine), world.operator.ask
    world.begin()
    _stretches(world, operations.ListPages(space=label, limit=250), STRETCHES)
    nothing = operations.ListPages(space=label, hits_min=1 << 50)
    assert _stretches(world, nothing, 1 << 30) == 0
    found = _stretches(world, operations.ListPages(space=label, prefix=head.hex(), limit=250), 100)
    assert found == min(below + 1, 100 * 250)
    _stretches(world, operations.ListTree(space=label, key=head.hex(), depth=1, limit=100), 100)
    ask(operations.ListTree(space=label, depth=1, limit=250))
    for one in (operations.ListSessions(), operations.ListPins(), operations.ListQuotas()):
        ask(one)


def _stretches(world: World, wanted: operations.ListPages | operations.ListTree, most: int) -> int:
    """List so many stretches; how many rows that were."""
    rows = 0
    for _ in range(most):
        shown = world.operator.ask(wanted)
        rows += len(shown["pages"])
        if shown["next"] is None:
            break
        wanted = msgspec.structs.replace(wanted, cursor=shown["next"])
    return rows


def explain(world: World) -> None:
    """Why pages are there, have left, never came; whose they are."""
    other = world.connect(LARGE_PAGE_BYTES, "another model")
    keys = world.chain(min(RUN_PAGES, world.many))
    label, other_label = world.label(world.engine), world.label(other)
    ask = world.operator.ask
    gone, never = world.prompts[0], world.lone.keys(1)
    world.begin()
    for _ in range(REPEATED):
        tokens = world.engine.model.page_tokens
        (run,) = ask(operations.FindRuns(page_tokens=tokens, keys=keys))["runs"]
        assert run["pages"] == len(keys) // KEY_BYTES
        for space in (label, None):
            for key, verdict in ((keys[-KEY_BYTES:], "hit"), (gone[-KEY_BYTES:], ""), (never, "")):
                shown = ask(operations.ExplainKey(key=key.hex(), space=space))
                assert verdict in ("", shown["verdict"])
        first = keys[:KEY_BYTES].hex()
        asked = operations.Compare(space=other_label, other=label, key=first)
        assert ask(asked)["verdict"] == "other_space"


def messages(world: World) -> None:
    """The largest messages that a node takes."""
    world.begin()
    keys = world.chain(min(LOOKUP_PAGES, world.many))
    lease, generations = world.engine.acquire(keys)
    assert len(generations) == min(LEASE_PAGES, len(keys) // KEY_BYTES)
    world.engine.release(lease)


def pins(world: World) -> None:
    """A long prompt is pinned, and let go: by hand, and when its time is up."""
    tier: Tier = "host" if world.lone.desk.disk is None else "ssd"
    keys = world.chain(min(PIN_KEYS_MAX, world.many))
    label, last = world.label(world.engine), keys[-KEY_BYTES:].hex()
    world.begin()
    for _ in range(3):
        pinned = _pin(world, operations.PinPages(space=label, key=last, ttl_s=0, tier=tier))
        assert pinned["pages"] == len(keys) // KEY_BYTES
        world.operator.ask(operations.Unpin(pin=pinned["pin"]))
    ttl_s = world.clock.skipped_s + TTL_S
    _pin(world, operations.PinPages(space=label, key=last, ttl_s=ttl_s, tier=tier))
    world.clock.skip(TTL_S + 1)
    world.wait(lambda: not world.operator.ask(operations.ListPins())["pins"])


def keep(world: World) -> None:
    """A long prompt is kept as a conversation's, and let go: by its end, and when time is up."""
    engine, kept = world.engine, world.lone.kept_pages
    keys = world.chain(min(PIN_KEYS_MAX, world.many))
    part = wire.KEEP_KEYS_MAX * KEY_BYTES
    world.begin()
    for ends in (True, False):
        for _ in range(TICKS_MAX):
            at = kept() * KEY_BYTES  # an SSD tier takes the rest when it has time
            if at == len(keys):
                break
            some = keys[at : at + part]
            engine.say(wire.KeepConversation(engine.space, "long", some, 1000 * TTL_S))
            world.lone.tick()
        assert at == len(keys)
        if ends:
            engine.say(wire.KeepConversation(engine.space, "long", b"", 0))
        else:
            world.clock.skip(TTL_S + 1)
        world.wait(lambda: kept() == 0)


def _pin(world: World, asked: operations.PinPages) -> dict[str, Any]:
    """Pin pages as soon as a full SSD tier has room for what of them is not there yet."""
    for _ in range(TICKS_MAX):
        with suppress(Busy):
            pinned: dict[str, Any] = world.operator.ask(asked)
            return pinned
        world.lone.tick()
    raise AssertionError("it cannot be pinned, however long one waits")


def policy(world: World) -> None:
    """The policy is changed, and changed back, while prompts are put."""
    other = "kvstore" if world.policy == "lru" else "lru"
    world.begin()
    for name in (other, world.policy):
        shown = world.operator.ask(operations.SetPolicy(name=name))
        assert (shown["name"], shown["previous"] != name) == (name, True)
        for _ in range(REPEATED):
            world.put()


def corrupt(world: World) -> None:
    """A reader finds that a page with many below it is not what was stored."""
    head, below = world.family()
    lease, (generation,) = world.engine.acquire(head)
    world.engine.release(lease)
    before = world.lone.stored()
    world.begin()
    engine = world.engine
    engine.say(wire.Corrupt(engine.space, engine.shard, head, generation))
    world.wait(lambda: world.lone.stored() < before - below)
    assert engine.lookup(head) == 0


def evict(world: World) -> None:
    """An operator takes out a page with many below it."""
    head, below = world.family()
    label = world.label(world.engine)
    world.begin()
    job = world.operator.job(operations.Evict(space=label, key=head.hex()))
    assert job["result"]["dropped"] == below + 1


def models(world: World) -> None:
    """Another model's large pages come to a full node, and the first model's come back."""
    large = world.connect(LARGE_PAGE_BYTES, "another model")
    extent_bytes = world.lone.extent_bytes
    each = extent_bytes // LARGE_PAGE_BYTES
    world.begin()
    for _ in range(EXTENTS_TAKEN):
        for _ in range(-(-each // 16)):
            keys = world.lone.keys(min(each, 16))
            large.put(keys)
            assert large.lookup(keys) == len(keys) // KEY_BYTES
    for _ in range(EXTENTS_TAKEN * extent_bytes // PAGE_BYTES // PROMPT_PAGES):
        world.put()


def session(world: World) -> None:
    """An engine ends that has leased many pages: with its connection, and after it."""
    engine, _ = world.lend(LEASE_S)
    world.begin()
    engine.disconnect(ended=True)
    world.wait(lambda: world.lone.leases() == 0)
    longest = world.watch.longest
    engine, _ = world.lend(LEASE_S)
    world.begin()
    engine.disconnect(ended=False)
    engine.end()
    world.wait(lambda: world.lone.leases() == 0)
    world.watch.longest = max(longest, world.watch.longest)


def leases(world: World) -> None:
    """Leases of many pages run out at once."""
    before = world.lone.counts().get("expired_leases", 0)
    engine, given = world.lend(LEASE_S)
    world.clock.skip(LEASE_S + 1)
    world.begin()
    world.wait(lambda: world.lone.counts().get("expired_leases", 0) >= before + given)
    engine.disconnect(ended=True)
    world.wait(lambda: world.lone.leases() == 0)


def expire(world: World) -> None:
    """Many pages expire at once."""
    expired = world.lone.counts().get("removed_expired", 0)
    prompts = [world.lone.keys(PROMPT_PAGES) for _ in range(world.many // PROMPT_PAGES)]
    world.put_all([(keys, b"") for keys in prompts], 1000 * TTL_S)
    world.clock.skip(TTL_S + 1)
    world.begin()
    expired += len(prompts) * PROMPT_PAGES
    world.wait(lambda: world.lone.counts().get("removed_expired", 0) == expired)


def quota(world: World) -> None:
    """A space gets a quota that it exceeds; another takes the room, then more of it."""
    other = world.connect(model="a third model")
    label = world.label(world.engine)
    used = world.lone.pages_max * PAGE_BYTES
    world.begin()
    asked = operations.SetLimits(space=label, quota_bytes=used - world.many * PAGE_BYTES)
    job = world.operator.job(asked)
    assert job["result"].get("complete", True), job
    world.fill(other)
    for _ in range(REPEATED):
        world.put(other)
    world.operator.job(operations.SetLimits(space=label, quota_bytes=0))


def clear(world: World) -> None:
    """An operator empties the space of nearly all pages."""
    label = world.label(world.engine)
    world.begin()
    job = world.operator.job(operations.Clear(space=label))
    assert job["result"]["kept"] == 0, job
    assert world.engine.lookup(world.prompts[-1]) == 0


def disk_quota(world: World) -> None:
    """A space gets a quota on disk that it exceeds."""
    label = world.label(world.engine)
    (used,) = (one.ssd_bytes for one in world.lone.desk.stats().spaces)
    quota_bytes = used - world.many * PAGE_BYTES
    world.begin()
    job = world.operator.job(operations.SetLimits(space=label, quota_bytes=quota_bytes, tier="ssd"))
    evicted = job["result"]["evicted_bytes"]  # segments are given back meanwhile, too
    assert evicted > 0, job
    assert job["result"].get("complete", True), job
    world.operator.job(operations.SetLimits(space=label, quota_bytes=0, tier="ssd"))


def reclaim(world: World) -> None:
    """Prompts go to a full SSD tier, so that whole segments are given back; some were used."""
    prompts = world.prompts
    world.begin()
    end = world.lone.reclaimed() + SEGMENTS
    while world.lone.reclaimed() < end:
        for at in range(REPEATED):
            world.put()
            world.engine.lookup(prompts[len(prompts) // 2 - at])
            world.lone.tick()


CASES: Final[dict[str, Callable[[World], None]]] = {
    "stats": stats, "list": listing, "explain": explain, "messages": messages, "pins": pins,
    "keep": keep,
    "policy": policy, "corrupt": corrupt, "evict": evict, "models": models, "session": session,
    "leases": leases, "expire": expire, "quota": quota, "clear": clear,
}  # fmt: skip
"""Those of a node whose pages are in memory, in their order, after ``fill`` and ``gc``."""

SSD_CASES: Final[dict[str, Callable[[World], None]]] = {
    "reclaim": reclaim, "messages+ssd": messages, "pins+ssd": pins, "keep+ssd": keep,
    "quota+ssd": disk_quota,
    "clear+ssd": clear,
}  # fmt: skip
"""Those of a node with an SSD tier, which is full."""


def names() -> list[str]:
    """All cases, without their policy."""
    return ["fill", "gc", *CASES, *SSD_CASES]


def measure(pages: int, policy: str, wanted: list[str]) -> Iterator[tuple[str, Outcome]]:
    """Measure cases of :func:`names`, in their order.

    Args:
        pages: of the node.
        policy: of it.
        wanted: which.
    """
    for ssd, cases in (False, ["fill", "gc", *CASES]), (True, list(SSD_CASES)):
        asked = [name for name in cases if name in wanted]
        if not asked:
            continue
        world, end = World(pages, policy, ssd=ssd), spare_the_old()  # as in the daemon
        try:
            with world.collector:
                yield from _on_disk(world, asked) if ssd else _in_memory(world, asked)
        finally:
            world.close()
            end()
        del world  # two do not fit small machines


def _in_memory(world: World, wanted: list[str]) -> Iterator[tuple[str, Outcome]]:
    collector = world.collector
    world.fill()
    if "fill" in wanted:
        yield "fill", _outcome(world)
    if "gc" in wanted:
        note = f"{collector.total.cpu_s:.2f} s of CPU time in all; {collector.found} in cycles"
        yield "gc", Outcome(collector.longest, collector.pauses, collector.over, note)
    for name, case in CASES.items():
        if name in wanted:
            case(world)
            yield name, _outcome(world)
            world.fill()


def _on_disk(world: World, wanted: list[str]) -> Iterator[tuple[str, Outcome]]:
    while not world.lone.reclaimed():
        for _ in range(REPEATED):
            world.put()
    for name, case in SSD_CASES.items():
        if name in wanted:
            case(world)
            yield name, _outcome(world)


def _outcome(world: World) -> Outcome:
    watch = world.watch
    return Outcome(watch.longest, watch.turns, watch.over)
