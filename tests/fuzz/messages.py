"""Messages that a hostile or broken client might send: nearly right, so that they get far."""

from collections.abc import Callable
from random import Random

import msgspec

from kvstore.protocol import wire
from kvstore.protocol.page import (
    CanonicalLayout,
    OpaqueLayout,
    PrefixKeys,
    ShardSpec,
    SpaceIdentity,
    page_keys,
)

NUMBERS = (0, 1, 2, 3, 7, 63, 64, 255, 1 << 16, 1 << 20, 1 << 31, 1 << 32, 1 << 53, (1 << 63) - 1)
TENANTS = ("default", "red", "")
SHARDS = [
    ShardSpec(layout=CanonicalLayout(1024), layers=(0, 1), heads=(0, 1)),
    ShardSpec(layout=CanonicalLayout(1024), layers=(0, 1), heads=(1, 2)),
    ShardSpec(layout=CanonicalLayout(1024), layers=(1, 2), heads=(0, 1), group="w", window_pages=2),
    ShardSpec(layout=OpaqueLayout("e", "1", "", 1, 8192), layers=(0, 2), heads=(0, 1), group="o"),
]


class Client:
    """One client: what it was told, and messages made from that, one field of some of them wrong.

    Args:
        chance: decides everything.
    """

    def __init__(self, chance: Random) -> None:
        self.chance = chance
        self.session = b""
        self.puts: list[tuple[int, int]] = []
        self.reserved: list[int] = []
        self.leases: list[int] = []
        self.chains = [page_keys([chance.randrange(3) for _ in range(24)], 1) for _ in range(6)]
        self._makers: list[Callable[[], wire.Request]] = [
            self.open_space, self.lookup, self.lookup, self.acquire, self.acquire, self.begin_put,
            self.begin_put, self.commit_put, self.commit_put, self.store_page, self.store_page,
            self.persist, self.release,
            self.abort_put, self.corrupt, self.settled, self.report, self.keep, self.hello,
            self.ping,
        ]  # fmt: skip

    def message(self) -> wire.Request:
        """The next message."""
        made = self.chance.choice(self._makers)()
        if self.chance.random() < 0.25:
            self._spoil(made)
        return made

    def frame(self) -> bytes:
        """The next message as bytes, at times not those of a message."""
        chance = self.chance
        frame = bytearray(wire.encode(self.message()))
        roll = chance.random()
        if roll < 0.05:
            frame[chance.randrange(4, len(frame))] ^= 1 << chance.randrange(8)
        elif roll < 0.07:
            del frame[chance.randrange(5, len(frame) + 1) :]
        elif roll < 0.09:
            frame[4:] = chance.randbytes(chance.randrange(1, 200))
        elif roll < 0.10:
            frame[:4] = chance.choice(NUMBERS).to_bytes(8, "little")[:4]
        if roll < 0.09:
            frame[:4] = (len(frame) - 4).to_bytes(4, "little")
        return bytes(frame)

    def told(self, request: wire.Request, answer: wire.Answer) -> None:
        """The node answered: later messages go on from there."""
        if isinstance(answer, wire.Welcome):
            self.session = answer.session
        elif isinstance(answer, wire.PutGranted) and answer.addresses:
            assert isinstance(request, wire.BeginPut)
            self.puts.append((request.put, len(answer.addresses) // 16))
        elif isinstance(answer, wire.Committed) and answer.ahead:
            assert isinstance(request, wire.CommitPut | wire.StorePage)
            self.reserved.append(request.ahead)
        elif isinstance(answer, wire.Acquired) and answer.addresses:
            assert isinstance(request, wire.Acquire)
            self.leases.append(request.lease)

    # ---- messages that can be right ---------------------------------------------------------

    def hello(self) -> wire.Request:
        chance = self.chance
        session = chance.choice((b"", self.session, chance.randbytes(16)))
        origin = chance.choice((b"", b"origin", chance.randbytes(chance.choice((4, 64, 65)))))
        return wire.Hello(1, 1, chance.randrange(4), "fuzz\n\x1b[31m", session, origin)

    def open_space(self) -> wire.Request:
        chance = self.chance
        identity = SpaceIdentity(
            model=f"m{chance.choice((0, 0, 0, chance.randrange(1 << 20)))}", kv_dtype="uint8",
            page_tokens=1, tenant=chance.choice(TENANTS),
        )  # fmt: skip
        shards = chance.sample(SHARDS, chance.randint(1, 4))
        if chance.random() < 0.1:
            shards[0] = msgspec.structs.replace(
                shards[0], heads=(0, chance.choice(NUMBERS[1:])), group=chance.choice(("w", "x"))
            )
        return wire.OpenSpace(self._id(), identity, shards)

    def lookup(self) -> wire.Request:
        shards = self.chance.sample(range(4), self.chance.randint(1, 3))
        return wire.Lookup(self._id(), 0, shards, self._keys().packed, self._wait_ms())

    def acquire(self) -> wire.Request:
        lease_ms = self.chance.choice((1, 20, 1000))
        keys = self._keys().packed
        shard, wait_ms = self.chance.randrange(4), self._wait_ms()
        begins, parent = self.chance.random() < 0.5, self._keys().packed[:32]
        return wire.Acquire(
            self._id(), self._name(), 0, shard, keys, lease_ms, wait_ms, begins, parent=parent
        )

    def begin_put(self) -> wire.Request:
        keys = self._keys()
        tokens = self.chance.choice((b"", bytes(4 * len(keys))))
        shard, wait_ms = self.chance.randrange(4), self._wait_ms()
        return wire.BeginPut(
            self._id(), self._name(), 0, shard, keys.packed, keys.parent, tokens, wait_ms,
            self.chance.random() < 0.2,
        )  # fmt: skip

    def commit_put(self) -> wire.Request:
        chance = self.chance
        put, count = self.puts.pop(chance.randrange(len(self.puts))) if self.puts else (1, 1)
        ttl_ms = chance.choice((0, 0, 0, 1, 50))
        once, memory_only = chance.random() < 0.1, chance.random() < 0.1
        digests = b"d" * 16 * count
        ahead = chance.choice((0, self._name()))
        return wire.CommitPut(self._id(), put, digests, ttl_ms, once, memory_only, ahead)

    def store_page(self) -> wire.Request:
        put, keys = self.reserved.pop() if self.reserved else 1, self._keys()
        return wire.StorePage(
            self._id(), put, 0, self.chance.randrange(4), keys.packed[:32], keys.parent, b"d" * 16,
            self.chance.choice((b"", bytes(4))), ahead=self.chance.choice((0, self._name())),
        )  # fmt: skip

    def persist(self) -> wire.Request:
        shard, keys = self.chance.randrange(4), self._keys().packed
        return wire.Persist(self._id(), 0, shard, keys, self._wait_ms())

    def release(self) -> wire.Request:
        return wire.Release(self.leases.pop() if self.leases else 1)

    def abort_put(self) -> wire.Request:
        return wire.AbortPut(self.puts.pop()[0] if self.puts else 1)

    def corrupt(self) -> wire.Request:
        chance = self.chance
        boot = chance.choice((b"", b"b" * 16, b"x"))
        shard, generation = chance.randrange(4), chance.randrange(40)
        return wire.Corrupt(0, shard, chance.choice(list(self._keys())), generation, boot)

    def settled(self) -> wire.Request:
        return wire.Settled()

    def keep(self) -> wire.Request:
        chance = self.chance
        keys = self._keys().packed[: 32 * 128]
        ttl_ms, most = chance.choice((0, 1, 50, 60_000)), chance.choice((0, 1, 1 << 40))
        return wire.KeepConversation(0, chance.choice("xyz"), keys, ttl_ms, most)

    def report(self) -> wire.Request:
        seconds = self.chance.choice((0.001, 0.0, -1.0, 1e308, float("inf"), float("nan")))
        return wire.ReportPrefill(seconds)

    def ping(self) -> wire.Request:
        return wire.Ping(self._id())

    def _keys(self) -> PrefixKeys:
        chain = self.chance.choice(self.chains)
        start = self.chance.choice((0, 0, 0, self.chance.randrange(len(chain))))
        return chain[start : self.chance.randint(start + 1, len(chain))]

    def _name(self) -> int:
        return self.chance.randrange(1, 400)

    def _id(self) -> int:
        return self.chance.randrange(1, 1 << 31)

    def _wait_ms(self) -> int:
        return self.chance.choice((0, 0, 5, 60_000))

    # ---- and what is wrong with some --------------------------------------------------------

    def _spoil(self, message: wire.Request) -> None:
        """Give one field another value of its type."""
        name = self.chance.choice(message.__struct_fields__ or ("",))
        if not name:
            return
        value = getattr(message, name)
        if isinstance(value, bool):
            value = not value
        elif isinstance(value, int):
            value = self.chance.choice(NUMBERS) * self.chance.choice((1, -1))
        elif isinstance(value, bytes):
            value = self._bytes(value)
        elif isinstance(value, str):
            value = self.chance.choice(("", "x" * 100_000, "\0", "\ud7ff"))
        elif isinstance(value, list):
            value = value * self.chance.choice((0, 2, 1000, 100_000))
        setattr(message, name, value)

    def _bytes(self, value: bytes) -> bytes:
        chance = self.chance
        return chance.choice((
            b"", value[:-1], value + b"x", bytes(len(value)), value * 2, value[::-1],
            bytes(32), chance.randbytes(32), value * chance.choice((10, 1000)),
            chance.randbytes(32 * chance.choice((1, 600, 70_000))),
        ))  # fmt: skip
