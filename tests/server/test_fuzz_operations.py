"""Goal: no order of operations breaks the state, ends the node, or leaves anything held.

They are carried out a step at a time, between what engines do. Everything follows from a seed,
which a failure names. A soak looks for ten minutes, with seeds of its own.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic, monotonic_ns
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvstore.protocol.errors import KVStoreError
from kvstore.server import operate
from kvstore.server.answers import Policy
from kvstore.server.channel import Caller
from kvstore.server.inspect import Inspection
from kvstore.server.operate import OperatorRequests
from kvstore.server.refusal import Refusal
from kvstore.state.choice.policies import POLICIES
from kvstore.state.table.invariants import check
from kvstore.state.tree.node import Retention
from tests.state.disk.disk_world import DiskWorld
from tests.state.world import PAGE, key

ME = Caller("operate", "fuzz")


class Desk:
    """One node's state, operations under way in it, and engines that store and read meanwhile."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.world = DiskWorld(write=chance.choice(["through", "back"]), extents=3)
        self.table = self.world.table
        for kept in (self.table.keeping.pins, self.table.keeping.conversations):
            kept.budget_bytes = kept.disk_budget_bytes = 6 * PAGE
        self.other = self.world.space(self.world.process("other"), tenant="blue")
        node = SimpleNamespace(pages=self.table, sessions={}, processes={})
        memory = SimpleNamespace(read=self._read)
        status = SimpleNamespace(
            unready=str, stats=dict, tiers=list, event_source=dict,
            nodes=lambda: SimpleNamespace(joined="off", membership=None, directory="off"),
            registered=dict, others=None,
            policy=lambda: Policy(name=self.table.eviction.policy, known=list(POLICIES),
                                  configured="lru", ssd=None),
        )  # fmt: skip
        self.tasks: list[Any] = []
        turns = SimpleNamespace(start=lambda work, ended, _: self.tasks.append((work, ended)))
        self.operation = OperatorRequests(self.table, memory, status, turns)
        self.inspection = Inspection(node, status)
        self.leases: list[tuple[Any, int]] = []

    def _read(self, _extent: int, _offset: int, into: memoryview) -> int:
        """Bytes that are never right: whatever is verified in memory is quarantined."""
        return len(into)

    def act(self) -> None:
        self.table.moment.now_ns = monotonic_ns()
        actions = [self._begin, self._step, self._step, self._step, self._engine, self._disk]
        self.chance.choice(actions)()
        check(self.table)

    def settle(self) -> None:
        """End all that is under way, and let go of all that was asked for."""
        for lease in self.leases:
            self.table.release(*lease)
        for _ in range(100_000):
            if not self.tasks:
                break
            for job in self.operation._jobs._jobs.values():
                job.cancelled = True
            self._step()
            self._disk()
        assert not self.tasks, "work that never ends"
        for pin in list(self.table.keeping.pins):
            self.table.keeping.unpin(pin.number)
        for one in list(self.table.keeping.conversations):
            self.table.keeping.end(one.space, one.name)
        self.table.expire(max(1, self.table.now_ns))
        self.world.end_all()
        check(self.table)
        assert {job.state for job in self.operation._jobs._jobs.values()} <= {
            "done", "cancelled", "failed",
        }  # fmt: skip
        assert self.table.slots.stats().pinned_bytes == 0
        assert self.operation._verifier._process.idle
        self.operation.close()

    def _begin(self) -> None:
        kind = self.chance.choice([*self.operation.handlers, *self.inspection.handlers])
        fields = {
            name: self._value(name)
            for name in kind.__struct_fields__
            if name in kind.__struct_fields__[: -len(kind.__struct_defaults__) or None]
            or self.chance.random() < 0.5
        }
        with suppress(msgspec.ValidationError):
            asked = msgspec.convert(fields, kind)
            handlers = self.operation.handlers
            if kind in handlers:
                self.tasks.append((handlers[kind](asked, ME), lambda _result: None))
            else:
                work = self.inspection.handlers[kind](asked)
                self.tasks.append((work, lambda _result: None))

    def _value(self, name: str) -> Any:
        chance = self.chance
        label = chance.choice([self.world.mine.label, self.other.label, "0" * 64])
        path = "".join(chance.choices("ab", k=chance.randint(1, 5)))
        keys = [key(path[:end]) for end in range(1, len(path) + 1)]
        made: dict[str, Callable[[], Any]] = {
            "space": lambda: label, "other": lambda: label, "among": lambda: [label],
            "key": lambda: key(path).hex(), "prefix": lambda: key(path).hex(),
            "keys": lambda: chance.choice([[one.hex() for one in keys], b"".join(keys)]),
            "cursor": lambda: chance.choice([0, "0", "3", key(path).hex()]),
            "limit": lambda: chance.choice([1, 2, 1000]), "depth": lambda: chance.randint(1, 9),
            "pages": lambda: chance.choice([1, 4, 1000]),
            "tier": lambda: chance.choice(["host", "ssd"]),
            "to": lambda: chance.choice(["host", "ssd"]),
            "ttl_s": lambda: chance.choice([0.0, 1e-9, 60.0, -1.0, float("nan"), 1e300]),
            "deadline_s": lambda: chance.choice([1e-9, 60.0]),
            "bytes_per_s": lambda: chance.choice([0, 1]), "copies": lambda: chance.randint(1, 3),
            "node": lambda: "b", "conversation": lambda: chance.choice("xy"),
            "bytes_max": lambda: chance.choice([0, 0, PAGE, 1 << 62]),
            "quota_bytes": lambda: chance.choice([0, 0, PAGE, 6 * PAGE, 1 << 62]),
            "reserved_bytes": lambda: chance.choice([0, 0, PAGE, 1 << 62]),
            "name": lambda: chance.choice([*POLICIES, "x"]), "all": lambda: chance.random() < 0.5,
            "job": lambda: chance.randint(0, 9), "pin": lambda: chance.randint(0, 9),
            "shard": lambda: chance.randint(0, 2), "page_tokens": lambda: 1,
            "hits_min": lambda: 1, "hits_max": lambda: 3, "age_min_s": lambda: 0.0,
            "age_max_s": lambda: 1.0,
        }  # fmt: skip
        return made[name]()

    def _step(self) -> None:
        if not self.tasks:
            return
        task = self.chance.choice(self.tasks)
        work, ended = task
        try:
            next(work)
        except StopIteration as end:
            self.tasks.remove(task)
            ended(end.value)
        except (Refusal, KVStoreError) as error:
            refusal = error if isinstance(error, Refusal) else Refusal.of(error)
            assert refusal.status != 500, refusal
            self.tasks.remove(task)
            ended(refusal)

    def _engine(self) -> None:
        world, chance = self.world, self.chance
        path = "".join(chance.choices("ab", k=chance.randint(1, 5)))
        match chance.randint(0, 4):
            case 0 | 1:
                keep = Retention(read_once=chance.random() < 0.1)
                with suppress(KVStoreError):
                    world.store(world.me, world.mine, path, keep=keep)
            case 2:
                world.lookup(world.mine, path)
            case 3:
                with suppress(KVStoreError):
                    number, _ = world.acquire(world.me, world.mine, path)
                    self.leases.append((world.me, number))
            case _ if self.leases:
                self.table.release(*self.leases.pop(chance.randrange(len(self.leases))))

    def _disk(self) -> None:
        for number in [job.job for job in self.world.jobs(object)][:2]:
            del self.world.open[number]
            self.world.disk.completed(number, None)


def orders(seeds: range, seconds: float) -> Iterator[int]:
    """Seeds, as long as there is time; at least three."""
    end = monotonic() + seconds
    for count, seed in enumerate(seeds):
        if count >= 3 and monotonic() > end:
            return
        yield seed


def try_orders(seeds: range, seconds: float) -> None:
    for seed in orders(seeds, seconds):
        try:
            desk = Desk(random.Random(seed))
            for _ in range(400):
                desk.act()
            desk.settle()
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


def test_operations_in_any_order_leave_a_sound_state_with_nothing_held(monkeypatch):
    monkeypatch.setattr(operate, "LIMIT_S", 0.0)
    monkeypatch.setattr(operate, "_STEP_NODES", 1)
    try_orders(range(1000), 3.0)


@pytest.mark.soak("http", minutes=10)
def test_operations_in_any_order_for_long(monkeypatch, soak_s):
    monkeypatch.setattr(operate, "LIMIT_S", 0.0)
    monkeypatch.setattr(operate, "_STEP_NODES", 1)
    start = random.SystemRandom().randrange(1 << 40)
    try_orders(range(start, start + (1 << 30)), soak_s)
