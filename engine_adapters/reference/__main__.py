"""``python -m engine_adapters.reference``: runs one engine."""

import argparse
import asyncio
import ipaddress
import logging
import os
import re
import signal
import sys
import urllib.parse
import uuid
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import msgspec
import torch

from engine_adapters.reference.config import MODELS
from engine_adapters.reference.engine import Engine, EngineBusyError, EngineClosedError
from engine_adapters.reference.handoff_options import HandoffOptions, PushAfter
from engine_adapters.reference.kv_events import EngineEvents
from engine_adapters.reference.parts import EngineOptions
from engine_adapters.reference.scheduler import Limits
from engine_adapters.reference.server import ConductorAt, Identity, Server, serve
from engine_adapters.reference.warm_up import warm_up
from kvstore.client.store import KVStore
from kvstore.config import DeviceSlabConfig
from kvstore.config.machine import version_of
from kvstore.engine.label import EngineSources, engine_label
from kvstore.engine.options import Retain
from kvstore.handoff.greeting import read_secret
from kvstore.handoff.states import Patience
from kvstore.process.tls import CertificateFiles
from kvstore.protocol.errors import ConfigError, InvalidArgument, KVStoreError
from kvstore.protocol.sizes import size_of

_log = logging.getLogger(__name__)
_PROGRAM = "python -m engine_adapters.reference"
_OPTIONS_OF_ENGINE = {
    "fake": "--handoff-fake",
    "listen": "--handoff-host, --handoff-port",
    "port": "--handoff-host, --handoff-registry-port",
    "ranks": "--ranks",
}
"""By the field of what an engine refuses."""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; exits with a message if it is invalid."""
    parser = argparse.ArgumentParser(prog=_PROGRAM, allow_abbrev=False)
    add = parser.add_argument
    add("--version", action="version", version=f"%(prog)s {version_of()}")
    add("--mode", choices=("mono", "prefill", "decode"), default="mono",
        help="role for the Conductor; every mode serves every request")  # fmt: skip
    add("--model", choices=sorted(MODELS), default="tiny", help="model size; default: tiny")
    add("--host-port", "--port", dest="port", type=_number(0, 65_535), default=0, metavar="PORT",
        help="listen port; 0 = any free port")  # fmt: skip
    add("--host", type=_host, default="127.0.0.1", metavar="ADDRESS",
        help="listen address, which the Conductor must be able to reach;"
        " there is no authentication")  # fmt: skip
    add("--id", type=_name, default=f"engine-{uuid.uuid4().hex[:8]}",
        help="name of this engine for the Conductor and the node")  # fmt: skip
    add("--store", metavar="URL", help="unix:///path of the node's socket; default: no store")
    add("--device-slab", type=_size, default=0, metavar="SIZE",
        help="memory for copies of loaded pages; 0 = none")  # fmt: skip
    add("--retain-seconds", type=_number(0, 366 * 86_400), default=0, metavar="SECONDS",
        help="how long the node keeps the pages of a conversation after each request with its"
        " session_id")  # fmt: skip
    add("--retain-bytes", type=_size, default=0, metavar="SIZE",
        help="maximum bytes kept per conversation; 0 = no limit")  # fmt: skip
    add("--node", metavar="NAME", help="id of the --store node at the Conductor")
    add("--conductor", metavar="URL", type=_address,
        help="http://host:port; register with it every 3 s")  # fmt: skip
    add(
        "--conductor-token-file",
        type=Path,
        metavar="FILE",
        help="file with the Conductor's operate token;"
        " default: the file written by this user's Conductor on this machine",
    )
    add("--prefix-cache", choices=("on", "off"), default="on",
        help="the engine's own prefix cache; default: on")  # fmt: skip
    add("--kv-hashes", choices=("on", "off"), default="on",
        help="hash the K/V of each prompt for /v1/requests/{id}/kv-hashes")  # fmt: skip
    add("--threads", type=_number(1), default=2, help="torch threads")
    add("--kv-blocks", type=_number(1), default=2048, help="blocks of 16 tokens in the pool")
    add("--ranks", type=_number(1), default=1,
        help="pools that share the K/V heads, each with its own senders and receivers of pushes"
        " and its own pages in the store")  # fmt: skip
    add("--token-budget", type=_number(1), default=512,
        help="tokens computed in one step")  # fmt: skip
    add("--max-running", type=_number(1), default=8, help="maximum running requests")
    add("--max-waiting", type=_number(1), default=256, help="maximum waiting requests")
    _add_handoff(add)
    add("--events", metavar="ENDPOINT", help="endpoint for KV events of the local prefix cache")
    add("--events-replay", metavar="ENDPOINT", help="endpoint for replays of these events")
    return parser.parse_args(argv)


def _add_handoff(add: Callable[..., object]) -> None:
    """The options of pushes."""
    add("--handoff", choices=("store", "push"), default="store",
        help="push: prefill sends K/V directly to decode, if the request asks for it")  # fmt: skip
    add("--handoff-secret-file", type=Path, metavar="FILE",
        help="file with the secret shared by all engines that push to each other: mode 600,"
        " at least 16 bytes")  # fmt: skip
    for field, what in (("certificate", "with the certificate of this engine; then both engines of"
                         " a push must present one"),
                        ("key", "with its unencrypted private key"),
                        ("authority", "with the authority that signed the certificates of all"
                         " engines")):  # fmt: skip
        add(f"--handoff-{field}", default="", metavar="FILE", help=f"PEM file {what}")
    add("--handoff-host", type=_host, metavar="ADDRESS",
        help="listen address of a prefill engine for pushes; default: --host")  # fmt: skip
    add("--handoff-port", type=_number(0, 65_535), default=0, metavar="PORT",
        help="listen port of a prefill engine for pushes; 0 = any free port")  # fmt: skip
    add("--handoff-registry-port", type=_number(0, 65_535), default=0, metavar="PORT",
        help="registry port of a prefill engine; 0 = any free port")  # fmt: skip
    add("--handoff-fake", action="store_true",
        help="for tests: push no K/V; both engines need this option and keep nothing")  # fmt: skip
    add("--handoff-events", action="store_true",
        help="log an event for each step of each push")  # fmt: skip
    add("--handoff-warm-up", action="store_true",
        help="before other requests, serve one of the engine's own with a push that moves no"
        " bytes; with --mode prefill or decode")  # fmt: skip
    add("--handoff-silence", type=_seconds, default=Patience().silence_s, metavar="SECONDS",
        help="abandon another engine after it sends nothing for this long; at least 1")  # fmt: skip
    add("--handoff-transport", choices=("tcp", "mooncake"), default="tcp",
        help="mooncake: push with Mooncake to and from engines that also use it")  # fmt: skip
    add("--mooncake-protocol", choices=("rdma", "tcp"), default="rdma",
        help="protocol of --handoff-transport mooncake; tcp is for tests")  # fmt: skip
    add("--push-after", choices=get_args(PushAfter), default="layer",
        help="what prefill computes between pushes; not layer: for comparison")  # fmt: skip


def _number(least: int, most: int | None = None) -> Callable[[str], int]:
    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError as error:
            raise ArgumentTypeError(f"{text!r} is not a whole number") from error
        if number < least:
            raise ArgumentTypeError(f"{number} is less than {least}")
        if most is not None and number > most:
            raise ArgumentTypeError(f"{number} is more than {most}")
        return number

    return read


def _seconds(text: str) -> float:
    try:
        return Patience.of_silence(silence_s=float(text)).silence_s
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not a number of seconds") from error
    except InvalidArgument as error:
        raise ArgumentTypeError(str(error)) from error


def _name(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", text) is None:
        raise ArgumentTypeError(f"{text!r} is not 1 to 64 of A-Z a-z 0-9 . _ -")
    return text


def _size(text: str) -> int:
    try:
        return size_of(text)
    except ValueError as error:
        raise ArgumentTypeError(str(error)) from error


def _host(text: str) -> str:
    try:
        found = ipaddress.ip_address(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not an IP address") from error
    if found.is_unspecified:
        raise ArgumentTypeError(f"{text} is every address: give one that others can reach")
    return text


def _address(text: str) -> str:
    try:
        parts = urllib.parse.urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ArgumentTypeError(f"{text!r} is not http://host:port")
    return text


@contextmanager
def _given_by(option: str, by_field: Mapping[str, str] | None = None) -> Iterator[None]:
    """Add the name of the option to errors: that of their field in ``by_field``, if it is there."""
    try:
        yield
    except InvalidArgument as error:
        option = (by_field or {}).get(error.field, option)
        raise ConfigError(f"{option}: {str(error).removeprefix(f'{error.field}: ')}") from error
    except KVStoreError as error:
        raise ConfigError(f"{option}: {error}") from error


async def run(args: argparse.Namespace) -> int:
    """Create the engine, serve until SIGTERM or SIGINT, and stop.

    Returns:
        Exit status; 1 if something did not end in time.

    Raises:
        ConfigError: a value of the command line is invalid; names the option.
    """
    options = EngineOptions(
        model=args.model,
        mode=args.mode,
        blocks=args.kv_blocks,
        prefix_cache=args.prefix_cache == "on",
        kv_hashes=args.kv_hashes == "on",
        ranks=args.ranks,
        retain=Retain(seconds=args.retain_seconds, bytes=args.retain_bytes),
        limits=Limits(
            token_budget=args.token_budget,
            running_max=args.max_running,
            waiting_max=args.max_waiting,
        ),
    )
    handoff = _handoff_options(args)
    store = None
    if args.store:
        with _given_by("--store"):
            store = _connect(args.store, args.id, args.device_slab, options.block_tokens)
    with _given_by("--handoff-transport", _OPTIONS_OF_ENGINE):
        engine = Engine(options, store, handoff)
    events: EngineEvents | None = None
    if args.events:
        with _given_by("--events"):
            events = EngineEvents(args.id, engine.identity, args.events, args.events_replay)
        engine.on_change = events.publish
    identity = Identity(
        id=args.id,
        events=events.endpoint if events else None,
        events_replay=events.replay_endpoint if events else None,
        node=args.node,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    engine.start()
    if args.handoff_warm_up:
        await asyncio.to_thread(_warm_up, engine)
    ended = await serve(
        Server(engine, identity),
        engine,
        listen=(args.host, args.port),
        conductor=ConductorAt(args.conductor, args.conductor_token_file)
        if args.conductor
        else None,
        stop=stop,
        ready=_announce,
        engine_id=args.id,
    )
    if events is not None:
        events.close()
    return 0 if ended else 1


def _warm_up(engine: Engine) -> None:
    """Warm the engine up; if that fails, it serves all the same."""
    try:
        report = warm_up(engine)
    except (KVStoreError, EngineBusyError, EngineClosedError) as error:
        _log.warning("the warm-up failed: %s", error)
    else:
        _log.info("the warm-up's push ended: %s", msgspec.json.encode(report).decode())


def _handoff_options(args: argparse.Namespace) -> HandoffOptions | None:
    """What the command line says about pushes; None = nothing is pushed.

    Raises:
        ConfigError: the secret is missing, or cannot be used.
    """
    if args.handoff == "store":
        if args.handoff_warm_up:
            raise ConfigError("--handoff-warm-up: only with --handoff push")
        return None
    if args.handoff_warm_up and args.mode == "mono":
        raise ConfigError("--handoff-warm-up: not with --mode mono, which pushes nothing")
    if args.handoff_secret_file is None:
        raise ConfigError("--handoff-secret-file: --handoff push needs it")
    if args.handoff_fake and (args.store or args.prefix_cache == "on"):
        raise ConfigError("--handoff-fake: not with --store, nor without --prefix-cache off")
    with _given_by("--handoff-secret-file"):
        secret = read_secret(args.handoff_secret_file)
    return HandoffOptions(
        secret=secret,
        certificates=_certificates(args),
        host=args.handoff_host or args.host,
        registry_port=args.handoff_registry_port,
        port=args.handoff_port,
        transport=args.handoff_transport,
        mooncake_protocol=args.mooncake_protocol,
        patience=Patience.of_silence(silence_s=args.handoff_silence),
        push_after=args.push_after,
        fake=args.handoff_fake,
        events=args.handoff_events,
    )


def _certificates(args: argparse.Namespace) -> CertificateFiles | None:
    """The files for TLS between engines; None = no TLS.

    Raises:
        ConfigError: one is missing, or cannot be used.
    """
    given = {
        field: getattr(args, f"handoff_{field}") for field in CertificateFiles.__struct_fields__
    }
    if not any(given.values()):
        return None
    for field, path in given.items():
        if not path:
            what = "needed: TLS takes a certificate, its key and the authority"
            raise ConfigError(f"--handoff-{field}: {what}")
    files = CertificateFiles(**given)
    try:
        files.accepting()
    except InvalidArgument as error:
        raise ConfigError(f"--handoff-{error}") from error
    return files


def _connect(url: str, name: str, slab_bytes: int, block_tokens: int) -> KVStore:
    slab = DeviceSlabConfig(capacity_bytes=slab_bytes) if slab_bytes else None
    label = engine_label(name, "", uuid.uuid4().hex, None, EngineSources(), block_tokens)
    return KVStore.connect(url, name=name, device_slab=slab, engine=label)


def _announce(url: str) -> None:
    sys.stdout.write(f"listening on {url}\n")
    sys.stdout.flush()


def main() -> None:
    """Run one engine; exits without waiting for jobs of a lost store."""
    args = parse_args(sys.argv[1:])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    torch.set_num_threads(args.threads)
    try:
        status = asyncio.run(run(args))
    except ConfigError as error:
        sys.stderr.write(f"{_PROGRAM}: {error}\n")
        sys.stderr.flush()
        status = 2
    if status:
        os._exit(status)


if __name__ == "__main__":
    main()
