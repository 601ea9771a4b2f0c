"""The label of a vLLM engine's processes: its name, and where it publishes its own KV events."""

import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any, Final

from kvstore.engine.label import EngineSources, engine_label
from kvstore.protocol.page import EngineLabel

_PORT_DEFAULT: Final = "8000"
_ANY: Final = ("", "0.0.0.0", "::")
_PORTS: Final = range(1, 65_536)


def label_of(config: Any, chosen: str, block_tokens: int) -> EngineLabel | None:
    """The label of an engine's process; None if no name is known.

    Args:
        config: ``VllmConfig``; the same in all processes of an engine.
        chosen: the name in the options; empty = ``host:port`` of the server.
        block_tokens: tokens of one of its blocks.
    """
    transfer, parallel = config.kv_transfer_config, config.parallel_config
    index = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
    rank = index if index or parallel.data_parallel_size > 1 else None
    start = f"{transfer.engine_id} {config.instance_id}"
    sources = sources_of(config.kv_events_config, index)
    return engine_label(chosen, served_at(sys.argv), start, rank, sources, block_tokens)


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


def sources_of(events: Any, rank: int) -> EngineSources:
    """Where a data-parallel rank publishes its events, as vLLM decides it.

    vLLM listens at ``tcp://*``, ``tcp://[::]`` and ``ipc://``, and connects to every other
    endpoint. Each rank has a TCP port of its own.

    Args:
        events: ``KVEventsConfig``, or None.
        rank: index of the data-parallel rank.
    """
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return EngineSources()
    endpoint = _of_rank(events.endpoint, rank)
    listens = "*" in endpoint or "::" in endpoint or endpoint.startswith("ipc://")
    return EngineSources(
        events=endpoint.replace("[::]", "*") if listens else "",
        events_bind="" if listens else endpoint,
        events_replay=_of_rank(events.replay_endpoint or "", rank).replace("[::]", "*"),
    )


def _of_rank(endpoint: str, rank: int) -> str:
    """The endpoint of a rank; empty if followers cannot use it."""
    if endpoint.startswith("ipc://"):
        return endpoint
    base, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdecimal() or port == "0":
        return ""  # inproc://, or a port that is not known before it is bound
    return f"{base}:{int(port) + rank}"
