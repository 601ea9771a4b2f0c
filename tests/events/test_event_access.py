"""Goal: a node's events are for those who may open its socket, and say nothing of prompts."""

import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.config import EventsConfig, ServerConfig, SocketConfig, load, show
from kvstore.events import zmtp
from kvstore.protocol.errors import ConfigError
from kvstore.protocol.page import CanonicalLayout, PrefixKey, ShardSpec, SpaceIdentity
from kvstore.server.publish import Publication
from kvstore.state.tree.actions import Stored
from kvstore.state.tree.prefix_tree import PrefixTree, Shard
from tests.client.conftest import READY, Daemon, arguments, content, new_keys, open_space
from tests.events.test_event_followers import Follower

NOBODY = 65_534
TOKEN = "a token of sixteen or more"
SPACE = PrefixTree(
    0,
    SpaceIdentity(model="m", kv_dtype="uint8", page_tokens=2),
    [Shard(ShardSpec(layout=CanonicalLayout(4), layers=(0, 1), heads=(0, 1)), 16, 4096)],
)
STORED = Stored(
    SPACE, 0, [PrefixKey(bytes(32))], PrefixKey(b""), np.array([7, 8], dtype="<u4").tobytes()
)


@contextmanager
def publication(folder: Path, **settings: Any) -> Iterator[Publication]:
    socket = {name: settings.pop(name) for name in ("group_access", "tenants") if name in settings}
    at = SocketConfig(path=str(folder / "kv.sock"), **socket)
    made = Publication(EventsConfig(**settings), at, "n", b"b" * 16)
    try:
        yield made
    finally:
        made.close()


def events_of(endpoint: str, token: bytes = b"") -> list[Any]:
    """Everything that a replay tells."""
    asking = Follower(endpoint, zmtp.DEALER, token).meet()
    asking.say(b"", bytes(8))
    found: list[Any] = []
    while payload := asking.hear()[3]:
        found += msgspec.msgpack.decode(payload)[1]
    asking.close()
    return found


@pytest.mark.parametrize(
    ("socket", "mode"),
    [
        ({}, 0o600), ({"group_access": True}, 0o660), ({"tenants": ("a=root",)}, 0o600),
        ({"tenants": ("a=root",), "group_access": True}, 0o600),
    ],
)  # fmt: skip
def test_by_default_events_lie_beside_the_nodes_socket_for_those_who_may_know_of_all_tenants(
    tmp_path, socket, mode
):
    with publication(tmp_path, **socket) as made:
        assert made.endpoint == f"ipc://{tmp_path}/kv.sock.events"
        assert made.replay_endpoint == f"ipc://{tmp_path}/kv.sock.replay"
        modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        assert modes == {mode}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("asked", "told"), [(False, []), (True, [7, 8])])
def test_token_ids_are_published_only_when_asked_for(tmp_path, wait_until, asked, told):
    with publication(tmp_path, tokens=asked) as made:
        made.publish([STORED])
        wait_until(lambda: made.stats().batches_sent == 1)
        (event,) = events_of(made.replay_endpoint)

    assert (event["block_hashes"], event["token_ids"]) == ([bytes(32)], told)


def test_a_second_node_on_the_same_socket_is_refused_and_takes_nothing(tmp_path, wait_until):
    with publication(tmp_path) as first:
        refused = pytest.raises(ConfigError, match=r"socket\.path=.*another node listens there")
        with refused, publication(tmp_path):
            pass
        first.publish([STORED])
        wait_until(lambda: first.stats().batches_sent == 1)
        assert len(events_of(first.replay_endpoint)) == 1


def test_over_tcp_a_token_is_needed_and_checked(tmp_path, wait_until):
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    with publication(
        tmp_path, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*",
        follow_token_file=str(path),
    ) as made:  # fmt: skip
        made.publish([STORED])
        wait_until(lambda: made.stats().batches_sent == 1)

        assert len(events_of(made.replay_endpoint, TOKEN.encode())) == 1
        for endpoint, side in ((made.endpoint, zmtp.SUB), (made.replay_endpoint, zmtp.DEALER)):
            for token in (b"", b"not the token of it"):
                stranger = Follower(endpoint, side, token)
                with pytest.raises(zmtp.PeerError):
                    stranger.meet()
                stranger.close()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"follow_token": "short"}, r"events\.follow_token: 16 to 255"),
        ({"follow_token": "umläute sind zu viel"}, r"events\.follow_token: 16 to 255"),
        ({"follow_token_file": "/nonexistent"}, r"events\.follow_token_file=/nonexistent: "),
        ({"follow_token": "x" * 256}, r"events\.follow_token: 16 to 255"),
    ],
)
def test_a_token_that_is_none_is_refused_by_its_key(tmp_path, settings, said):
    refused = pytest.raises(ConfigError, match=said)
    with refused, publication(tmp_path, endpoint="tcp://127.0.0.1:*", **settings):
        pass


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_tcp_without_a_token_is_refused_and_says_what_to_set(key):
    with pytest.raises(ConfigError) as refused:
        load(ServerConfig, None, {}, [f"events.{key}=tcp://127.0.0.1:*"])

    assert f"--set events.{key}" in str(refused.value)
    assert "events.follow_token_file" in str(refused.value)


def test_the_token_is_shown_to_nobody():
    loaded = load(ServerConfig, None, {}, [f"events.follow_token={TOKEN}"])

    assert TOKEN not in show(loaded)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_another_user_reads_neither_events_nor_their_replay(spawn, open_folder):
    daemon = Daemon(spawn(arguments(open_folder / "kv.sock"), ready=READY))
    with daemon.connect() as store:
        space = open_space(store)
        space.put(new_keys(space, 2), content(2, space.page_bytes[0]))
    connect = (
        "import os, socket, sys\n"
        "for path in sys.argv[1:]:\n"
        "    try: socket.socket(socket.AF_UNIX).connect(path)\n"
        "    except PermissionError: print('refused' if os.path.exists(path) else 'hidden')\n"
    )
    paths = [at.removeprefix("ipc://") for at in (daemon.events, daemon.replay)]
    spy = subprocess.run(
        ["/usr/bin/env", "python3", "-c", connect, *paths], user=NOBODY, group=NOBODY,
        extra_groups=[], capture_output=True, text=True, check=False, timeout=30,
    )  # fmt: skip

    assert spy.stdout.split() == ["refused", "refused"], spy.stderr
    told = events_of(daemon.replay)
    assert told[0]["type"] == "BlockStored"
    assert all(event["token_ids"] == [] for event in told)
    http = int(daemon.http.rpartition(":")[2])
    assert families(daemon.process.pid, http) == set(), "HTTP is all there is on TCP"


def families(pid: int, but_port: int) -> set[int]:
    """Address families of a process's listening sockets, those on ``but_port`` left out."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except FileNotFoundError:  # it was closed just now
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found: set[int] = set()
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            port = int(fields[1].rpartition(":")[2], 16)
            if fields[9] in inodes and fields[3] == "0A" and port != but_port:
                found.add(family)
    return found
