"""Goal: a wrong command line ends the reference engine with one line that names the option."""

import asyncio
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from engine_adapters.reference.__main__ import _handoff_options, parse_args, run
from engine_adapters.reference.server import ConductorAt, keep_registered
from kvstore.protocol.errors import ConfigError
from tests.cluster.nodes import CERTIFICATES

TIMEOUT_S = 60.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--port", "99999"], "--port: 99999 is more than 65535"),
        (["--port", "-1"], "--port: -1 is less than 0"),
        (["--host", "here"], "--host: 'here' is not an IP address"),
        (["--host", "0.0.0.0"], "--host: 0.0.0.0 is every address"),
        (["--kv-blocks", "0"], "--kv-blocks: 0 is less than 1"),
        (["--max-running", "x"], "--max-running: 'x' is not a whole number"),
        (["--device-slab", "-1"], "--device-slab: '-1' is not a size"),
        (["--conductor", "foo"], "--conductor: 'foo' is not http://host:port"),
        (["--conductor", "http://h:x"], "--conductor: 'http://h:x' is not http://host:port"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_option(words, said, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(words)

    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--handoff-warm-up: only with --handoff push"),
        (["--handoff", "push"], "--handoff-warm-up: not with --mode mono"),
    ],
)
def test_a_warm_up_of_an_engine_without_pushes_is_refused(words, said) -> None:
    with pytest.raises(ConfigError, match=said):
        _handoff_options(parse_args(["--handoff-warm-up", *words]))


def test_the_size_of_the_slab_may_have_a_unit() -> None:
    assert parse_args(["--device-slab", "1GiB"]).device_slab == 1 << 30
    assert parse_args([]).device_slab == 0


@pytest.fixture
def secret(tmp_path) -> Path:
    """A file with a secret that engines accept."""
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("a secret for tests, of 32 bytes.")
    return path


PUSH = ["--handoff", "push", "--handoff-secret-file"]
NOT_A_KEY = [
    word
    for one in ("certificate", "key", "authority")
    for word in (f"--handoff-{one}", f"{CERTIFICATES / 'node.pem'}")
]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--store", "foo"], "--store: 'foo' is not unix:///absolute/path"),
        (["--handoff", "push"], "--handoff-secret-file: --handoff push needs it"),
        ([*PUSH, "/nowhere"], "--handoff-secret-file: /no"),
        ([*PUSH, "{secret}", "--handoff-key", "k.pem"], "--handoff-certificate: needed"),
        ([*PUSH, "{secret}", *NOT_A_KEY], "--handoff-certificate: "),
    ],
)
def test_what_an_engine_cannot_use_is_refused_before_there_is_one(
    words, said, secret, monkeypatch
) -> None:
    monkeypatch.setattr("engine_adapters.reference.__main__.Engine", None)
    args = parse_args([word.format(secret=secret) for word in words])

    with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
        asyncio.run(run(args))


@pytest.mark.parametrize(
    ("text", "said"), [("0.9", "silence_s: 0.9 is less than 1"), ("two", "'two' is not a number")]
)
def test_a_silence_that_cannot_be_kept_is_refused(text, said, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_args(["--handoff-silence", text])

    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    program = "python -m engine_adapters.reference"
    assert last.startswith(f"{program}: error: argument --handoff-silence: {said}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--events", "foo"], "--events: 'foo' is neither ipc:///path"),
        (["--ranks", "3"], "--ranks: 3 does not divide the 2 K/V heads of tiny"),
    ],
)
def test_what_cannot_be_used_is_named_with_its_option(words, said) -> None:
    with pytest.raises(ConfigError, match=f"^{said}"):
        asyncio.run(run(parse_args(words)))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "192.0.2.1"], "--host: "),
        (["--port", "{taken}"], "--port: error while attempting to bind"),
    ],
)
def test_where_it_cannot_listen_ends_the_engine_with_one_line(words, said) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "engine_adapters.reference",
             *(word.format(taken=port) for word in words)],
            capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip

    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith(f"python -m engine_adapters.reference: {said}")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--handoff-port", "--handoff-host, --handoff-port: cannot listen"),
        ("--handoff-registry-port", "--handoff-host, --handoff-registry-port: cannot listen at"),
    ],
)
def test_a_port_of_pushes_that_is_taken_is_named_with_its_option(option, said, secret) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        args = parse_args(["--mode", "prefill", *PUSH, str(secret), option, port])

        with pytest.raises(ConfigError, match=f"^{said}"):
            asyncio.run(run(args))


def test_a_conductor_that_was_never_there_is_said_once(caplog, wait_until) -> None:
    async def register() -> None:
        at = ConductorAt("http://127.0.0.1:1")
        registering = asyncio.create_task(keep_registered(at, "e", "mono", "http://127.0.0.1:2"))
        await asyncio.to_thread(wait_until, lambda: "does not answer" in caplog.text)
        registering.cancel()
        await asyncio.gather(registering, return_exceptions=True)

    asyncio.run(register())
    assert caplog.text.count("does not answer") == 1
