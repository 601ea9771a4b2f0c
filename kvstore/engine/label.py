"""The label with which an engine's processes connect to their node: its name and more. Pure.

By the name a Conductor finds the sessions of an engine that registered with it, and so the space,
the shards and the node of that engine.
"""

import hashlib
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final, NamedTuple

from kvstore.wire import INSTANCE_BYTES, EngineLabel

_PORT_DEFAULT: Final = "8000"
_ANY: Final = ("", "0.0.0.0", "::")
_PORTS: Final = range(1, 65_536)


class EngineSources(NamedTuple):
    """Where an engine publishes its own KV events; see :class:`~kvstore.wire.EngineLabel`."""

    events: str = ""
    events_bind: str = ""
    events_replay: str = ""


def engine_label(
    chosen: str, derived: str, start: str, rank: int | None, sources: EngineSources,
    block_tokens: int,
) -> EngineLabel | None:  # fmt: skip
    """The label of an engine's process.

    Args:
        chosen: the name that an operator chose; empty = none.
        derived: the name to use otherwise, ``host:port``; empty = unknown.
        start: any text that identifies one start of the engine, equal in all its processes.
        rank: data-parallel rank; None = the only one.
        sources: where the engine publishes events.
        block_tokens: tokens of one of its blocks.

    Returns:
        None if no name is known.
    """
    name = chosen or derived
    if not name:
        return None
    return EngineLabel(
        name=name if rank is None else f"{name}/dp{rank}",
        instance=hashlib.sha256(start.encode()).digest()[:INSTANCE_BYTES],
        chosen=bool(chosen),
        events=sources.events,
        events_bind=sources.events_bind,
        events_replay=sources.events_replay,
        block_tokens=block_tokens,
    )


def served_at(command: Sequence[str]) -> str:
    """``host:port`` of the HTTP server that was started with this command line.

    The host of a server that listens at every address is ``*``. Processes that Python's
    ``multiprocessing`` starts have the command line of their parent in ``sys.argv``, so this works
    in every process of an engine.

    Args:
        command: program and arguments, with vLLM's options ``--host`` and ``--port``.

    Returns:
        Empty if this is no server, or its port is not on the command line.
    """
    program = PurePath(command[0]).name if command else ""
    if program != "api_server.py" and not (program == "vllm" and "serve" in command[1:2]):
        return ""
    options = {"--host": "", "--port": _PORT_DEFAULT}
    for place, argument in enumerate(command):
        name, given, value = argument.partition("=")
        if name in ("--config", "--uds"):
            return ""  # the address may be in a file, or there is none
        if name in options:
            options[name] = value if given else "".join(command[place + 1 : place + 2])
    host, port = options["--host"], options["--port"]
    if not (port.isascii() and port.isdecimal() and int(port) in _PORTS):
        return ""
    host = f"[{host}]" if ":" in host and host not in _ANY else host
    return f"{'*' if host in _ANY else host}:{port}"
