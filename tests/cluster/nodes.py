"""Nodes as their peers see them: a publisher behind a listener with TLS, and pages."""

import asyncio
import contextlib
import secrets
import ssl
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from kvstore.cluster.serving import EventTunnels
from kvstore.events.publisher import EventBatch, EventPublisher, RemovedEvent, StoredEvent
from kvstore.events.questions import END, HEAD, PAGES, OpenQuestion
from kvstore.process.tls import CertificateFiles
from kvstore.protocol import wire
from kvstore.protocol.page import CanonicalLayout, PrefixKeys, ShardSpec, SpaceIdentity

HELD_S_MAX = 20.0
CERTIFICATES = Path(__file__).parent / "certificates"


def files(name: str = "node", authority: str = "authority") -> CertificateFiles:
    return CertificateFiles(
        *(str(CERTIFICATES / one) for one in (f"{name}.pem", f"{name}.key", f"{authority}.pem"))
    )


SPACE = SpaceIdentity(model="m", kv_dtype="bfloat16", page_tokens=16)
_HELLO = msgspec.msgpack.Decoder(wire.FollowEvents)


def shard(number: int, window: int = 0) -> ShardSpec:
    return ShardSpec(
        layout=CanonicalLayout(head_dim=8), layers=(number, number + 1), heads=(0, 1),
        group=f"window {window}", window_pages=window,
    )  # fmt: skip


class PeerNode:
    """A node that others can follow; it has the pages that the test says.

    Attributes:
        name: its name.
        port: of its listener, the same for every start.
        tunnels: those who follow it.
        hellos: what they said.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.port = 0
        self.hellos: list[wire.FollowEvents] = []
        self.refuse_with = b""
        self._gate = threading.Event()
        self._gate.set()
        self._held: dict[tuple[str, str, str], dict[bytes, None]] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    def hold(self) -> None:
        """Stop the publisher's thread, as if the node were stopped; see :meth:`let_go`."""
        self._gate.clear()

    def let_go(self) -> None:
        self._gate.set()

    async def start(self, certificates: CertificateFiles | None) -> None:
        self.boot = secrets.token_hex(16)
        topic = f"kvstore@{self.name}@{self.boot}".encode()
        self.publisher = EventPublisher(None, topic=topic)
        turn = self.publisher._server.turn

        def gated(timeout_s: float) -> bool:
            self._gate.wait(HELD_S_MAX)
            return turn(timeout_s)

        self.publisher._server.turn = gated  # type: ignore[method-assign]
        self.publisher.answer_with(self._answer)
        self.tunnels = EventTunnels(self.publisher)
        context: ssl.SSLContext | None = certificates.accepting() if certificates else None
        self._server = await asyncio.start_server(
            self._accept, "127.0.0.1", self.port, ssl=context, limit=64 << 10
        )
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        self.let_go()
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self.publisher.close)
        self._held.clear()

    def store(
        self, keys: PrefixKeys, *shards: ShardSpec, medium: str = "CPU",
        space: SpaceIdentity = SPACE,
    ) -> None:  # fmt: skip
        hashes = [bytes(key) for key in keys]
        names = [(space.digest.hex(), one.digest.hex()[:16], medium) for one in shards]
        for name in names:
            self._held.setdefault(name, {}).update(dict.fromkeys(hashes))
        self.publisher.publish([_stored(name, hashes, keys.parent) for name in names])

    def remove(self, keys: PrefixKeys, *shards: ShardSpec, medium: str = "CPU") -> None:
        hashes = [bytes(key) for key in keys]
        names = [(SPACE.digest.hex(), one.digest.hex()[:16], medium) for one in shards]
        for name in names:
            for key in hashes:
                self._held[name].pop(key, None)
        self.publisher.publish(
            [
                RemovedEvent(
                    block_hashes=hashes, medium=medium, space=space, shard=0, shard_digest=digest
                )
                for space, digest, medium in names
            ]
        )

    def _answer(self, question: OpenQuestion) -> None:
        """Called on the publisher's thread: everything was published before, or is on the way."""
        number = self.publisher.sequence_next
        held = [(name, list(keys)) for name, keys in list(self._held.items())]
        question.put(HEAD, {"boot": self.boot, "sequence_first": number})
        events = [_stored(name, keys, b"") for name, keys in held if keys]
        question.put(PAGES, EventBatch(1.0, events))
        pages = sum(len(keys) for _, keys in held)
        question.put(END, {"sequence_end": number, "pages": pages})

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            size = wire.frame_length(await reader.readexactly(4))
            hello = _HELLO.decode(await reader.readexactly(size))
            self.hellos.append(hello)
            if self.refuse_with:
                writer.write(self.refuse_with)
                await writer.drain()
            else:
                await self.tunnels.serve_events(reader, writer, hello)
        except (OSError, EOFError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.transport.abort()


def _stored(name: tuple[str, str, str], hashes: Sequence[bytes], parent: bytes) -> StoredEvent:
    space, digest, medium = name
    return StoredEvent(
        block_hashes=list(hashes), parent_block_hash=parent or None, token_ids=[], block_size=16,
        medium=medium, space=space, shard=0, shard_digest=digest,
    )  # fmt: skip


@asynccontextmanager
async def nodes(
    *names: str, certificates: CertificateFiles | None = None
) -> AsyncIterator[list[PeerNode]]:
    """Some nodes that are running, with TLS or without."""
    made = [PeerNode(name) for name in names]
    started: list[PeerNode] = []
    try:
        for one in made:
            await one.start(certificates)
            started.append(one)
        yield made
    finally:
        for one in started:
            with contextlib.suppress(OSError):
                await one.stop()
