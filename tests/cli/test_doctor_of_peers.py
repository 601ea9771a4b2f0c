"""Goal: ``doctor`` finds what keeps two nodes apart before they start, and says what to do."""

import asyncio
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvstore.cli import peers
from kvstore.cli.decoding import completed
from kvstore.cli.peers import peer_checks
from kvstore.cluster import probe
from kvstore.cluster.records import SCHEME
from kvstore.config import Loaded, NodeConfig, ServerConfig, values
from kvstore.config.addresses import Address
from kvstore.config.cluster import ClusterConfig
from kvstore.config.machine import Check
from kvstore.config.stores import StoreConfig
from kvstore.process.tls import CertificateFiles
from kvstore.protocol import wire
from kvstore.protocol.counts import NodeStats
from kvstore.server.answers import Configuration

CERTIFICATES = Path(__file__).parents[1] / "cluster" / "certificates"
FILES = {
    "certificate": str(CERTIFICATES / "node.pem"), "key": str(CERTIFICATES / "node.key"),
    "authority": str(CERTIFICATES / "authority.pem"),
}  # fmt: skip
STRANGER = CertificateFiles(
    str(CERTIFICATES / "stranger.pem"), str(CERTIFICATES / "stranger.key"),
    str(CERTIFICATES / "other.pem"),
)  # fmt: skip
STATS: dict[str, Any] = {
    "node": "b", "boot": "0b" * 16, "remote": {"peers": {}},
    "cluster": {
        "name": "blue", "endpoint": "127.0.0.1:1", "peers": {},
        "membership": {"kind": "redis", "state": "away"},
        "service": {"sessions": [], "refused": {}},
        "directory": {
            "peers": {}, "refused": [], "entries": 0, "entries_max": 1, "left_out": 0,
            "resident_bytes": 0, "restarts": 0,
        },
    },
}  # fmt: skip
Answers = Callable[[Any], list[wire.Answer | bytes]]


def checks(stats: dict[str, Any] | None = None, **cluster: Any) -> dict[str, Check]:
    settings = {"name": "blue", "listen": f"127.0.0.1:{unused_port()}"} | cluster
    config = ServerConfig(node=NodeConfig(name="b"), cluster=ClusterConfig(**settings))
    found = list(peer_checks(config, completed(stats, NodeStats) if stats else None))
    assert all(one.advice for one in found if one.status != "ok"), "it says what to do"
    return {one.name: one for one in found}


def unused_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def welcome(hello: Any, node: str = "a", minor: int = wire.PROTOCOL_MINOR, at: str = "") -> Any:
    transports = {"tcp": at} if at else {}
    return wire.PeerWelcome(hello.id, wire.PROTOCOL_MAJOR, minor, node, b"a" * 16, transports)


@contextmanager
def answering(answers: Answers, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """What answers a greeting in the place of a node; yields where."""
    loop, ready, places = asyncio.new_event_loop(), threading.Event(), list[str]()
    stop = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            size = wire.frame_length(await reader.readexactly(4))
            request = wire.decode_request(await reader.readexactly(size))
            for one in answers(request):
                writer.write(one if isinstance(one, bytes) else wire.encode(one))
            await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=tls)
        places.append(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        ready.set()
        await stop.wait()
        server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield places[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def test_a_node_that_is_alone_has_nothing_to_check():
    assert list(peer_checks(ServerConfig(), None)) == []


def test_a_node_that_welcomes_this_one_is_ok_with_its_version():
    with answering(lambda hello: [welcome(hello)]) as place:
        one = checks(nodes=(f"a={place}",))["node a"]

    assert one.status == "ok"
    assert f"protocol {wire.PROTOCOL_MAJOR}.{wire.PROTOCOL_MINOR}" in one.found


def test_the_greeting_is_that_of_the_configured_node():
    heard: list[Any] = []

    def answers(hello: Any) -> list[Any]:
        heard.append(hello)
        return [welcome(hello)]

    with answering(answers) as place:
        checks(nodes=(f"a={place}",))

    ((hello),) = heard
    assert (hello.cluster, hello.node, hello.scheme) == ("blue", "b", SCHEME)


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (lambda hello: wire.Failure(hello.id, "invalid_argument", "scheme: x", "scheme"), "fail",
         "scheme: x"),
        (lambda hello: wire.Failure(hello.id, "invalid_argument", "cluster: x", "cluster"),
         "fail", "cluster: x"),
        (lambda hello: welcome(hello, minor=4), "fail", "protocol: 1.4"),
        (lambda hello: welcome(hello, node="c"), "fail", "the node there is 'c'"),
        (lambda hello: b"HTTP/1.1 400 Bad Request\r\n\r\n", "warn", "over the limit"),
        (lambda hello: wire.Pong(hello.id), "warn", "Pong answers"),
        (lambda hello: welcome(hello, at="no address"), "warn", "'no address' is not host:port"),
        (lambda hello: wire.Failure(hello.id, "x", "\x1b[2J\nall is well", "scheme"), "fail",
         "refused: ?[2J?all is well"),
    ],
    ids=["scheme", "cluster", "protocol", "another name", "no node", "another answer",
         "no address", "a terminal"],
)  # fmt: skip
def test_a_node_that_does_not_want_this_one_is_named_with_what_differs(answer, status, says):
    with answering(lambda hello: [answer(hello)]) as place:
        one = checks(nodes=(f"a={place}",))["node a"]

    assert one.status == status
    assert says in one.found


def test_a_port_that_is_told_without_a_host_is_at_that_of_the_node_also_with_ipv6():
    hello = probe.greeting_of(ServerConfig())

    answer = probe.judge("a", welcome(hello, at=f":{unused_port()}"))

    one = peers._greeted("a", Address("::1", 7400), answer)

    assert one.status == "warn"
    assert "welcome, but tcp at [::1]:" in one.found


def test_ports_that_nobody_answers_at_are_told():
    gone = f"127.0.0.1:{unused_port()}"
    with answering(lambda hello: [welcome(hello, at=gone)]) as place:
        found = checks(nodes=(f"a={place}", f"c=127.0.0.1:{unused_port()}"))

    assert found["node a"].status == "warn"
    assert f"tcp at {gone} does not answer" in found["node a"].found
    assert found["node c"].status == "warn"
    assert "firewall" in found["node c"].advice


def test_a_running_node_is_asked_instead_and_not_greeted_in_its_own_name():
    greeted: list[Any] = []
    session = {
        "up": False, "endpoint": "127.0.0.1:1", "boot": "", "transport": "", "faults": {},
        "fault": {"cause": "refused", "why": "cluster: 'red'", "field": "cluster", "s_ago": 1.0},
    }  # fmt: skip
    directory = {"peers": {}, "refused": [], "entries": 0, "entries_max": 1, "left_out": 0,
                 "resident_bytes": 0, "restarts": 0}  # fmt: skip
    cluster = {"name": "blue", "endpoint": "", "peers": {"a": session}, "directory": directory,
               "service": {"sessions": [], "refused": {}}}  # fmt: skip
    running = {"node": "b", "boot": "", "cluster": cluster, "remote": {"peers": {}}}

    def answers(hello: Any) -> list[Any]:
        greeted.append(hello)
        return [welcome(hello)]

    with answering(answers) as place:
        found = checks(running, nodes=(f"a={place}", "c=127.0.0.1:1"))
        assert (found["node a"].status, greeted) == ("fail", [])
        assert "cluster.name" in found["node a"].advice
        with socket.create_server(("127.0.0.1", 0)) as own:  # it runs, and does not tell
            listen = f"127.0.0.1:{own.getsockname()[1]}"
            found = checks(nodes=(f"a={place}",), listen=listen)
    assert greeted == []
    assert found["node a"].status == "ok"
    assert next(iter(peer_checks(None, completed(running, NodeStats)))).status == "fail"
    assert list(peer_checks(None, completed({"cluster": None}, NodeStats))) == []


def test_certificates_are_checked_as_other_nodes_check_them():
    found = checks(**FILES)["certificates"]

    assert found.status == "ok"
    assert "names are not compared" in found.found
    assert "days left" in found.found


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"key": "/no/such/file"}, "cluster.key: /no/such/file"),
        ({"key": str(CERTIFICATES / "stranger.key")}, "cluster.certificate"),
        ({"authority": str(CERTIFICATES / "other.pem")}, "cluster.certificate: "),
    ],
    ids=["no file", "another key", "another authority"],
)
def test_certificates_that_no_node_accepts_fail(changed, says):
    found = checks(**FILES | changed)["certificates"]

    assert found.status == "fail"
    assert says in found.found


@pytest.mark.parametrize(("days", "status"), [(-1, "fail"), (10, "warn"), (90, "ok")])
def test_a_certificate_that_has_ended_fails_and_one_that_ends_soon_is_warned_of(
    tmp_path, days, status
):
    files = signed(tmp_path, "b", days)

    found = checks(**msgspec.structs.asdict(files))["certificates"]

    assert found.status == status
    if status != "fail":
        assert "its names: b" in found.found
        assert "not compared" not in found.found


def test_a_node_with_certificates_of_another_authority_is_told():
    def never(_: Any) -> list[Any]:
        raise AssertionError

    with answering(never, STRANGER.accepting()) as place:
        found = checks(nodes=(f"a={place}",), **FILES)["node a"]

    assert found.status == "warn"
    assert "same authority" in found.advice


def test_what_a_listening_address_means_is_told():
    tls = {"nodes": (), **FILES}
    for text in ("0.0.0.0:7400", "[::]:7400"):
        one = checks(listen=text, **tls)["cluster.listen"]
        assert (one.status, "firewall" in one.advice) == ("warn", True)
    assert checks(transfer_listen="10.0.0.2:7401", **tls)["cluster.transfer_listen"].status == "ok"
    one = checks(nodes=("a=127.0.0.1:1",))["cluster.listen"]
    assert one.status == "ok", "all nodes are on this machine"
    assert checks()["cluster"].status == "warn", "no other node is named"


def test_a_node_that_only_this_machine_reaches_is_warned_of_if_others_are_beyond(monkeypatch):
    monkeypatch.setattr(probe, "_TIMEOUT_S", 0.01)
    one = checks(nodes=("a=192.0.2.1:7400",))["cluster.listen"]

    assert one.status == "warn"
    assert "only this machine" in one.found


def signed(folder: Path, name: str, days: int) -> CertificateFiles:
    """Files of a new authority, and of a node that it has signed for so many days."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)

    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    openssl("req", "-x509", *new, "-days", "365", "-subj", "/CN=authority", "-keyout", "ca.key",
            "-out", "ca.pem")  # fmt: skip
    openssl("req", *new, "-subj", f"/CN={name}", "-keyout", "node.key", "-out", "node.csr")
    openssl("x509", "-req", "-in", "node.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
            "-CAcreateserial", "-days", str(days), "-out", "node.pem")  # fmt: skip
    return CertificateFiles(*(str(folder / one) for one in ("node.pem", "node.key", "ca.pem")))


def test_mooncake_is_told_with_who_reads_and_writes_what():
    chosen = {"transports": ("mooncake", "tcp")}
    assert "no tenant's pages" in checks(**chosen)["mooncake"].found
    told = checks(**chosen, rdma_tenants=("one", "two"))["mooncake"]
    assert told.status == "warn"
    assert "any interface reads and writes one, two" in told.found
    assert "firewall" in told.advice
    assert "mooncake" not in checks()


# ---- etcd and Redis --------------------------------------------------------------------------


def of_store(advertise: str = "", listen: str = "127.0.0.1:0", **redis: Any) -> dict[str, Check]:
    config = ServerConfig(
        node=NodeConfig(name="b"), redis=StoreConfig(**redis),
        cluster=ClusterConfig(
            name="blue", membership="redis", listen=listen, advertise=advertise
        ),
    )  # fmt: skip
    return {one.name: one for one in peer_checks(config, None)}


def of_running_store(told: list[dict[str, Any]] | None) -> dict[str, Check]:
    """Checks without a configuration; the running node tells these of its settings."""
    settings = completed({"values": told}, Configuration).values if told is not None else None
    found = list(peer_checks(None, completed(STATS, NodeStats), settings))
    assert all(one.advice for one in found if one.status != "ok"), "it says what to do"
    return {one.name: one for one in found}


def settings_of(**redis: Any) -> list[dict[str, Any]]:
    """The answer of ``/v1/config`` of a node with a membership in Redis."""
    loaded = Loaded(
        ServerConfig(
            node=NodeConfig(name="b"), redis=StoreConfig(**redis),
            cluster=ClusterConfig(name="blue", membership="redis"),
        ), {},
    )  # fmt: skip
    return values(loaded)


@contextmanager
def accepting() -> Iterator[str]:
    """What accepts connections; yields where."""
    with socket.create_server(("127.0.0.1", 0)) as one:
        yield f"127.0.0.1:{one.getsockname()[1]}"


def test_a_store_that_answers_is_ok_and_one_that_does_not_is_told() -> None:
    gone = f"127.0.0.1:{unused_port()}"
    with accepting() as place:
        found = of_store(endpoints=(place, gone))

    assert found[f"redis {place}"].status == "ok"
    assert found[f"redis {gone}"].status == "warn"
    assert "firewall" in found[f"redis {gone}"].advice
    assert "cluster" not in found, "no list of nodes is missed"


def test_the_stores_of_a_running_node_are_looked_at_without_its_file() -> None:
    gone = f"127.0.0.1:{unused_port()}"
    with accepting() as place:
        found = of_running_store(settings_of(endpoints=(place, gone)))

    assert found[f"redis {place}"].status == "ok"
    assert found[f"redis {gone}"].status == "warn"


def test_what_was_not_looked_at_of_a_running_node_is_said() -> None:
    untold = of_running_store(None)["stores"]
    assert (untold.status, "--config" in untold.advice) == ("warn", True)
    assert "not checked" in untold.found

    unreadable = of_running_store(settings_of(endpoints=("127.0.0.1:9",), login="/nowhere/login"))
    one = unreadable["stores"]
    assert (one.status, "not checked" in one.found) == ("warn", True), "the node runs with it"
    assert "redis.login" in one.found

    newer = [*settings_of(endpoints=("127.0.0.1:9",)), {"key": "cluster.unheard_of", "value": 1}]
    assert of_running_store(newer)["stores"].status == "warn"


def test_a_store_whose_certificate_is_of_another_authority_is_told() -> None:
    authority = str(CERTIFICATES / "other.pem")
    with answering(lambda _: [], CertificateFiles(**FILES).accepting()) as place:
        one = of_store(endpoints=(place,), authority=authority)[f"redis {place}"]

    assert one.status == "warn"
    assert "redis.authority" in one.advice


def test_a_file_of_a_store_that_cannot_be_read_keeps_the_node_from_starting() -> None:
    one = of_store(endpoints=("127.0.0.1:9",), login="/nowhere/login")["stores"]

    assert one.status == "fail"
    assert "redis.login" in one.found


@pytest.mark.parametrize("advertise", ["", "127.0.0.1:7400"])
def test_an_address_that_other_machines_cannot_reach_is_warned_of(advertise: str) -> None:
    with accepting() as place:
        assert "cluster.advertise" not in of_store(advertise, endpoints=(place,))
    gone = f"kvstore.invalid:{unused_port()}"
    one = of_store(advertise, endpoints=(gone,))["cluster.advertise"]
    assert (one.status, "cluster.advertise" in one.advice) == ("warn", True)
