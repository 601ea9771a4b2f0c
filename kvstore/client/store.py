"""The client library: the store as engine adapters, tools and tests use it.

Two rules for code in an engine:

* Reads never raise for a problem of the store: if the node is away, slow, full or faulty, they are
  misses (``troubles`` counts the reasons). Stores raise a ``KVStoreError`` if they fail.
* Nothing waits without a deadline, and bytes are copied in native calls that release the GIL.
"""

import json
import logging
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from kvstore.client import forks
from kvstore.client.link import Link
from kvstore.client.node_link import NodeLink
from kvstore.client.promotion import Promotion
from kvstore.client.resources import StoreResources
from kvstore.client.space import Space
from kvstore.config import DeviceSlabConfig, HostConfig, SSDConfig
from kvstore.mover.kvpool import KVPool
from kvstore.protocol import wire
from kvstore.protocol.errors import (
    DeviceCause,
    InvalidArgument,
    KVStoreError,
    PeerUnreachable,
    ProtocolError,
    TransferError,
    TransferTimeout,
)
from kvstore.protocol.page import EngineLabel, ShardSpec, SpaceIdentity

if TYPE_CHECKING:
    from kvstore.tier.gpu import DevicePool

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 1.0
SyncName = Literal["none", "interval", "always"]
_SSD_BYTES_MIN: Final = 1 << 20
_SEGMENT_BYTES_MAX: Final = 256 << 20


class KVStore:
    """A connection to a node, or a node in this process. All methods may be called by any thread.

    Make one with :meth:`connect` or :meth:`open`, and close it, or use it in a ``with`` statement.
    """

    def __init__(
        self, link: NodeLink, timeout_s: float = TIMEOUT_S, promotion: Promotion | None = None
    ) -> None:
        self._link = link
        #: Protects the two fields below. Held while a link is created, which takes a limited time.
        self._lock = threading.Lock()
        self._waiting: dict[str, Link] = {}
        self._closed = False
        self._timeout_s = timeout_s
        self._resources = StoreResources(link, self._waiting_link, timeout_s, promotion)
        forks.register(self)

    @property
    def troubles(self) -> Counter[str]:
        """Error code → how many reads became misses because of that error."""
        return self._resources.troubles

    @property
    def device_failures(self) -> Counter[DeviceCause]:
        """Cause → how many of the troubles were failures of an engine's device."""
        return self._resources.device_failures

    @classmethod
    def connect(
        cls,
        address: str = "unix:///run/kvstore/kvstore.sock",
        *,
        name: str = "client",
        session: bytes = b"",
        timeout_s: float = TIMEOUT_S,
        device_slab: DeviceSlabConfig | None = None,
        log_level: int = logging.WARNING,
        engine: EngineLabel | None = None,
    ) -> "KVStore":
        """Connect to the node at ``address``.

        If no node is running there, this still returns: reads miss, puts raise ``PeerUnreachable``,
        and a background thread connects once the node is up.

        Args:
            address: ``unix://`` and the absolute path of the node's socket.
            name: the engine's name in the node's statistics.
            session: :attr:`session_token` of the engine's first process, to join its session.
            timeout_s: maximum wait for an answer, in seconds. A request that misses it opens the
                circuit breaker: further requests fail at once until the node answers again.
            device_slab: keep copies of loaded pages in memory that this store allocates on the
                engine's device; None = no slab.
            log_level: level of the log line that says that the node is away. Lower it in all but
                one process of an engine, so that the engine logs it once.
            engine: name of the engine that this process belongs to, by which a Conductor finds the
                spaces that it has opened; None = unnamed. While another live engine has the same
                chosen name, the node refuses the connection (``engine_name_taken``): reads miss,
                and the connection is retried.

        Raises:
            InvalidArgument: the address is malformed, or the device does not exist.
            TierUnavailable: the device, its memory or torch is missing.
        """
        scheme, _, path = address.partition("://")
        if scheme != "unix" or not path.startswith("/"):
            raise InvalidArgument("address", f"{address!r} is not unix:///absolute/path")
        promotion = Promotion.open(device_slab)
        return cls(Link(path, name, session, log_level, engine), timeout_s, promotion)

    @classmethod
    def open(
        cls, capacity_bytes: int = 1 << 30, *, extent_bytes: int = 64 << 20, prefault: bool = False,
        ssd_directories: Sequence[str | Path] = (), ssd_capacity_bytes: int = 64 << 30,
        sync: SyncName = "interval", device_slab: DeviceSlabConfig | None = None,
    ) -> "KVStore":  # fmt: skip
        """Run a node in this process, for this process only.

        Args:
            capacity_bytes: size of the host-memory tier, at least 64 KiB.
            extent_bytes: unit in which memory is mapped, at least 64 KiB and a multiple of 4096;
                also the maximum size of a page.
            prefault: touch all of the memory in the background.
            ssd_directories: directories of the SSD tier, ideally one per disk. A store that later
                opens them finds the pages that were written. Empty = memory only.
            ssd_capacity_bytes: maximum size of each directory, at least 1 MiB.
            sync: when written pages survive a power cut: ``always`` at once, ``interval`` after a
                second, ``none`` at no defined time; with ``none`` a durable put is refused.
            device_slab: keep copies of loaded pages in memory that this store allocates on the
                engine's device; None = no slab.

        Raises:
            InvalidArgument: an argument has an impossible value; ``field`` names it.
            ConfigError, TierUnavailable: a directory or a device cannot be used; the message says
                which and why.
        """
        for field, size in (("capacity_bytes", capacity_bytes), ("extent_bytes", extent_bytes)):
            if size < 1 << 16:
                raise InvalidArgument(field, f"{size} is less than {1 << 16}")
        if extent_bytes % 4096:
            raise InvalidArgument("extent_bytes", f"{extent_bytes} is not a multiple of 4096")
        from kvstore.client.embedded import Embedded

        host = HostConfig(
            capacity_bytes=capacity_bytes,
            extent_bytes=min(extent_bytes, capacity_bytes // 4096 * 4096),
            prefault=prefault,
        )
        ssd = _ssd_config(ssd_directories, ssd_capacity_bytes, sync)
        promotion = Promotion.open(device_slab)
        try:
            return cls(Embedded(host, "embedded", ssd), promotion=promotion)
        except KVStoreError:
            if promotion is not None:
                promotion.close()
            raise

    @property
    def connected(self) -> bool:
        """Whether the store is connected to the node, as far as it knows; sends nothing."""
        return self._link.connected

    @property
    def session_token(self) -> bytes:
        """The ``session`` argument of :meth:`connect` for other processes of the same engine.

        Empty for a store that was made with :meth:`open`.
        """
        return self._link.session if isinstance(self._link, Link) else b""

    @property
    def node_name(self) -> str:
        """Name of the node; empty before the first connection. Sends nothing."""
        return self._link.node_name

    @property
    def load_bytes_per_s(self) -> float:
        """Speed of loads, in bytes per second (moving average)."""
        return self._resources.load_bytes_per_s

    def space(self, identity: SpaceIdentity, shards: Sequence[ShardSpec]) -> "Space":
        """Open a space: the pages of one model, in the shards that one engine holds.

        Args:
            identity: what must be equal for two engines to share pages.
            shards: the shards of this engine, at least one. ``shard`` arguments of :class:`Space`
                are indexes into it.

        Raises:
            InvalidArgument, LayoutMismatch: the node refuses; ``field`` names what is wrong. If the
                node is away, the space is opened when the node is back; if the node refuses it
                then, every read of the space misses.
        """
        space = Space(self._resources, identity, shards)
        try:
            space.numbers()
        except TransferError as error:
            log.debug("space of %s opens later: %s", identity.model, error)
        return space

    def report_prefill(self, seconds_per_token: float) -> None:
        """Report how long this engine takes to compute one token, in seconds."""
        self._link.send(wire.ReportPrefill(seconds_per_token))

    def ping(self) -> float:
        """Measure one round trip to the node, in seconds.

        Raises:
            TransferTimeout, PeerUnreachable: the node does not answer.
        """
        start = perf_counter()
        self._link.request(wire.Ping(0), self._timeout_s)
        return perf_counter() - start

    def stats(self) -> dict[str, Any]:
        """The node's statistics, as ``GET /v1/stats`` gives them.

        A process that ``socket.tenants`` limits sees the spaces and sessions of its tenants only,
        and no counts by model.

        With a device slab, the entry ``slab`` is what :meth:`slab_stats` returns.

        Raises:
            TransferTimeout, PeerUnreachable: the node does not answer.
        """
        mine = self.slab_stats()
        own = {} if mine is None else {"slab": mine}
        if not isinstance(self._link, Link):
            return {**self._link.stats(), **own}  # type: ignore[attr-defined]
        answer = self._link.request(wire.Stats(0), self._timeout_s)
        assert isinstance(answer, wire.StatsReply)
        try:
            return {**json.loads(answer.json), **own}
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"the node's statistics are no JSON object: {error}") from error

    def device_pool(self, pool: KVPool) -> "DevicePool":
        """The device side of a pool on a device: its measured speeds, and its counters.

        An adapter calls this when it starts, to find out whether the device can be used.

        Raises:
            InvalidArgument: the pool's device has a wrong name.
            DeviceUnavailable: torch or the device is missing; the message says which.
        """
        return self._resources.devices.pool(pool)

    def slab_stats(self) -> dict[str, Any] | None:
        """Statistics of this store's device slab; None without one. Sends no request."""
        promotion = self._resources.promotion
        return None if promotion is None else promotion.stats()

    def clear_slab(self) -> int:
        """Empty this store's device slab; returns how many pages it held, 0 without a slab.

        The node keeps its pages.
        """
        promotion = self._resources.promotion
        return 0 if promotion is None else promotion.slab.clear()

    def close(self) -> None:
        """Finish submitted jobs, then disconnect and unmap the node's memory.

        While a view is open or another thread is in a put, the memory stays mapped; the store
        disconnects when they have ended. After this, every other call is a miss or is refused.
        """
        promotion = self._resources.promotion
        with ExitStack() as steps:  # all steps run, even if one raises
            steps.callback(self._link.close)
            steps.callback(self._close_waiting)
            if promotion is not None:
                steps.callback(promotion.close)
            steps.callback(self._resources.devices.close)
            steps.callback(self._resources.stores.close)
            steps.callback(self._resources.slow_loads.close)
            steps.callback(self._resources.loads.close)  # its jobs may go on at slow_loads

    def forked(self) -> None:
        """In a forked child: replace the lock, which another thread may have held."""
        self._lock = threading.Lock()

    def __enter__(self) -> "KVStore":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self.close()

    def _waiting_link(self, purpose: str) -> NodeLink:
        """The connection for requests of one purpose that may wait.

        Raises:
            TransferTimeout, PeerUnreachable: it is not available now.
        """
        main = self._link
        if not isinstance(main, Link):
            return main
        link = self._waiting.get(purpose)
        if link is not None:
            return link
        if not self._lock.acquire(timeout=self._timeout_s):
            raise TransferTimeout(f"{main.path}: another connection takes too long")
        try:
            link = self._waiting.get(purpose)
            if link is None:
                # It joins the session of the main link, which logs for both.
                if self._closed or not main.session:
                    raise PeerUnreachable(f"{main.path}: {main.why}")
                link = Link(main.path, main.name, main.session, logging.DEBUG, main.engine)
                self._waiting[purpose] = link
        finally:
            self._lock.release()
        return link

    def _close_waiting(self) -> None:
        with self._lock:
            self._closed = True
            links = list(self._waiting.values())
        for link in links:
            link.close()


def _ssd_config(
    directories: Sequence[str | Path], capacity_bytes: int, sync: SyncName
) -> SSDConfig:
    if capacity_bytes < _SSD_BYTES_MIN:
        raise InvalidArgument("ssd_capacity_bytes", f"{capacity_bytes} < {_SSD_BYTES_MIN}")
    if sync not in get_args(SyncName):
        raise InvalidArgument("sync", f"{sync!r} is not one of {', '.join(get_args(SyncName))}")
    if isinstance(directories, (str, Path)):
        raise InvalidArgument("ssd_directories", "is a sequence of directories, not one")
    paths = tuple(str(Path(path).absolute()) for path in directories)
    if len(set(paths)) < len(paths):
        raise InvalidArgument("ssd_directories", "names a directory twice")
    return SSDConfig(
        directories=paths,
        capacity_bytes=capacity_bytes,
        # An eighth, so that space can be reclaimed by segments even in a small directory.
        segment_bytes=min(_SEGMENT_BYTES_MAX, max(1 << 18, capacity_bytes // 8 // 4096 * 4096)),
        sync=sync,
    )
