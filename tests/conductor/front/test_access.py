"""Goal: who may do what with a Conductor, on loopback and beyond."""

import json
import logging
import os
import socket
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from conductor.config import HttpConfig, load_conductor
from conductor.front.auth import Auth
from conductor.service import main
from kvstore.config import show
from kvstore.process import privatefile
from kvstore.process.faults import Faults
from kvstore.protocol.errors import ConfigError
from tests.conductor.fakes import OPERATE, FakeEngine, bearer, serving
from tests.loops import in_loop

CLIENT, READ = "client-token-of-tests", "read-token-of-tests-"
OPEN = ("GET /health", "GET /readyz")
REQUESTS = (
    "POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models", "POST /tokenize",
)  # fmt: skip
READS = (
    "GET /metrics", "GET /v1/engines", "GET /v1/engines/e", "GET /v1/nodes", "GET /v1/decisions",
    "GET /v1/decisions/x", "GET /v1/index", "POST /v1/index/match", "GET /v1/advice",
)  # fmt: skip
CHANGES = (
    "POST /v1/engines", "DELETE /v1/engines/x", "POST /v1/nodes", "DELETE /v1/nodes/x",
)  # fmt: skip
EVERYBODY = {"http": {"client_token": CLIENT, "read_token": READ}}


async def statuses(client: Any, routes: tuple[str, ...], **headers: str) -> set[int]:
    """What a stranger gets; 0 stands for everything that is no refusal."""
    found = set()
    for route in routes:
        method, path = route.split()
        async with client.session.request(
            method, client.url + path, data=b'{"prompt": "x"}' if method == "POST" else None,
            headers=headers,
        ) as response:  # fmt: skip
            await response.read()
            found.add(response.status if response.status in (401, 403) else 0)
    return found


@in_loop
async def test_every_route_is_of_one_role() -> None:
    async with serving() as client:
        shown = {
            f"{route.method} {route.resource.canonical.replace('{id}', 'x')}"
            for route in client.conductor._app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
    assert shown == {
        r.replace("engines/e", "engines/x") for r in (*OPEN, *REQUESTS, *READS, *CHANGES)
    }


@in_loop
async def test_on_loopback_all_but_changes_is_open_and_changes_need_the_token() -> None:
    async with serving(FakeEngine("e", "mixed")) as client:
        assert await statuses(client, (*OPEN, *REQUESTS, *READS)) == {0}
        assert await statuses(client, CHANGES) == {401}
        assert await statuses(client, CHANGES, **bearer("not the token at all")) == {401}
        assert await statuses(client, CHANGES, Authorization=f"Basic {OPERATE}") == {401}
        assert await statuses(client, CHANGES, Authorization="Bearer \udcff\udcfe") == {401}
        assert await statuses(client, CHANGES, **bearer(OPERATE)) == {0}
        assert client.conductor.faults.counts["unauthorized"] == 16


@in_loop
async def test_a_web_page_may_not_use_what_asks_for_no_token() -> None:
    page = {"Origin": "http://evil.example"}
    async with serving(FakeEngine("e", "mixed")) as client:
        assert await statuses(client, (*REQUESTS, *READS), **page) == {403}
        assert await statuses(client, CHANGES, **page) == {401}
        assert await statuses(client, OPEN, **page) == {0}


@in_loop
async def test_a_token_opens_what_its_role_includes_and_no_more() -> None:
    async with serving(FakeEngine("e", "mixed"), **EVERYBODY) as client:
        rows = {"": (401, 401, 401), CLIENT: (0, 403, 403), READ: (0, 0, 403), OPERATE: (0, 0, 0)}
        for token, expected in rows.items():
            found = [await statuses(client, r, **bearer(token)) for r in (REQUESTS, READS, CHANGES)]
            assert found == [{status} for status in expected], token
            assert await statuses(client, OPEN, **bearer(token)) == {0}


def test_a_refusal_says_how_to_be_let_in() -> None:
    @in_loop
    async def refused() -> None:
        async with serving() as client:
            status, answer, headers = await client.post("/v1/nodes", {})
            assert (status, answer["error"]["code"]) == (401, "unauthorized")
            assert headers["WWW-Authenticate"] == "Bearer"

    refused()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.5", "conductor.example"])
def test_beyond_loopback_it_does_not_start_without_tokens(host) -> None:
    with pytest.raises(ConfigError, match=r"http\.operate_token"):
        load_conductor(None, {}, [f"http.host={host}"])
    with pytest.raises(ConfigError, match=r"http\.client_token.*http\.open_requests"):
        load_conductor(None, {}, [f"http.host={host}", f"http.operate_token={OPERATE}"])
    for more in (f"http.client_token={CLIENT}", "http.open_requests=true"):
        load_conductor(None, {}, [f"http.host={host}", f"http.operate_token={OPERATE}", more])
    for loopback in ("127.0.0.1", "127.0.0.9", "::1", "localhost"):
        load_conductor(None, {}, [f"http.host={loopback}"])


@pytest.mark.parametrize(
    ("settings", "opened"),
    [
        ({"open_requests": True}, True),
        ({"client_token": CLIENT}, False),
        ({"read_token": READ}, False),
    ],
)
def test_beyond_loopback_reading_needs_a_token_and_requests_unless_opened(settings, opened) -> None:
    sections = {"http": {"host": "0.0.0.0", "operate_token": OPERATE, **settings}}

    @in_loop
    async def asked() -> None:
        async with serving(**sections) as client:
            client.url = client.url.replace("0.0.0.0", "127.0.0.1")
            found = [await statuses(client, r) for r in (OPEN, REQUESTS, READS, CHANGES)]
            assert found == [{0}, {0} if opened else {401}, {401}, {401}]

    asked()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"read_token": "short"}, r"http\.read_token has 5 characters"),
        ({"client_token": "sixteen chäracters"}, r"http\.client_token has characters"),
        ({"client_token": "with a space in it"}, r"http\.client_token has characters"),
        ({"read_token": OPERATE, "operate_token": OPERATE}, "must differ"),
        ({"operate_token_file": "/nonexistent"}, r"http\.operate_token_file=/nonexistent"),
    ],
)
def test_a_token_that_is_none_is_refused_by_its_key(settings, said) -> None:
    with pytest.raises(ConfigError, match=said):
        Auth(HttpConfig(**settings), Faults(logging.getLogger(), "x"))


def test_tokens_are_read_from_files_and_shown_to_nobody(tmp_path) -> None:
    path = tmp_path / "token"
    path.write_text(f"  {OPERATE}\n")
    auth = Auth(HttpConfig(operate_token_file=str(path)), Faults(logging.getLogger(), "x"))
    assert (auth.made, list(auth._tokens.values())) == ("", [OPERATE.encode()])

    config = tmp_path / "conductor.toml"
    config.write_text(
        f'[http]\nread_token = "{READ}"\n[[nodes]]\nid = "n"\nevents = "tcp://10.0.0.1:1"\n'
        f'events_token = "{CLIENT}"\n'
    )
    text = show(load_conductor(config, {}))
    assert READ not in text
    assert CLIENT not in text
    assert "tcp://10.0.0.1:1" in text


# The token that is made at start


def request(url: str, token: str) -> int:
    call = urllib.request.Request(
        f"{url}/v1/nodes", data=json.dumps({"id": "n", "events": "ipc:///x"}).encode(),
        headers=bearer(token), method="POST",
    )  # fmt: skip
    try:
        with urllib.request.urlopen(call, timeout=10) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def test_the_made_token_is_found_by_its_user_and_goes_with_its_conductor(spawn, wait_until) -> None:
    process = spawn(
        [sys.executable, "-m", "conductor.service", "--port", "0"],
        ready=r"^listening on (http://\S+)$",
    )
    url = process.ready[1]
    token = privatefile.token_for("conductor", url)
    wait_until(lambda: "token to operate: /" in process.stdout)
    path = Path(process.stdout.partition("token to operate: ")[2].strip())

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (request(url, token), request(url, "")) == (201, 401)
    assert token not in process.stdout + process.stderr
    assert privatefile.token_for("conductor", url.replace("127.0.0.1", "192.0.2.1")) == ""
    assert process.stop() == 0
    assert not path.exists()
    assert privatefile.token_for("conductor", url) == ""


def test_a_token_that_others_may_read_or_wrote_does_not_count(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(privatefile, "directories", lambda: [(tmp_path / "d", 0o700)])
    path = privatefile.write("x.token", "secret")
    assert privatefile.find("x.token") == "secret"

    path.chmod(0o640)
    assert privatefile.find("x.token") is None
    path.chmod(0o600)
    (tmp_path / "d").chmod(0o777)
    assert privatefile.find("x.token") is None
    with pytest.raises(ConfigError, match="other users"):
        privatefile.write("y.token", "secret")
    (tmp_path / "d").chmod(0o700)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert privatefile.find("x.token") is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_token_of_another_user_does_not_count(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(privatefile, "directories", lambda: [(tmp_path / "d", 0o700)])
    path = privatefile.write("x.token", "secret")
    os.chown(path, 65_534, 65_534)

    assert privatefile.find("x.token") is None


def test_only_a_made_token_that_is_still_ours_is_removed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(privatefile, "directories", lambda: [(tmp_path / "d", 0o700)])
    path = privatefile.write("x.token", "first")
    privatefile.write("x.token", "second")
    privatefile.remove(path, "first")
    assert privatefile.find("x.token") == "second"
    privatefile.remove(path, "second")
    assert privatefile.find("x.token") is None
    assert list((tmp_path / "d").iterdir()) == []


# Registrations


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h", "http://", "http://user:secret@h:1", "http://h/path", "http://h:0", "http://h:99999",
        "http://h:1?x", "http://h#", "http://h\n:1", "http://h h", "http://[::1", "h:80", "http://@h",
    ],
)  # fmt: skip
def test_an_engine_url_that_cannot_be_is_refused_without_repeating_it(url) -> None:
    @in_loop
    async def registered() -> None:
        async with serving() as client:
            body = {"id": "e", "role": "mixed", "url": url, "model": "m"}
            status, answer, _ = await client.operate("/v1/engines", body)
            assert (status, answer["error"]["param"]) == (400, "url")
            assert "secret" not in json.dumps(answer)
            assert ("user name" in answer["error"]["message"]) == ("@" in url)

    registered()


@pytest.mark.parametrize("url", ["http://h", "https://a-b.c_d:8443", "http://[::1]:80"])
def test_an_engine_url_that_can_be_is_taken(url) -> None:
    @in_loop
    async def registered() -> None:
        async with serving(health={"probe_timeout_s": 0.05}) as client:
            body = {"id": "e", "role": "mixed", "url": url, "model": "m"}
            assert (await client.operate("/v1/engines", body))[0] == 201

    registered()


@in_loop
async def test_a_nodes_token_is_kept_and_told_to_nobody() -> None:
    async with serving() as client:
        node = {"id": "n", "events": "tcp://127.0.0.1:1", "events_replay": None}
        status, answer, _ = await client.operate("/v1/nodes", {**node, "events_token": READ})
        assert (status, {**answer, **node}) == (201, answer)
        assert READ not in str(answer)
        assert (await client.get("/v1/nodes"))[1]["nodes"] == [answer]
        follower = client.followed("node/n")
        assert follower is not None
        assert follower.source.token == READ
        for bad in ({"events": "udp://x:1"}, {"events": "ipc://@x"}, {"events_token": "a b"}):
            status, answer, _ = await client.operate("/v1/nodes", {**node, **bad})
            assert (status, answer["error"]["param"]) == (400, next(iter(bad)))


# The command


@pytest.mark.parametrize("level", ["debug", "Warning", "ERROR"])
def test_the_log_level_is_taken_in_any_case(level, capsys) -> None:
    assert main(["--log-level", level, "--print-config"]) == 0
    assert capsys.readouterr().err == ""


def test_a_wrong_log_level_says_what_there_is(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--log-level", "loud"])

    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert all(name in said for name in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"))


def test_it_tells_its_version(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("kvstore-conductor 0.")


def test_beyond_loopback_without_tokens_the_command_ends_with_2_and_says_why() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "conductor.service", "--host", "0.0.0.0", "--port", "0"],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "--set http.host: http: http.host=0.0.0.0 is not loopback" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_address_that_is_taken_is_named_by_its_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "conductor.service", "--port", str(port)],
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith(f"kvstore-conductor: http.host=127.0.0.1, http.port={port}: ")
    assert "address already in use" in done.stderr
    assert "stop it, or choose another port" in done.stderr
    assert "Errno" not in done.stderr
