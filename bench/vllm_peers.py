"""Other stores behind the same vLLM: the same model, prompts and restart as for ours.

``python -m bench.vllm_peers NAME PROMPTS`` measures one and writes a
:class:`~bench.vllm_restart.Restarted` as JSON. :func:`measure` runs it in a network namespace of
its own, with nothing but a loopback: Mooncake listens on all interfaces.
"""

import asyncio
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from bench import mooncake_wheel
from bench.cluster import ClusterError
from bench.vllm_cluster import ENVIRONMENT, VllmCluster
from bench.vllm_environment import peers
from bench.vllm_restart import Restarted, restarted

_LIMIT_S: Final = 900.0
_READY_S: Final = 60.0
_END_S: Final = 60.0
_POLL_S: Final = 0.1
_IFF_UP: Final = 1
_SIOCSIFFLAGS: Final = 0x8914
_MASTER: Final = 50051
_SEGMENT: Final = 50052
_LMCACHE: Final = 15655
_TCP_QUEUES: Final = {
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
}
"""Mooncake's own bounds, about 2,100, are less than what its connector asks for at 8,000 tokens: a
transfer for each block and layer. The engine then ends the request with an internal error."""


class Peer(NamedTuple):
    """What a server needs to use a store that serves already."""

    transfer: dict[str, Any]
    variables: dict[str, str]


def measure(name: str, prompts: int) -> Restarted:
    """Measure one peer of :data:`PEERS`.

    Raises:
        ClusterError: it cannot run here, and why.
    """
    peers()  # out here, where a registry can be reached
    variables = {**os.environ, **_libraries()}
    namespace = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "-n"]
    command = [*namespace, sys.executable, "-m", "bench.vllm_peers", name, str(prompts)]
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=variables,
            start_new_session=True,
        )  # fmt: skip
        with _ended(process):
            output, errors = process.communicate(timeout=_LIMIT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"{name}: {error}") from error
    if process.returncode:
        raise ClusterError(f"{name}: {errors.decode(errors='replace')[-2000:]}")
    result = msgspec.json.decode(output, type=Restarted)
    if not result.hit_tokens:
        raise ClusterError(f"{name}: nothing was loaded after the restart")
    return result


def _libraries() -> dict[str, str]:
    """Where libibverbs is, without which neither Mooncake nor LMCache's server starts.

    Raises:
        ClusterError: it cannot be had.
    """
    try:
        found = mooncake_wheel.environment()
    except mooncake_wheel.NoMooncakeError as error:
        raise ClusterError(str(error)) from error
    return {name: path for name, path in found.items() if name == "LD_LIBRARY_PATH"}


@contextmanager
def _ended(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Afterwards the process and all that it started are gone, whatever happened."""
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            if process.poll() is None:
                os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_END_S)


def _mooncake(cluster: VllmCluster, site: Path, environment: dict[str, str]) -> Peer:
    """A master, and a process that owns the memory, so that it outlives the engine."""
    programs = site / "bin"
    master = [str(programs / "mooncake_master"), f"--port={_MASTER}"]
    cluster.launch("mooncake_master", master, r"$^", environment)
    _wait_port(cluster, "mooncake_master", _MASTER)
    owner = [
        str(programs / "mooncake_client"), "--host=127.0.0.1", f"--port={_SEGMENT}",
        "--global_segment_size=2 GB", f"--master_server_address=127.0.0.1:{_MASTER}",
        "--metadata_server=P2PHANDSHAKE", "--protocol=tcp",
    ]  # fmt: skip
    cluster.launch("mooncake_client", owner, r"$^", environment)
    _wait_port(cluster, "mooncake_client", _SEGMENT)
    settings = {
        "mode": "standalone-store", "metadata_server": "P2PHANDSHAKE", "protocol": "tcp",
        "master_server_address": f"127.0.0.1:{_MASTER}", "global_segment_size": 0,
        "local_buffer_size": "256 MB", "device_name": "",
    }  # fmt: skip
    path = cluster.directory / "mooncake.json"
    path.write_text(json.dumps(settings))
    transfer = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    return Peer(transfer, {"MOONCAKE_CONFIG_PATH": str(path), **_TCP_QUEUES})


def _lmcache(cluster: VllmCluster, site: Path, environment: dict[str, str]) -> Peer:
    server = [
        str(site / "bin" / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(_LMCACHE),
        "--http-host", "127.0.0.1", "--http-port", str(_LMCACHE + 1), "--chunk-size", "64",
        "--l1-size-gb", "2", "--l1-init-size-gb", "2", "--eviction-policy", "LRU",
        "--disable-observability", "--max-workers", "2",
        "--supported-transfer-mode", "engine_driven",
    ]  # fmt: skip
    cluster.launch("lmcache", server, r"$^", environment)
    _wait_port(cluster, "lmcache", _LMCACHE)
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": _LMCACHE}
    transfer = {
        "kv_connector": "LMCacheMPConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }  # fmt: skip
    return Peer(transfer, {})


PEERS: Final[dict[str, Callable[[VllmCluster, Path, dict[str, str]], Peer]]] = {
    "mooncake": _mooncake,
    "lmcache": _lmcache,
}


def _wait_port(cluster: VllmCluster, name: str, port: int) -> None:
    """Wait until somebody listens.

    Raises:
        ClusterError: the process ended, or took too long.
    """
    service = cluster.services[name]
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline and service.process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            time.sleep(_POLL_S)
        else:
            return
    log = service.log.read_text(errors="replace")[-1500:]
    raise ClusterError(f"{name} did not become ready; the end of its log:\n{log}")


def _loopback_up() -> None:
    """The namespace begins with its loopback down."""
    with socket.socket() as probe:
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))


def _main(name: str, prompts: int) -> int:
    site = peers()
    _loopback_up()
    path = os.pathsep.join((ENVIRONMENT["PYTHONPATH"], str(site)))
    variables = {"PYTHONPATH": path, "LMCACHE_TRACK_USAGE": "false", "MC_LOG_LEVEL": "ERROR"}
    try:
        with VllmCluster() as cluster:
            peer = PEERS[name](cluster, site, {**os.environ, **variables})
            result = asyncio.run(
                restarted(cluster, prompts, peer.transfer, {**variables, **peer.variables})
            )
    except ClusterError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.buffer.write(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], int(sys.argv[2])))
