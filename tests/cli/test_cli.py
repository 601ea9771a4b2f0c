"""Goal: every verb of ``kvstore`` says what the node says, and failures have an exit status."""

import json
import os
import re
import socketserver
import threading
from pathlib import Path

import pytest
from msgspec import to_builtins
from rich.console import Console

from kvstore.cli import command, main, show, top
from kvstore.cli.decoding import Reply, completed
from kvstore.cli.remote import Remote
from kvstore.cli.top import frame
from kvstore.protocol.counts import NodeStats, TierList
from kvstore.protocol.errors import PeerUnreachable
from kvstore.server import client
from kvstore.server.answers import PageList
from kvstore.server.auth import token_file
from tests.client.conftest import READY, Daemon, arguments
from tests.server.conftest import PAGE_BYTES, Stored, flip_a_byte

UNKNOWN = "cd" * 32


@pytest.fixture
def kvstore(daemon, capsys):
    """``kvstore(*words) -> (status, what was printed)``; ``as_json`` parses it."""

    def run(*words, as_json=False, to=daemon):
        status = main([*map(str, words), "--url", to.admin, *(["--json"] if as_json else [])])
        printed = capsys.readouterr()
        if not as_json:
            return status, printed.out + printed.err
        return status, json.loads(printed.out) if printed.out else printed.err

    return run


def test_every_look_is_a_table_and_is_json(kvstore, stored):
    keys = stored.put(2)
    for words, heard in (
        (("stats",), "hit rate"), (("spaces",), stored.label[:12]),
        (("pages", stored.label), "2 pages"), (("tree", stored.label), keys[0].hex()[:16]),
        (("page", stored.label, keys[0].hex()), "shards"), (("sessions",), "sessions"),
        (("tiers",), "tier host"), (("config",), "configuration"), (("pins",), "pins"),
        (("quota",), "limits"), (("policy",), "lru"), (("jobs",), "jobs"),
        (("top", "--once"), "hit rate"), (("explain", keys[1].hex()), "hit: READY in host"),
    ):  # fmt: skip
        status, told = kvstore(*words)
        assert (status, heard in told) == (0, True), (words, told)
        status, told = kvstore(*words, as_json=True)
        assert status == 0, words
        assert told, words


def test_long_listings_are_fetched_to_their_limit(kvstore, stored):
    stored.put(12)

    assert len(kvstore("pages", stored.label, "--limit", 5, as_json=True)[1]["pages"]) == 5
    assert "there is more" in kvstore("pages", stored.label, "--limit", 5)[1]
    assert "there is more" not in kvstore("pages", stored.label)[1]
    assert len(kvstore("pages", stored.label, as_json=True)[1]["pages"]) == 12
    assert kvstore("pages", stored.label, "--hits-min", 99, as_json=True)[1]["pages"] == []


def test_changes_are_made_and_waited_for(kvstore, daemon, stored):
    keys = stored.put(6)
    flip_a_byte(daemon, stored.content(6)[5].tobytes())

    status, pin = kvstore("pin", stored.label, keys[0].hex(), "--ttl", 60, as_json=True)
    assert (status, pin["pages"]) == (0, 1)
    status, job = kvstore("verify", stored.label, as_json=True)
    assert (status, job["state"], job["result"]["corrupt"]) == (0, "done", 1)
    status, told = kvstore("explain", keys[5].hex(), "--space", stored.label)
    assert (status, told.startswith("quarantined: ")) == (0, True)
    status, job = kvstore("evict", stored.label, keys[3].hex(), as_json=True)
    assert (status, job["result"]["dropped"]) == (0, 2)
    status, limits = kvstore("quota", stored.label, "--quota-bytes", 1 << 20, as_json=True)
    assert (status, stored.label in str(limits)) == (0, True)
    assert kvstore("unpin", pin["pin"])[0] == 0
    assert kvstore("policy", "lru")[0] == 0
    assert kvstore("clear", stored.label)[0] == 0
    assert stored.space.lookup(keys).pages == 0
    status, told = kvstore("explain", "--tokens", "0,1,2,3", "--space", stored.label, as_json=True)
    assert (status, told["verdict"], told["asked_pages"]) == (0, "cleared", 1)


def test_a_kept_conversation_says_how_much_of_it_is_kept(kvstore, stored):
    last = stored.put(3)[2].hex()
    keep, end = ("keep", stored.label, last, "c"), ("end-conversation", stored.label, "c")

    status, told = kvstore(*keep, "--max-bytes", PAGE_BYTES)
    assert (status, told.startswith("c: 1 pages are kept for ")) == (0, True)
    assert "; the others may be evicted: " in told
    assert "--max-bytes is reached (bytes)" in told
    assert kvstore(*keep)[1].startswith("c: 3 pages are kept for ")
    assert kvstore(*end) == (0, "c: 3 pages may now be evicted\n")
    assert kvstore(*end) == (0, "c: was not kept\n")
    assert kvstore("keep", stored.label, UNKNOWN, "c")[0] == 1


def test_tokens_may_come_from_a_file(kvstore, stored, tmp_path):
    stored.put(2)
    (tmp_path / "tokens").write_text(json.dumps(list(range(8))))
    where = ("--space", stored.label, "--tokens")

    assert kvstore("explain", *where, f"@{tmp_path / 'tokens'}", as_json=True)[1]["hit_pages"] == 2
    assert kvstore("explain", *where, "1,x")[0] == 2
    assert kvstore("explain", *where, "@/nowhere")[0] == 2


def test_what_the_node_refuses_fails_with_its_words(kvstore, stored):
    for words, heard in (
        (("page", stored.label, UNKNOWN), "not stored"), (("pages", "nowhere"), "not open here"),
        (("unpin", 999), "does not exist"), (("policy", "x"), "known are lru"),
        (("prefetch", stored.label, UNKNOWN), "one tier"),
        (("move", stored.label, UNKNOWN), "one tier"),
        (("jobs", 999), "does not exist"), (("page", "a b", UNKNOWN), "not open here"),
        (("page", "mödel?x#y", UNKNOWN), "not open here"),
        (("quota", "nowhere", "--quota-bytes", 1), "not open here"),
    ):  # fmt: skip
        status, told = kvstore(*words)
        assert (status, heard in told) == (1, True), (words, told)


def test_what_is_to_be_emptied_is_named_in_one_way(kvstore, stored):
    for words in (
        ("clear",),
        ("clear", stored.label, "--all"),
        ("clear", stored.label, "--all", "--yes"),
    ):
        status, told = kvstore(*words)
        assert (status, "name a space to empty, or --all" in told) == (2, True)


def test_names_that_engines_chose_are_shown_as_they_are(kvstore, daemon):
    names = {"model": "[/bold]x [red]m", "tenant": "a\x1b[2Jb", "revision": ":smile:"}
    with daemon.connect(name="[/e] engine") as store:
        Stored(store, **names).put(1)
        for words, heard in (
            ("stats", "[/bold]x [red]m"), ("spaces", r"a\x1b[2Jb"), ("spaces", ":smile:"),
            ("sessions", "[/e] engine"), ("top --once", "[/e] engine"),
        ):  # fmt: skip
            status, told = kvstore(*words.split())
            assert (status, heard in told, "\x1b[2J" in told) == (0, True, False), told


def test_a_name_that_the_terminal_cannot_show_is_escaped(daemon, monkeypatch, tmp_path):
    with daemon.connect() as store:
        Stored(store, model="mödel-模").put(1)
        with (tmp_path / "told").open("w+", encoding="ascii") as ascii_only:
            monkeypatch.setattr("sys.stdout", ascii_only)
            assert main(["spaces", "--url", daemon.admin]) == 0
            ascii_only.seek(0)
            assert r"m\xf6del-\u6a21" in ascii_only.read()


def test_limits_are_changed_one_by_one_and_only_when_told(kvstore, stored):
    def limits():
        shown = kvstore("quota", as_json=True)[1]["quotas"]
        (mine,) = [one for one in shown if one["space"] == stored.label]
        return mine["quota_bytes"], mine["reserved_bytes"]

    quota = ("quota", stored.label[:12])
    stored.put(1)
    assert kvstore(*quota, "--quota-bytes", 8 * PAGE_BYTES)[0] == 0
    assert kvstore(*quota, "--reserved-bytes", PAGE_BYTES)[0] == 0
    assert limits() == (8 * PAGE_BYTES, PAGE_BYTES)
    assert kvstore("quota", "--quota-bytes", 1)[0] == 2
    assert limits() == (8 * PAGE_BYTES, PAGE_BYTES)
    assert kvstore(*quota, "--quota-bytes", 0, "--reserved-bytes", 0)[0] == 0


def test_a_reader_that_has_had_enough_is_no_error(daemon, monkeypatch, capfd):
    for words in (["stats", "--json"], ["config"]):
        reading, writing = os.pipe()
        os.close(reading)
        with monkeypatch.context() as patch, os.fdopen(writing, "w") as piped:
            patch.setattr("sys.stdout", piped)
            assert main([*words, "--url", daemon.admin]) == 1
    assert capfd.readouterr().err == ""


def test_keys_are_whole_in_a_narrow_window(stored):
    keys = stored.put(1)
    console = Console(width=40, markup=False)
    row = {"key": keys[0].hex(), "tier": "host", "shards": {}, "hits": 0, "stored_s_ago": 1.0,
           "used_s_ago": None, "children": 0}  # fmt: skip
    with console.capture() as told:
        show.pages(completed({"pages": [row]}, PageList), console)

    first = "".join(line.strip("│ ").split("│")[0].strip() for line in told.get().splitlines())
    assert keys[0].hex() in first


@pytest.mark.parametrize(
    "url",
    [
        "",
        "foo",
        "127.0.0.1:7780",
        "http://h:abc",
        "http://",
        "http://a b",
        "unix://run/s",
        "unix://",
    ],
)
def test_what_is_no_address_of_a_node_is_said(url, capsys):
    for verb in ("stats", "top", "doctor"):
        assert main([verb, "--url", url]) == 2
        assert "is not an address of a node" in capsys.readouterr().err


def test_a_token_that_cannot_be_one_is_said(kvstore):
    for token in ("a\nb", "é"):
        status, told = kvstore("stats", "--token", token)
        assert (status, "--token" in told) == (2, True)


def test_who_answers_and_is_no_node_is_said(capsys):
    class Stranger(socketserver.StreamRequestHandler):
        def handle(self):
            self.rfile.readline()
            self.wfile.write(b"+OK 220 hello\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Stranger) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            assert main(["stats", "--url", f"http://127.0.0.1:{server.server_address[1]}"]) == 1
        finally:
            server.shutdown()
            thread.join()
    assert "is not the HTTP API of a node" in capsys.readouterr().err


def test_a_proxy_of_the_environment_is_not_asked(kvstore, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")

    assert kvstore("stats")[0] == 0
    assert "none answers" not in kvstore("doctor", "--directory", "/nowhere")[1]


def test_a_node_that_is_not_there_is_said(capsys):
    for words in (["stats"], ["top", "--once"], ["explain", UNKNOWN]):
        assert main([*words, "--url", "http://127.0.0.1:1"]) == 1
        assert "is it running?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        [], ["nonsense"], ["page", "x"], ["tree"], ["pages"], ["pages", "x", "--limit", "0"],
        ["tree", "x", "--limit", "-1"], ["top", "--interval", "nan"], ["top", "--interval", "inf"],
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_status_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)

    assert ended.value.code == 2
    assert "usage: kvstore" in capsys.readouterr().err


def test_tokens_of_roles_are_sent_and_their_lack_is_said(
    spawn, tmp_path, kvstore, monkeypatch, capsys
):
    read, operate = "r" * 20, "o" * 20
    settings = {"http__read_token": read, "http__operate_token": operate}
    own = Daemon(spawn(arguments(tmp_path / "own.sock", **settings), ready=READY))

    def over_tcp(*words: str) -> tuple[int, str]:
        status = main([*words, "--url", own.http])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    status, told = over_tcp("stats")
    assert (status, "KVSTORE_TOKEN" in told) == (1, True)
    (tmp_path / "token").write_text(read + "\n")
    monkeypatch.setenv("KVSTORE_TOKEN_FILE", str(tmp_path / "token"))
    assert over_tcp("stats")[0] == 0
    status, told = over_tcp("clear", "--all", "--yes")
    assert (status, "operating needs" in told) == (1, True)
    assert over_tcp("clear", "--all", "--yes", "--token", operate)[0] == 0
    monkeypatch.setenv("KVSTORE_TOKEN", operate)
    assert over_tcp("clear", "--all", "--yes")[0] == 0
    monkeypatch.delenv("KVSTORE_TOKEN")
    assert kvstore("clear", "--all", "--yes", to=own)[0] == 0, (
        "its own user needs none on its socket"
    )


def test_the_node_of_this_machine_is_found_without_a_word(spawn, tmp_path, monkeypatch, capsys):
    own = Daemon(spawn(arguments(tmp_path / "own.sock"), ready=READY))
    socket = Path(own.admin.removeprefix("unix://"))
    monkeypatch.setattr(client, "admin_socket", lambda: socket)
    monkeypatch.setattr(client, "HERE", own.admin)
    monkeypatch.setattr(client, "HERE_TCP", own.http)
    monkeypatch.setattr(command, "cli_defaults", lambda: (own.admin, ""))

    assert main(["stats"]) == 0
    token = token_file(socket).read_text()
    socket.unlink()  # as if it were somewhere else: its port is left, and the token it made
    assert main(["clear", "--all", "--yes"]) == 0
    assert "done" in capsys.readouterr().out
    token_file(socket).write_text("stale" * 10)
    assert main(["stats"]) == 1
    assert f"it is in {token_file(socket)}" in capsys.readouterr().err
    token_file(socket).write_text(token)
    own.process.kill()
    assert main(["stats"]) == 1
    assert "is it running?" in capsys.readouterr().err


def test_a_token_file_that_cannot_be_read_is_said(monkeypatch, capsys):
    monkeypatch.setenv("KVSTORE_TOKEN_FILE", "/nowhere/token")

    assert main(["stats"]) == 2
    assert "KVSTORE_TOKEN_FILE=/nowhere/token" in capsys.readouterr().err


def test_the_help_describes_every_argument(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    told = capsys.readouterr().out
    verbs = re.findall(r"^    ([a-z-]+)(?: |$)", told, re.MULTILINE)
    assert len(verbs) == 32

    for verb in verbs:
        with pytest.raises(SystemExit):
            main([verb, "--help"])
        lines = capsys.readouterr().out.splitlines()
        bare = [
            line
            for line, after in zip(lines, [*lines[1:], ""], strict=True)
            if re.fullmatch(r"  -?\S+( \S+)?", line) and not after.startswith(" " * 8)
        ]
        assert not bare, verb


def test_a_job_that_somebody_cancelled_is_no_success(kvstore, monkeypatch):
    def cancelled(_self: Remote, job: Reply, _wait_s: float) -> Reply:
        return Reply({**job.raw, "state": "cancelled"}, job.kind)

    monkeypatch.setattr(Remote, "finished", cancelled)

    assert kvstore("verify")[0] == 1


def test_who_stops_waiting_is_told_that_the_job_goes_on(kvstore, monkeypatch):
    def interrupted(_self, job, _wait):
        raise KeyboardInterrupt

    monkeypatch.setattr(Remote, "finished", interrupted)
    status, told = kvstore("verify")

    assert status == 130
    assert re.search(r"job (\d+) continues; stop it: kvstore jobs \1 --cancel", told)


def test_a_job_to_cancel_is_named(kvstore):
    status, told = kvstore("jobs", "--cancel")

    assert (status, "name the job" in told) == (2, True)


def stats(boot: str, ssd: dict | None = None, **counts: int) -> NodeStats:
    host = {"capacity_bytes": 100, "free_bytes": 40, "pinned_bytes": 0, "limbo_bytes": 0}
    told = {"boot": boot, "node": "n", "counts": counts, "host": host, "pages": 1,
            "loop_lag_s": 0.001, "sessions": [], "ssd": ssd}  # fmt: skip
    return completed(told, NodeStats)


class Frames(Remote):
    """A node that answers what it is told to, and then is interrupted."""

    def __init__(self, *answers: NodeStats | Exception) -> None:
        super().__init__("http://127.0.0.1:1")
        self._answers = iter(answers)

    def get(self, path: str, kind: type, **query: object) -> Reply:
        answer = next(self._answers, KeyboardInterrupt())
        if isinstance(answer, BaseException):
            raise answer
        return Reply(to_builtins(answer), kind)


def test_a_pipe_gets_one_frame_after_the_other(capsys):
    with pytest.raises(KeyboardInterrupt):
        top.run(Frames(*[stats("a")] * 4), once=False, as_json=False, seconds=0.1)

    assert capsys.readouterr().out.count("hit rate") == 3


def test_who_watches_sees_a_node_go_and_come_back(monkeypatch, capsys):
    screen = Console(force_terminal=True, width=100)
    monkeypatch.setattr(top, "console", lambda: screen)
    away = PeerUnreachable("no node answers at all")
    with pytest.raises(KeyboardInterrupt):
        top.run(Frames(stats("a"), away, stats("b")), once=False, as_json=False, seconds=0.1)

    told = capsys.readouterr().out
    assert told.index("no node answers at all") < told.index("hit rate")


def test_rates_are_differences_over_time_and_a_restart_counts_from_nothing():
    before = stats("a", lookup_pages=10, hit_pages=10, stored_bytes=10**9)
    after = stats("a", lookup_pages=30, hit_pages=20, stored_bytes=3 * 10**9, removed_evicted=4)

    rates = frame(before, after, 2.0)
    assert (rates.hit_rate, rates.in_gb_per_s, rates.evictions_per_s) == (0.5, 1.0, 2.0)
    assert rates.host_used_bytes == 60
    assert frame(after, stats("b", stored_bytes=10**9), 1.0).in_gb_per_s == 1.0
    assert frame(after, after, 1.0).hit_rate is None
    assert frame(after, after, 1.0).ssd is None


def test_the_ssd_tier_is_watched_too():
    def with_ssd(written: int) -> NodeStats:
        ssd = {"used_bytes": 1, "capacity_bytes": 4, "written_bytes": written, "read_bytes": 0,
               "write_amplification": 1.25, "degraded": True}  # fmt: skip
        return stats("a", ssd)

    ssd = frame(with_ssd(10**9), with_ssd(2 * 10**9), 2.0).ssd
    assert (ssd.written_gb_per_s, ssd.degraded) == (0.5, True)


def test_stored_and_loaded_bytes_are_counted(kvstore, stored: Stored):
    before = kvstore("stats", as_json=True)[1]["counts"]
    keys = stored.put(3)
    stored.space.get(keys).close()
    after = kvstore("stats", as_json=True)[1]["counts"]

    for name in ("stored_bytes", "loaded_bytes"):
        assert after[name] - before.get(name, 0) == 3 * len(stored.content(1)[0])


def test_nested_values_have_a_row_each(capsys):
    wear = {"admitted": 3, "today_bytes": 5 << 20}
    told = {"tiers": [{"tier": "ssd", "directories": [{"path": "/d"}], "wear": wear}]}
    show.tiers(completed(told, TierList), show.console())

    rows = [line.strip("│ \n").split("│") for line in capsys.readouterr().out.splitlines()]
    cells = {row[0].strip(): row[1].strip() for row in rows if len(row) == 2}
    assert cells.items() >= {
        ("directories.0.path", "/d"), ("wear.admitted", "3"), ("wear.today_bytes", "5.0 MiB"),
    }  # fmt: skip
