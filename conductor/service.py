"""``kvstore-conductor``: assembles the parts, serves HTTP, and shuts down in order."""

import argparse
import asyncio
import logging
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import uvloop
from aiohttp import web

from conductor.config import ConductorConfig, load_conductor
from conductor.costs.book import CostBook
from conductor.front.admin import Admin, errors_as_json
from conductor.front.advising import Adviser
from conductor.front.auth import Auth, MadeToken
from conductor.front.bodies import Bodies
from conductor.front.bringing import Bringer
from conductor.front.connections import (
    BACKLOG,
    CAUSES,
    CONNECTIONS_MAX,
    KEEPALIVE_S,
    Front,
    complaints,
)
from conductor.front.dispatching import dispatcher_of, journal_head
from conductor.front.guarding import Guard
from conductor.front.journaling import JournalFile
from conductor.front.kept_costs import KeptCosts
from conductor.front.local_tokenizers import load_tokenizers
from conductor.front.membership import Membership
from conductor.front.metrics import Metrics, index_gauges
from conductor.front.others import OthersReader
from conductor.front.parts import Parts
from conductor.front.prompts import Prompts
from conductor.front.proxy import Proxy
from conductor.front.tracing import TraceFile
from conductor.front.upstream import Upstream
from conductor.front.waiting import RequestQueue
from conductor.routing.admission import AdmissionRules, ServiceClass
from conductor.routing.decisions import DecisionLog
from conductor.routing.engines import EngineRegistry
from conductor.routing.policy import POLICIES
from conductor.routing.prefixes import PrefixView
from conductor.simulator import command as simulate
from kvstore.cluster.store import RecordStore
from kvstore.config import show
from kvstore.config.machine import version_of
from kvstore.index.control import IndexSettings, SourceBounds
from kvstore.index.face import PrefixIndex
from kvstore.index.process import IndexProcess
from kvstore.process.collector import look_seldom
from kvstore.process.faults import Faults
from kvstore.process.listeners import Tcp, advice
from kvstore.protocol.errors import ConfigError, reason

_LAG_PERIOD_S: Final = 0.05
_LAG_WINDOW: Final = 20
"""Number of timers whose maximum delay is exported: about one second."""
_CUT_GRACE_S: Final = 1.0
"""Seconds for cancelled handlers to end after the drain."""

_DESCRIPTORS_PER_CONNECTION: Final = 3
"""One for the client, one for the engine, and one in reserve."""
LOG_LEVELS: Final = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

_log = logging.getLogger(__name__)


class Conductor:
    """One Conductor on a running event loop.

    Attributes:
        bodies: of the requests in progress.
        failed: an assertion failed, so the state cannot be trusted.
        trace: the trace of its requests; None = none is written.
        token_path: file with the token generated at the start; None if a token is configured.
    """

    def __init__(
        self,
        config: ConductorConfig,
        clock: Callable[[], float] = time.monotonic,
        index: PrefixIndex | None = None,
        store: RecordStore | None = None,
    ) -> None:
        """Create the parts; nothing listens or connects yet.

        Args:
            config: all settings; each part gets its section.
            clock: seconds, monotonic; also used for health and deadlines of the queue.
            index: the prefix index; None = one in a process of its own.
            store: has the nodes of ``config.cluster``; None = the one in ``config``.

        Raises:
            ConfigError: a token, that store, a tokenizer or the trace's file cannot be used.
        """
        self.config = config
        self.failed = False
        self.token_path: Path | None = None
        self._stop: asyncio.Event | None = None
        self.faults = Faults(_log, "HTTP")
        self._guard = Guard(self.faults)
        self._auth = Auth(config.http, self.faults)
        self._tokenizers = load_tokenizers({one.name: one.tokenizer for one in config.models})
        self.trace, self._journal = _trace(config), _journal(config)
        health = config.health
        self.registry = EngineRegistry(health.probe_s, health.dead_after, health.backoff_s_max)
        self.index: PrefixIndex = index or IndexProcess(index_settings(config))
        self.bodies, self._upstream = Bodies(config.http.body_bytes_max), Upstream(config.deadline)
        policy = POLICIES[config.policy.name]
        prefixes = PrefixView(self.index, self.registry, needed=policy.needs_prefixes)
        self._book, rules = CostBook(), admission_rules(config)
        self._kept_costs = KeptCosts(config.costs.file, self._book)
        dispatcher = dispatcher_of(config, self.registry, self._book, rules)
        self.queue = RequestQueue(
            dispatcher, self.registry, prefixes.find, clock, self._guard,
            self._journal.write if self._journal else None,
        )  # fmt: skip
        self.membership = Membership(
            config, self.registry, self._upstream, self.index, self._pump, clock, self._guard, store
        )
        self.metrics = Metrics(self._gauges, self.registry.get)
        self.decisions = DecisionLog(config.decisions.kept)
        prompts = Prompts(
            self.registry, self._upstream, self.membership, config.deadline.tokenize_s,
            self._tokenizers,
        )  # fmt: skip
        self._bringer = Bringer(
            config.bring, self.registry, dispatcher, prefixes, self.membership.nodes,
            health.probe_timeout_s, clock, self._guard,
        )  # fmt: skip
        parts = Parts(
            self.registry, self.index, self.queue, dispatcher, prefixes, prompts, self._upstream,
            self.decisions, self.metrics, self.membership, clock, self._bringer, self.trace,
        )  # fmt: skip
        self._others = OthersReader(
            self.registry, self._upstream, dispatcher, self._pump, health.probe_timeout_s, clock,
            self._guard,
        )  # fmt: skip
        self.proxy = Proxy(parts, config, self.bodies, [one.name for one in rules.classes])
        self._adviser = Adviser(self.registry, dispatcher, rules.classes[0], clock)
        self._front = Front(self.faults, _connections_max())
        self._app = web.Application(
            client_max_size=config.http.body_bytes_max,
            middlewares=[self._front.middleware, errors_as_json(self.faults, self._broken)],
        )
        admin = Admin(parts, self.proxy, self._auth, self._adviser, self.bodies)
        self._app.add_routes(admin.routes())

    def _broken(self, error: BaseException | None) -> None:
        """An assertion failed: log it and stop, because the state cannot be trusted."""
        _log.critical("a bug: the Conductor stops", exc_info=error)
        self.failed = True
        if self._stop is not None:
            self._stop.set()

    def _pump(self) -> None:
        if len(self.queue):
            self.queue.pump()

    def _gauges(self) -> dict[str, dict[tuple[str, ...], float]]:
        return {
            "faults": {
                (cause,): float(count)
                for cause, count in {**dict.fromkeys(CAUSES, 0), **self.faults.counts}.items()
            },
            "trace_requests": {
                (outcome,): float(count)
                for outcome, count in (self.trace.counts if self.trace else {}).items()
            },
            "queue_length": {(): float(len(self.queue))},
            "engine_state": self.membership.states(),
            "engine_gap": self.membership.gap_states(),
            **self.membership.nodes.gauges(),
            **self.membership.cluster.gauges(),
            "engine_in_flight": {
                (engine.info.id,): float(self.queue.dispatcher.in_flight(engine.info.id))
                for engine in self.registry
            },
            **self.queue.dispatcher.loads.gauges(),
            **self.queue.dispatcher.admission.gauges(),
            **self.queue.dispatcher.lent(),
            **self._adviser.gauges(),
            **self._bringer.gauges(),
            **self._others.gauges(),
            "journal_written": {(): float(self._journal is not None and not self._journal.ended)},
            **self._tokenizers.gauges(),
            "costs_file_faults": {(): float(self._kept_costs.faults)},
            **index_gauges(self.index),
        }

    async def serve(self, stop: asyncio.Event, ready: Callable[[str], None]) -> None:
        """Serve until ``stop`` is set, then drain and stop.

        Args:
            stop: stops the service.
            ready: called with the URL when the service answers.

        Raises:
            OSError: listening at the address failed; the message names the setting.
            ConfigError: the generated token cannot be written anywhere.
        """
        http = self.config.http
        self._stop = stop
        self._kept_costs.read()
        if self._journal is not None:
            self._journal.write(journal_head(self.config, admission_rules(self.config), self._book))
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._unhandled)
        runner = web.AppRunner(
            self._app, handler_cancellation=True, access_log=None, shutdown_timeout=_CUT_GRACE_S,
            keepalive_timeout=KEEPALIVE_S, logger=complaints(self.faults),
        )  # fmt: skip
        await runner.setup()
        server: asyncio.Server | None = None
        token: MadeToken | None = None
        try:
            assert runner.server is not None
            server = await self._listen(self._front.serve(runner.server))
            port: int = server.sockets[0].getsockname()[1]
            token = MadeToken(self._auth.made, port)
            self.token_path = token.path
            async with asyncio.TaskGroup() as tasks:
                works = {
                    "membership": self.membership.run,
                    "index": self.index.run,
                    "front": self._front.run,
                    "costs": self._kept_costs.run,
                    "loop lag": self._watch_lag,
                    "advice": self._adviser.run,
                    "bringer": self._bringer.run,
                    "others": self._others.run,
                }
                background = [
                    tasks.create_task(self._guard.keep(name, work), name=name)
                    for name, work in works.items()
                ]
                host = f"[{http.host}]" if ":" in http.host else http.host
                ready(f"http://{host}:{port}")
                await stop.wait()
                if not self.failed:
                    await self._drain()
                for task in background:
                    task.cancel()
        finally:
            if server is not None:
                server.close()
            if token is not None:
                token.remove()
            await runner.cleanup()
            await self.proxy.close()
            await loop.run_in_executor(None, self._tokenizers.close)
            if self.trace is not None:
                await loop.run_in_executor(None, self.trace.close)
            if self._journal is not None:
                await loop.run_in_executor(None, self._journal.close)
            self._kept_costs.write()
            await self._upstream.close()

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """Handle an exception that no task awaits."""
        error = context.get("exception")
        if isinstance(error, AssertionError):
            self._broken(error)
        else:
            loop.default_exception_handler(context)

    async def _listen(self, protocol: Callable[[], asyncio.Protocol]) -> asyncio.Server:
        http = self.config.http
        try:
            return await asyncio.get_running_loop().create_server(
                protocol, http.host, http.port, backlog=BACKLOG
            )
        except OSError as error:
            where = f"http.host={http.host}, http.port={http.port}"
            todo = advice(Tcp(http.host, http.port), error)
            raise OSError(error.errno, f"{where}: {reason(error)}{todo}") from error

    async def _drain(self) -> None:
        """Refuse new requests, wait for those in flight, then refuse waiting ones."""
        self.proxy.closing = True
        try:
            async with asyncio.timeout(self.config.http.drain_s):
                await self.proxy.idle.wait()
        except TimeoutError:
            _log.warning("%d requests are cancelled", self.proxy.active)
        self.queue.close()

    async def _watch_lag(self) -> None:
        while True:
            worst = 0.0
            for _ in range(_LAG_WINDOW):
                started = time.perf_counter()
                await asyncio.sleep(_LAG_PERIOD_S)
                worst = max(worst, time.perf_counter() - started - _LAG_PERIOD_S)
            self.metrics.loop_lag(max(0.0, worst))


def _journal(config: ConductorConfig) -> JournalFile | None:
    """The journal that is asked for.

    Raises:
        ConfigError: it cannot be written there.
    """
    decisions = config.decisions
    if not decisions.journal_file:
        return None
    return JournalFile(Path(decisions.journal_file), decisions.journal_bytes_max)


def _trace(config: ConductorConfig) -> TraceFile | None:
    """The trace that is asked for.

    Raises:
        ConfigError: it cannot be written there.
    """
    decisions = config.decisions
    if not decisions.trace_file:
        return None
    path = Path(decisions.trace_file)
    return TraceFile(path, decisions.trace_bytes_max, decisions.trace_files_max)


def admission_rules(config: ConductorConfig) -> AdmissionRules:
    """Who is admitted, and who comes first."""
    classes = tuple(
        ServiceClass(one.name, one.ttft_s, one.tbt_s, one.priority) for one in config.classes
    )
    admission = config.admission
    return AdmissionRules(admission.mode, classes or (ServiceClass(),), fair=admission.fair_shares)


def index_settings(config: ConductorConfig) -> IndexSettings:
    """Settings of the Conductor's index."""
    bounds = SourceBounds(
        config.events.replay_s, config.events.verify_s, config.index.foreign_blocks_max
    )
    return IndexSettings(config.index.entries_max, bounds)


async def run(config: ConductorConfig) -> int:
    """Serve until SIGTERM or SIGINT; print the URL on standard output.

    Returns:
        Exit status; 1 if an assertion failed.

    Raises:
        OSError: listening at the address failed.
        ConfigError: a token cannot be read or written.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    conductor = Conductor(config)

    def announce(url: str) -> None:
        sys.stdout.write(f"listening on {url}\n")
        if conductor.token_path is not None:
            sys.stdout.write(f"token to operate: {conductor.token_path}\n")
        sys.stdout.flush()

    await conductor.serve(stop, announce)
    return int(conductor.failed)


def _connections_max() -> int:
    """Maximum connections, by the limit of descriptors."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(CONNECTIONS_MAX, max(16, soft // _DESCRIPTORS_PER_CONNECTION))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command ``kvstore-conductor``; with ``simulate`` it serves nobody, but tries policies.

    Returns:
        Exit status: 0 after a clean stop, 2 for an invalid configuration, 1 if listening at the
        address or an assertion failed.
    """
    if not __debug__:
        sys.stderr.write("kvstore-conductor relies on assertions: it does not run with -O\n")
        return 2
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["simulate"]:
        return simulate.main(given[1:])
    args = _parser().parse_args(given)
    flags = {"http.host": args.host, "http.port": args.port, "policy.name": args.policy}
    overrides = [f"{key}={value}" for key, value in flags.items() if value is not None]
    logging.basicConfig(
        level=args.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        loaded = load_conductor(args.config, overrides=[*overrides, *args.set])
        if args.print_config:
            sys.stdout.write(show(loaded))
            return 0
        look_seldom()
        return uvloop.run(run(loaded.config))
    except ConfigError as error:
        sys.stderr.write(f"kvstore-conductor: {error}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"kvstore-conductor: {reason(error)}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore-conductor",
        description="Route requests to the engines that have their KV.",
        epilog="To try policies on a trace: kvstore-conductor simulate --help.",
    )
    # No default here: it would override the file and the environment.
    usual = ConductorConfig()
    parser.add_argument("--host", help=f"listen address (http.host); default: {usual.http.host}")
    parser.add_argument("--port", type=int,
                        help="listen port; 0 = any free port (http.port); default:"
                        f" {usual.http.port}")  # fmt: skip
    parser.add_argument("--policy",
                        help=f"policy.name, one of {', '.join(POLICIES)}; default:"
                        f" {usual.policy.name}")  # fmt: skip
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML configuration file")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE",
                        help="override one setting; takes precedence over the environment"
                        " (KVSTORE_CONDUCTOR__SECTION__KEY) and the file")  # fmt: skip
    parser.add_argument("--print-config", action="store_true",
                        help="print every setting and its source, and exit")  # fmt: skip
    parser.add_argument(
        "--log-level",
        default="WARNING",
        type=str.upper,
        choices=LOG_LEVELS,
        help="minimum level to log; default: %(default)s",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version_of()}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
