"""What a publisher, or somebody who pretends to be one, might send; all of it from one seed."""

import random
import struct
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from kvstore.events import zmtp
from kvstore.events.publisher import END_OF_REPLAY

SPACE = "ab" * 32
SOAK_S_MIN = 30.0
TYPES = ["BlockStored", "BlockRemoved", "AllBlocksCleared", "SomethingNew", "", "x" * 300]
FIELDS = [
    "type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "medium", "lora_id",
    "lora_name", "extra_keys", "group_idx", "space", "shard", "boot", "unknown",
]  # fmt: skip
TOPICS = [b"", b"kv-events", b"kvstore@n@aa", b"kvstore@n@bb", b"a@b@c@d", b"\xff\xfe@x@\x00",
          b"t" * 256, b"t" * 257, b"@" * 5000]  # fmt: skip


class Hostile(random.Random):
    """Chooses what is sent."""

    def nonsense(self, depth: int = 0) -> Any:
        """Any value that msgpack can say, mostly small."""
        simple = [
            None, True, 0, -1, 2**63, 2**64 - 1, -(2**63), 1.5, float("nan"), float("inf"), "",
            "GPU", "é" * self.randrange(9), self.randbytes(self.randrange(70)), SPACE,
        ]  # fmt: skip
        if depth > 4 or self.random() < 0.6:
            return self.choice(simple)
        count = self.randrange(6)
        if self.random() < 0.5:
            return [self.nonsense(depth + 1) for _ in range(count)]
        return {self.choice(FIELDS): self.nonsense(depth + 1) for _ in range(count)}

    def hashes(self, own: bool) -> list[Any]:
        count = self.choice([0, 1, 1, 2, 5, 40, 300, 65_536 if self.random() < 0.03 else 30])
        if own:
            return [self.randrange(4_000).to_bytes(32, "little") for _ in range(count)]
        base = self.randrange(3_000)
        return [base + at for at in range(count)]

    def event(self, wrong: float) -> Any:
        """One that could be, or with this probability one with a field that cannot."""
        own = self.random() < 0.5
        kind = self.choice(TYPES if self.random() < 0.1 else TYPES[:2] + TYPES[:1])
        hashes = self.hashes(own)
        size = self.choice([1, 3, 16, 16, 64, 200])
        told = self.random() < 0.8 and len(hashes) * size < 300_000
        event: dict[str, Any] = {
            "type": kind,
            "block_hashes": hashes,
            "parent_block_hash": self.choice([None, None, self.randrange(3_000), b"p" * 32]),
            "token_ids": [self.randrange(50)] * (len(hashes) * size) if told else [],
            "block_size": size,
            "medium": self.choice(["GPU", "CPU", "STORAGE", None, f"m{self.randrange(50)}"]),
        }
        if own:
            event |= {"space": SPACE, "shard": self.choice([0, 0, 0, 1, self.randrange(1024)])}
        if self.random() < wrong:
            event[self.choice(FIELDS)] = self.nonsense()
        if self.random() < wrong / 3:
            del event[self.choice(list(event))]
        return event

    def payload(self) -> bytes:
        """Of one batch."""
        shape = self.random()
        if shape < 0.04:
            return self.randbytes(self.randrange(200))
        if shape < 0.06:  # nested beyond all measure
            return b"\x93\xcb" + bytes(8) + b"\x91" * self.choice([100, 100_000]) + b"\xc0"
        if shape < 0.08:  # many of nothing
            count = self.choice([65_536, 65_537, 1 << 20])
            return b"\x93\xcb" + bytes(8) + b"\xdd" + struct.pack(">I", count) + b"\x80" * count
        if shape < 0.10:  # a list that says it is longer than it is
            return b"\x93\xcb" + bytes(8) + b"\xdd\xff\xff\xff\xff"
        wrong = self.choice([0.0, 0.0, 0.0, 0.1])
        events = [self.event(wrong) for _ in range(self.choice([0, 1, 1, 2, 3, 10, 50]))]
        batch: Any = [self.choice([1.0, 1.0, 0, 1e300, float("nan"), 2**64 - 1]), events, None]
        if self.random() < 0.03:
            batch = self.nonsense()
        data = bytearray(msgspec.msgpack.encode(batch)[: 4 << 20])
        if self.random() < 0.05:
            data = data.replace(b"BlockStored", b"Block\xff\xfered")
        for _ in range(self.choice([0] * 12 + [1, 5])):
            if data:
                data[self.randrange(len(data))] = self.randrange(256)
        if self.random() < 0.03:
            del data[self.randrange(len(data) + 1) :]
        return bytes(data)

    def number(self, before: int) -> bytes:
        """A sequence number, mostly the next."""
        chosen = self.choice([before + 1] * 12 + [before, before + 2, 0, 2**63, 2**64 - 1, 7])
        return (chosen % 2**64).to_bytes(8, "big")

    def message(self, before: int, payload: bytes, *, replayed: bool) -> list[bytes]:
        """The frames of one message."""
        frames = [self.topic(), self.number(before), payload]
        if replayed:
            frames.insert(0, b"")
        shape = self.random()
        if shape < 0.02:
            frames.pop()
        elif shape < 0.04:
            frames += [b""] * self.choice([1, 5, 6, 50])
        elif shape < 0.06:
            frames[-2] = self.randbytes(self.randrange(20))
        elif shape < 0.12 and replayed:
            frames[-2:] = [END_OF_REPLAY, b""]
        return frames

    def topic(self) -> bytes:
        return self.choice(TOPICS if self.random() < 0.1 else TOPICS[2:3])

    def handshake(self, side: zmtp.Side) -> tuple[bytes, bool]:
        """Greeting and READY of a publisher, and whether they are right."""
        good = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
        kind = side.socket_type
        ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind
        good += bytes((4, len(ready))) + ready
        if self.random() < 0.75:
            return good, True
        bad = bytearray(good)
        for _ in range(self.randrange(1, 4)):
            bad[self.randrange(len(bad))] = self.randrange(256)
        return bytes(bad[: self.randrange(len(bad) + 1)]), False

    def frames(self) -> Iterator[bytes]:
        """Bytes that are no messages, or that never become one."""
        match self.randrange(7):
            case 0:
                yield self.randbytes(self.randrange(1, 5_000))
            case 1:
                yield b"\x02" + struct.pack(">Q", self.choice([2**63, 5 << 20, 2**64 - 1]))
            case 2:  # a message without an end
                for _ in range(self.choice([3, 2_000])):
                    yield b"\x01\x01x"
            case 3:  # commands without an end
                for _ in range(self.choice([1, 500])):
                    yield zmtp.PING * 40
            case 4:
                yield b"\x04\x05\x04PONG" * self.choice([1, 50_000])
            case 5:  # empty messages
                yield b"\x00\x00" * self.choice([1, 100_000])
            case 6:
                yield b"\x04\x00\x04\x01\xff"


def stall_s(seconds: float) -> float:
    """CPU seconds that one turn may take in a test of so many seconds.

    A soak has the process to itself. In the suite, the collector of a process with thousands of
    tests behind it and a host that takes the CPU away both count as the turn's.
    """
    return 0.1 if seconds >= SOAK_S_MIN else 0.5


class Stopwatch:
    """CPU seconds of this thread between two looks: what neighbours do does not show in them."""

    def __init__(self) -> None:
        self.worst = 0.0
        self._before = time.thread_time()

    def look(self) -> None:
        now = time.thread_time()
        self.worst = max(self.worst, now - self._before)
        self._before = now
