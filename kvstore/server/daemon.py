"""``kvstore-server``: runs one node."""

import argparse
import asyncio
import faulthandler
import hashlib
import logging
import os
import platform
import secrets
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import Final, cast

import uvloop

from kvstore.config import Loaded, ServerConfig, load, show, values
from kvstore.config.machine import Needs, memory_checks, version_of
from kvstore.node.desk import Desk
from kvstore.node.node import Node
from kvstore.node.requests import NodeLimits
from kvstore.node.ssd import DiskTier
from kvstore.process import logs
from kvstore.process.collector import spare_the_old
from kvstore.process.logs import event
from kvstore.protocol.errors import ConfigError, KVStoreError, TierUnavailable
from kvstore.protocol.sizes import exact
from kvstore.server.cluster import join
from kvstore.server.http import HttpServer
from kvstore.server.idle import IdleChecks
from kvstore.server.installed import installed
from kvstore.server.kept import set_budgets, set_disk_budgets
from kvstore.server.notify import ServiceManager
from kvstore.server.place import claim
from kvstore.server.publish import Publication
from kvstore.server.questions import FollowerQuestions
from kvstore.server.socket import SocketServer
from kvstore.server.status import DaemonSources, NodeStatus
from kvstore.server.watch import Watch
from kvstore.state.choice.ghosts import Ghosts
from kvstore.state.table.announce import Announcement
from kvstore.state.tree.slots import SlotTable
from kvstore.tier.disk import Disk
from kvstore.tier.host import HostMemory
from kvstore.tier.stale import MemoryRecord

log = logging.getLogger("kvstore.server.daemon")  # also if run with python -m

TICK_S: Final = 0.02
LONG_TURN_NS: Final = {"compiled": 5_000_000, "pure": 50_000_000}
"""Turns of the loop longer than this are logged, the longest of each window: that of a pure core
takes about ten times as long."""
LAG_WINDOW_S: Final = 15.0
"""The maximum lag of this window and the previous one is reported, so that every scrape sees it."""
WRITE_OUT_S: Final = 10.0
"""Seconds for writing pages to the SSDs before an orderly stop."""
END_WAIT_S: Final = 5.0
"""Seconds for threads to end before the process exits without them."""
_STALE_CHECK_TICKS: Final = 50


class Daemon:
    """A node with its memory, disk tier, sockets, HTTP and events.

    Args:
        loaded: the configuration, with the sources of its values.
        undo: gets a function to release each resource as soon as it is created; the caller runs
            them.
        device: the disk of the SSD tier; None = the file system.

    Raises:
        ConfigError, TierUnavailable: the socket's path, memory or an endpoint is not available; the
            message says which and why.
    """

    def __init__(
        self, loaded: Loaded[ServerConfig], undo: ExitStack, device: Disk | None = None
    ) -> None:
        """Create the memory and the node; nothing listens yet."""
        self.loaded = loaded
        self._started_s = monotonic()
        self._manager = ServiceManager()
        undo.callback(self._manager.close)
        if self._manager.watchdog_s:
            faulthandler.enable()  # a watchdog sends SIGABRT: log where it hangs
        self._manager.status("starting")
        self._undo = undo
        self._device = device
        self.config = config = loaded.config
        undo.callback(os.close, claim(Path(config.socket.path)))  # before anything is written
        host = config.host
        self.boot = secrets.token_bytes(16)
        extents = host.capacity_bytes // host.extent_bytes
        # Identifies this node among those of the machine by its socket.
        place = hashlib.sha256(os.path.realpath(config.socket.path).encode()).hexdigest()[:12]
        self._label = f"{config.node.name}.{place}"
        self._record = MemoryRecord(Path(f"{config.socket.path}.memory"))
        stale = min(extents, -(-self._record.stale_bytes() // host.extent_bytes))
        slots = SlotTable(host.extent_bytes, extents - stale, stale)
        quota = host.session_quota_bytes or host.capacity_bytes // 2
        limits = NodeLimits(quota, int(host.lease_s_max * 1000))
        self.node = Node(
            config.node.name, self.boot, slots, limits, lambda: secrets.token_bytes(16),
            host.policy,
        )  # fmt: skip
        table = self._table = self.node.pages
        set_budgets(table.keeping, config.admin, host.capacity_bytes)
        table.residents.ghosts = Ghosts(config.admin.ghosts_max)
        table.residents.ghosts.policy = host.policy
        self.memory = HostMemory(
            self._label, self.boot, host.extent_bytes, prefault=host.prefault, record=self._record
        )
        undo.callback(self.memory.close)
        self.memory.create(extent.number for extent in slots.extents)
        self.publication = Publication(
            config.events, config.socket, config.node.name, self.boot,
            to_peers=bool(config.cluster.name),
        )  # fmt: skip
        undo.callback(self._close_publication)
        self.desk = Desk(
            self.node, self.memory, self.publication.publish,
            soon=lambda call: asyncio.get_running_loop().call_soon(call),
            check_every_step=config.debug.check_every_step,
        )  # fmt: skip
        self.status = NodeStatus(
            self.desk, self.memory, host.policy, self._started_s, self.publication
        )
        self.socket = SocketServer(config.socket, self.desk, self.memory, self.status.stats)
        self.disk: DiskTier | None = None
        self._announcement = Announcement(self._table)
        self._watch = Watch(self.node, self.status.unready)
        self._idle_checks = IdleChecks(self.desk)
        #: Maximum lag of the loop: in this window, and in the previous one.
        self._lags_s = (0.0, 0.0)
        self._why = ""
        self._failed = False

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT.

        Returns:
            Exit status; 1 if an assertion failed, so that the state cannot be trusted.

        Raises:
            ConfigError, TierUnavailable: the SSD tier or an address is not available.
        """
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        loop.set_exception_handler(lambda _, context: self._fail(context, stop))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop, number.name, stop)
        http = HttpServer(self.loaded, self.desk, self.memory, self.status)
        self.status.sources = DaemonSources(
            self.socket.connections, self.socket.accepted_connections, http.stats,
            lambda: max(self._lags_s),
        )  # fmt: skip
        self._undo.callback(http.stop)
        if self.config.ssd.directories:
            self._recover(loop)
        questions = FollowerQuestions(self.desk, self.publication)
        self._undo.callback(questions.close)
        cluster = join(self.config, self.desk, self.memory, self.publication, http.url, self._undo)
        self.status.others = cluster
        self.socket.listen()
        self._undo.callback(self.socket.close)
        await http.start()
        async with asyncio.TaskGroup() as tasks:
            serving = [
                tasks.create_task(one) for one in (self.socket.serve(), http.watch(), self._tick())
            ]
            if cluster is not None:
                serving.append(tasks.create_task(cluster.run()))
            self._say_ready(http)
            await stop.wait()
            self._watch.look(monotonic_ns())
            event(log, logging.INFO, "stopping", why=self._why, engines=self._watch.engines)
            self._manager.stopping(self._status())
            if not self._failed:
                await self._write_out()
            for task in serving:
                task.cancel()
        return int(self._failed)

    def _recover(self, loop: asyncio.AbstractEventLoop) -> None:
        """Recover the pages on the SSDs."""
        self._manager.status("recovering pages from the SSDs")

        def wake() -> None:
            loop.call_soon_threadsafe(self.desk.poll_disk)

        disk = DiskTier(self.config.ssd, self.node, self.memory, wake, device=self._device)
        self._undo.callback(disk.close)
        self.disk = self.desk.disk = disk
        if disk.recovered:
            event(log, logging.INFO, "pages recovered", **disk.recovered)
        self._announcement = Announcement(self._table, tokens=self.publication.tells_tokens)
        set_disk_budgets(self._table.keeping, self.config.admin, disk.pages.log.capacity_bytes)

    def _close_publication(self) -> None:
        try:
            self.publication.close()
        except KVStoreError as error:  # an earlier error is more important
            event(log, logging.ERROR, "events did not end", why=str(error))

    def _stop(self, why: str, stop: asyncio.Event) -> None:
        self._why = self._why or why
        stop.set()

    def _fail(self, context: dict[str, object], stop: asyncio.Event) -> None:
        """An exception on the loop that owns the state: stop the node."""
        error = context.get("exception")
        log.critical("%s", context.get("message"), exc_info=cast("BaseException | None", error))
        self._failed = True
        self._stop("its state cannot be trusted any more", stop)

    def _status(self) -> str:
        """One line of status for the service manager."""
        return f"stopping: {self._why}" if self._why else self.status.unready() or "serving"

    async def _write_out(self) -> None:
        """Before an orderly stop: write pages to disk, so that a restart finds them."""
        if self.disk is None:
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + WRITE_OUT_S
        disk = self.disk.pages
        self._table.tiers.write_out(self._table.spaces)
        while not disk.settled and loop.time() < deadline:
            self.desk.flush()
            await asyncio.sleep(TICK_S)
        if not disk.settled:
            log.warning("stopped before all pages were on disk: %s s were not enough", WRITE_OUT_S)

    async def _tick(self) -> None:
        """Apply deadlines, measure the loop's lag, check the state, take back withheld memory."""
        loop = asyncio.get_running_loop()
        ticks = 0
        window = before = loop.time()
        while True:
            await asyncio.sleep(TICK_S)
            worst, earlier = self._lags_s
            # What this very loop did since the last time counts too.
            worst, before = max(worst, loop.time() - before - TICK_S), loop.time()
            if before - window >= LAG_WINDOW_S:
                worst, earlier, window = 0.0, worst, before
                took_ns, what = self._table.meter.take_longest()
                if took_ns >= LONG_TURN_NS[installed().core]:
                    log.warning("the loop was blocked for %.0f ms by %s", took_ns / 1e6, what)
            self._lags_s = worst, earlier
            self.desk.advance()
            if not self._announcement.done:
                self.desk.operate(self._announcement.step, "an announcement of pages on disk")
            self._watch.look(monotonic_ns())
            self._idle_checks.turn(monotonic())
            self._manager.turn(monotonic())
            ticks += 1
            if ticks % _STALE_CHECK_TICKS == 0:
                self._manager.status(self._status())
            if self._table.slots.withheld and ticks % _STALE_CHECK_TICKS == 0:
                await self._take_back()
                before = loop.time()

    async def _take_back(self) -> None:
        size = self.config.host.extent_bytes
        try:
            stale = await asyncio.to_thread(self._record.stale_bytes)
        except RuntimeError as error:  # no more threads
            log.warning("withheld memory is looked for again later: %s", error)
            return
        slots = self._table.slots
        take_back(slots, self.memory, slots.withheld - -(-stale // size))

    def _say_ready(self, http: HttpServer) -> None:
        socket = f"unix://{self.config.socket.path}"
        sys.stdout.write(
            f"kvstore-server ready: socket {socket}"
            f" http {http.url} events {self.publication.endpoint or 'off'}"
            f" replay {self.publication.replay_endpoint or 'off'} admin {http.admin_url}\n"
        )
        sys.stdout.flush()
        slots = self._table.slots
        event(
            log, logging.INFO, "ready", node=self.node.name, socket=socket, http=http.url,
            admin=http.admin_url,
            events=self.publication.endpoint or "off",
            capacity_bytes=len(slots.extents) * slots.extent_bytes,
            pages_recovered=sum(len(space.nodes) for space in self._table.spaces),
            took_s=round(monotonic() - self._started_s, 3),
        )  # fmt: skip
        self._manager.ready(self._status())


def take_back(slots: SlotTable, memory: HostMemory, count: int) -> int:
    """Allocate memory for up to ``count`` withheld extents; returns how many succeeded.

    The caller retries the others later; a failure does not stop a running node.
    """
    made = 0
    try:
        for number in slots.withheld_numbers(count):
            memory.create([number])
            made += 1
    except TierUnavailable as error:
        log.warning("withheld memory cannot be allocated yet: %s", error)
    slots.provide(made)
    return made


async def serve(loaded: Loaded[ServerConfig], device: Disk | None) -> int:
    """Run a daemon, and release its resources; returns the exit status."""
    with ExitStack() as undo:
        return await Daemon(loaded, undo, device).run()


def require_memory(needs: Needs) -> None:
    """Check that the memory fits; log a warning if it barely does.

    Raises:
        ConfigError: it can never fit; the message says what was found and what to do.
    """
    for check in memory_checks(needs):
        if check.status == "fail":
            raise ConfigError(
                f"host.capacity_bytes={exact(needs.capacity_bytes)}: {check.name}: {check.found}:"
                f" {check.advice}"
            )
        if check.status == "warn":
            event(log, logging.WARNING, "memory is scarce", check=check.name, found=check.found,
                  advice=check.advice)  # fmt: skip


def main(arguments: Sequence[str] | None = None, device: Disk | None = None) -> int:
    """Run the daemon; returns the process's exit status; 2 if it did not start."""
    if not __debug__:
        sys.stderr.write("kvstore-server relies on assertions and does not run under python -O\n")
        return 2
    options = _parser().parse_args(arguments)
    before = threading.enumerate()
    status, refusal = 2, ""
    with ExitStack() as undo:
        undo.callback(logs.start(options.log_level, options.log_format))
        try:
            loaded = load(ServerConfig, options.config, overrides=options.set)
            if options.print_config:
                sys.stdout.write(show(loaded))
                return 0
            _say_what_starts(loaded)
            require_memory(loaded.config.needs)
            undo.callback(spare_the_old())
            status = uvloop.run(serve(loaded, device))
            event(log, logging.INFO, "stopped", status=status)
        except KVStoreError as error:
            refusal = f"{error.code}: {error}"
        except OSError as error:  # not translated to an error of ours
            refusal = f"{KVStoreError.code}: {error}"
        except BaseExceptionGroup as error:  # of tasks that ran in parallel
            log.critical("the node failed", exc_info=error)
            status = 1
        hanging = _hanging(thread for thread in threading.enumerate() if thread not in before)
        if refusal and options.log_format == "json":
            event(log, logging.CRITICAL, "not started", why=refusal)
    if refusal and options.log_format == "text":
        sys.stderr.write(f"kvstore-server: {refusal}\n")
    if hanging:  # the interpreter would wait for them forever
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore-server", description="Store KV pages for the engines of this machine."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML configuration file")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
        help="one setting; overrides the environment (KVSTORE__SECTION__KEY) and the file",
    )  # fmt: skip
    parser.add_argument(
        "--print-config", action="store_true", help="print every setting and its source, and exit"
    )
    parser.add_argument(
        "--log-level", default="INFO", type=str.upper,
        choices=["DEBUG", "INFO", "WARNING", "ERROR"], help="minimum level to log; default: INFO",
    )  # fmt: skip
    parser.add_argument(
        "--log-format", default="text", choices=["text", "json"],
        help="format of the log on standard error; default: text",
    )  # fmt: skip
    version = f"kvstore-server {version_of()}"
    parser.add_argument("--version", action="version", version=version)
    return parser


def _say_what_starts(loaded: Loaded[ServerConfig]) -> None:
    event(
        log, logging.INFO, "starting", node=loaded.config.node.name, pid=os.getpid(),
        version=version_of(), python=platform.python_version(),
        kernel=platform.release(), **installed()._asdict(),
        **{name: version_of(name) for name in ("msgspec", "uvloop", "numpy")},
    )  # fmt: skip
    for one in values(loaded):
        if one["source"] != "default":
            event(log, logging.INFO, "setting", **one)


def _hanging(threads: Iterable[threading.Thread]) -> list[threading.Thread]:
    """The threads that have not ended after a short wait."""
    deadline = monotonic() + END_WAIT_S
    waited = [thread for thread in threads if not thread.daemon]
    for thread in waited:
        thread.join(max(0.0, deadline - monotonic()))
    left = [thread for thread in waited if thread.is_alive()]
    if left:
        event(log, logging.CRITICAL, "ended without waiting for threads",
              threads=[thread.name for thread in left])  # fmt: skip
    return left


if __name__ == "__main__":
    raise SystemExit(main())
