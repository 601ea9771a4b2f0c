"""Goal: ``kvstore`` takes what people type, says what they meant, and fits in their terminal."""

import contextlib
import json
import os
import pty
import re
import subprocess
import sys

import pytest
from msgspec import to_builtins
from rich.console import Console

from kvstore.cli import main, names, show
from kvstore.cli.decoding import Reply, completed
from kvstore.cli.names import Names
from kvstore.cli.remote import Remote
from kvstore.protocol.counts import NodeStats
from kvstore.protocol.errors import InvalidArgument, NotFound
from kvstore.server.answers import PageList, SpaceList
from tests.client.conftest import READY, Daemon, arguments
from tests.server.conftest import PAGE_BYTES, Stored

LABEL = "4f2a91c0" + "0" * 56
OTHER = "4f2a91c1" + "0" * 56


@pytest.fixture
def kvstore(daemon, capsys):
    """``kvstore(*words) -> (status, what was printed)``."""

    def run(*words):
        status = main(["--url", daemon.admin, *map(str, words)])
        printed = capsys.readouterr()
        return status, printed.out + printed.err

    return run


# Where options may stand, and what is said of wrong ones


def test_options_of_every_verb_may_stand_before_it_or_behind(daemon, capsys, monkeypatch):
    monkeypatch.setenv("KVSTORE_URL", "http://127.0.0.1:1")
    for words in (
        ["--url", daemon.admin, "--json", "stats"], ["stats", "--url", daemon.admin, "--json"],
        ["--json", "stats", "--url", daemon.admin],
        ["--url", "http://127.0.0.1:1", "stats", "--json", "--url", daemon.admin],
    ):  # fmt: skip
        assert main(words) == 0, words
        assert json.loads(capsys.readouterr().out)["node"] == "local"


@pytest.mark.parametrize(
    ("typed", "said"),
    [("stat", "did you mean stats?"), ("space", "did you mean spaces?"),
     ("explian", "did you mean explain?"), ("xyzzy", "kvstore --help lists them")],
)  # fmt: skip
def test_a_verb_that_is_none_is_answered_with_the_one_that_was_meant(typed, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main([typed])

    told = capsys.readouterr().err
    assert (ended.value.code, f"'{typed}' is not a verb; {said}" in told) == (2, True), told


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("kvstore.cli.command", []),
        ("kvstore.server.daemon", []),
        ("conductor.service", []),
        ("conductor.service", ["simulate"]),
    ],
)
def test_the_version_is_said(module, words, spawn):
    called = f"from {module} import main; main({[*words, '--version']})"
    process = spawn([sys.executable, "-c", called])

    assert process.wait() == 0
    assert re.fullmatch(r"kvstore[a-z -]* \d+\.\d+\.\d+\S*\n", process.stdout)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["pages", "m", "--limit", "x"], "--limit: 'x' is not a whole number"),
        (["pages", "m", "--hits-min", "1.5"], "--hits-min: '1.5' is not a whole number"),
        (["pages", "m", "--age-min", "-4"], "--age-min: -4 is less than 0 seconds"),
        (["pages", "m", "--age-max", "nan"], "--age-max: 'nan' is not a number of seconds"),
        (["pin", "m", LABEL, "--ttl", "nan"], "--ttl: 'nan' is not a number of seconds"),
        (["pin", "m", LABEL, "--ttl", "10m"], "--ttl: '10m' is not a number of seconds"),
        (["verify", "--deadline", "0"], "--deadline: 0 is not more than 0 seconds"),
        (["top", "--interval", "0"], "--interval: 0 is not more than 0 seconds"),
        (["top", "--interval", "9999"], "--interval: 9999 is more than 3600 seconds"),
        (["unpin", "x"], "pin: 'x' is not a whole number"),
        (["unpin", "--", "-1"], "pin: -1 is less than 1"),
        (["jobs", "x"], "job: 'x' is not a whole number"),
        (["explain", LABEL, "--shard", "x"], "--shard: 'x' is not a whole number"),
        (["quota", "m", "--quota-bytes", "1GX"], "--quota-bytes: '1GX' is not a size"),
    ],
)
def test_a_number_that_is_wrong_is_named_with_its_option(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)

    told = capsys.readouterr().err
    assert (ended.value.code, f"argument {said}" in told) == (2, True), told


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "is not a JSON list of token ids such as [1, 2, 3]"),
        ('[1, "2"]', "is not a JSON list of token ids such as [1, 2, 3]"),
        ("[1,", "is not JSON: "),
        (None, "No such file or directory\n"),
    ],
)
def test_a_file_of_tokens_that_cannot_be_read_is_named(kvstore, tmp_path, content, said):
    path = tmp_path / "tokens"
    if content is not None:
        path.write_text(content)
    status, told = kvstore("explain", "--tokens", f"@{path}")

    assert (status, told.startswith(f"kvstore: --tokens: {path}"), said in told) == (2, True, True)


def test_tokens_that_are_no_numbers_are_answered_with_an_example(kvstore):
    for given in ("a,b", ""):
        status, told = kvstore("explain", "--tokens", given)
        said = f"kvstore: --tokens: {given!r} is not a list of token ids such as 1,2,3\n"
        assert (status, told) == (2, said)


def test_whoever_asks_the_socket_of_engines_is_told_which_one_operates(daemon, capsys):
    status = main(["stats", "--url", daemon.address])

    told = capsys.readouterr().err
    assert status == 1
    assert told[:-1].isprintable(), "bytes of another protocol are not shown"
    assert f"engines use that socket; give --url {daemon.address}.admin" in told


# Short names


def space(label: str, model: str, **fields) -> dict:
    return {"space": label, "model": model, "tenant": "default", "revision": "", "scope": "",
            "pages": 3, **fields}  # fmt: skip


class Listings(Remote):
    """A node that lists what it is told to, and counts how often it is asked."""

    def __init__(self, spaces: list[dict], keys: dict[str, list[str]] | None = None) -> None:
        super().__init__("http://127.0.0.1:1")
        self._spaces, self._keys = spaces, keys or {}
        self.asked = 0

    def get(self, path: str, kind: type, **query: object) -> Reply:
        self.asked += 1
        if path == "/v1/spaces":
            told = {"spaces": self._spaces, "next": None}
        else:
            told = {"pages": [{"key": key} for key in self._keys[query["space"]]], "next": None}
        return Reply(to_builtins(completed(told, kind)), kind)


def test_a_space_is_named_by_model_or_by_its_first_digits():
    node = Listings([space(LABEL, "meta-llama/Llama-3.1-8B"), space("ab" * 32, "Qwen/Qwen3-8B")])
    short = Names(node)

    for name in ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B", "4f2a91", "4F2A91C0000"):
        assert short.space(name) == LABEL
    assert node.asked == 1, "it is listed once"
    assert Names(node).space("cd" * 32) == "cd" * 32, "a whole label needs no listing"
    assert node.asked == 1
    for name in ("4f2a9", "8B", "Llama", ""):
        with pytest.raises(NotFound, match="not open here"):
            short.space(name)


def test_a_name_of_several_spaces_is_answered_with_all_of_them():
    short = Names(Listings([space(LABEL, "m"), space(OTHER, "m", tenant="acme", revision="r1")]))

    for name in ("m", "4f2a91"):
        with pytest.raises(InvalidArgument) as refused:
            short.space(name)
        told = str(refused.value)
        assert "matches 2: give more of it" in told
        assert f"{LABEL[:12]}  m\n" in told
        assert f"{OTHER[:12]}  m (tenant acme, revision r1)" in told
    assert short.space("4f2a91c1") == OTHER


def test_a_key_is_named_by_first_digits_that_no_other_has():
    first, second, third = "ab12cd" + "0" * 58, "ab12ce" + "0" * 58, "ab12cd" + "1" * 58
    node = Listings(
        [space(LABEL, "m"), space(OTHER, "n")], {LABEL: [first, second], OTHER: [third, second]}
    )
    short = Names(node)

    assert short.key(LABEL, "ab12cd") == first
    assert short.key(OTHER, "AB12CD") == third
    assert short.key(None, "ab12ce") == second, "one key of two spaces is one"
    assert short.key(LABEL, third) == third, "all digits are taken as they are"
    with pytest.raises(InvalidArgument, match=f"matches 2: give more of it\n  {first}\n  {third}"):
        short.key(None, "ab12cd")
    with pytest.raises(NotFound, match="all 64 digits"):
        short.key(LABEL, "ab12cf")
    for wrong in ("ab12c", "xyzxyz", "", "ab" * 33):
        with pytest.raises(InvalidArgument, match="first 6 or more"):
            short.key(LABEL, wrong)
    assert node.asked == 3, "each listing is asked for once"


def test_too_many_pages_are_not_looked_through(monkeypatch):
    monkeypatch.setattr(names, "PAGES_MAX", 5)
    node = Listings([space(LABEL, "m"), space(OTHER, "n")], {LABEL: ["ab12cd" + "0" * 58]})

    assert Names(node).key(LABEL, "ab12cd").startswith("ab12cd")
    with pytest.raises(InvalidArgument, match="6 pages are too many"):
        Names(node).key(None, "ab12cd")


def test_many_that_it_could_be_are_cut_short():
    keys = [f"ab12cd{number:02d}" + "0" * 56 for number in range(30)]
    short = Names(Listings([space(LABEL, "m")], {LABEL: keys}))

    with pytest.raises(
        InvalidArgument, match=r"matches 30: give more of it(\n  \w+){10}\n  and 20 more"
    ):
        short.key(LABEL, "ab12cd")


def test_every_verb_takes_short_names(kvstore, stored: Stored):
    keys = [key.hex() for key in stored.put(4)]
    named = (stored.label[:8], stored.space.identity.model)
    for of in named:
        for words in (
            ("pages", of, "--prefix", keys[1][:6]), ("page", of, keys[1][:8]),
            ("tree", of, keys[0][:6]), ("explain", keys[1][:6], "--space", of),
            ("pin", of, keys[0][:6]), ("verify", of, keys[2][:6]), ("verify", of),
            ("quota", of, "--quota-bytes", "1MB"), ("evict", of, keys[3][:7]),
        ):  # fmt: skip
            status, told = kvstore(*words)
            assert status == 0, told
        stored.put(4)
    assert kvstore("explain", keys[1][:6])[0] == 0
    assert kvstore("clear", stored.space.identity.model)[0] == 0
    status, told = kvstore("page", stored.label[:6], "abcdef")
    assert (status, "no stored page" in told) == (1, True)
    status, told = kvstore("pages", "no-such-model")
    assert (status, "not open here" in told) == (1, True)


def test_sizes_are_taken_as_the_configuration_takes_them(kvstore, stored: Stored, capsys):
    stored.put(1)
    assert kvstore("quota", stored.label, "--quota-bytes", "1.5MiB")[0] == 0
    told = kvstore("quota", "--json")[1]
    (mine,) = [one for one in json.loads(told)["quotas"] if one["space"] == stored.label]
    assert mine["quota_bytes"] == 3 << 19
    with pytest.raises(SystemExit):
        kvstore("quota", stored.label, "--quota-bytes", "much")
    assert "8GiB or 8Gi" in capsys.readouterr().err
    assert kvstore("quota", stored.label, "--quota-bytes", "0")[0] == 0
    assert PAGE_BYTES


# What would lose everything


def at_a_terminal(answer: str, *words: str) -> tuple[int, str]:
    """Status and screen of the command at a terminal of 80 columns where ``answer`` is typed."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-c", "from kvstore.cli import main; raise SystemExit(main())"]
    environment = {**os.environ, "COLUMNS": "80", "TERM": "dumb"}
    child = subprocess.Popen(
        [*command, *words], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    os.write(ours, answer.encode())
    screen = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 4096):
            screen += part
    os.close(ours)
    return child.wait(30), screen.decode().replace("\r\n", "\n")


def test_emptying_a_node_asks_at_a_terminal_and_needs_a_word_elsewhere(spawn, tmp_path, capsys):
    own = Daemon(spawn(arguments(tmp_path / "own.sock"), ready=READY))
    with own.connect() as store:
        stored = Stored(store)
        keys = stored.put(3)
        clear = ["--url", own.admin, "clear", "--all"]

        assert main(clear) == 2
        assert "--yes" in capsys.readouterr().err
        for answer in ("\n", "n\n", "Q\n"):
            status, shown = at_a_terminal(answer, *clear)
            assert status == 1
            assert "Remove all 3 pages of 1 spaces from node local? [y/N]" in shown
            assert "nothing was done" in shown
        assert stored.space.lookup(keys).pages == 3
        status, shown = at_a_terminal("y\n", *clear)
        assert (status, "clear" in shown) == (0, True)
        assert stored.space.lookup(keys).pages == 0
        stored.put(3)
        assert main([*clear, "--yes"]) == 0
        assert stored.space.lookup(keys).pages == 0


# What is shown


def row(**fields) -> dict:
    return {
        **space(LABEL, "meta-llama/Llama-3.1-8B-Instruct"), "kv_dtype": "bfloat16",
        "page_tokens": 64, "shards": [{}, {}], "pages": 12_345, "host_bytes": 3 << 30,
        "ssd_bytes": 12 << 30, "quota_bytes": 0, "reserved_bytes": 0, "ssd_quota_bytes": 0,
        "ssd_reserved_bytes": 0, **fields,
    }  # fmt: skip


def test_a_space_takes_two_lines_of_a_narrow_terminal():
    console = Console(width=80, markup=False)
    spaces = [row(), row(tenant="acme", quota_bytes=4 << 30, ssd_bytes=0)]
    with console.capture() as told:
        show.spaces(completed({"spaces": spaces, "next": None}, SpaceList), console)

    lines = [line.rstrip() for line in told.get().splitlines()]
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) == 3 + 2 * 2
    assert lines[3] == "4f2a91c00000  meta-llama/Llama-3.1-8B-Instruct"
    assert lines[4] == "   12,345     3.0 GiB    12.0 GiB  64 tokens, bfloat16, 2 shards"
    assert lines[5].endswith("(tenant acme)")
    assert lines[6].endswith("64 tokens, bfloat16, 2 shards; quota 4.0 GiB")


def test_limits_take_a_line_of_their_own_where_a_terminal_is_too_narrow():
    console = Console(width=80, markup=False)
    limits = {"quota_bytes": 4 << 30, "reserved_bytes": 1 << 30, "ssd_quota_bytes": 64 << 30}
    with console.capture() as told:
        show.spaces(completed({"spaces": [row(**limits)]}, SpaceList), console)

    lines = [line.rstrip() for line in told.get().splitlines()]
    assert all(len(line) <= 80 for line in lines)
    assert lines[4].endswith("64 tokens, bfloat16, 2 shards")
    assert lines[5].strip() == "quota 4.0 GiB; reserved 1.0 GiB; SSD quota 64.0 GiB"


@pytest.mark.parametrize(("width", "shown"), [(80, LABEL[:16]), (240, LABEL)])
def test_a_page_of_a_tree_takes_one_line_of_a_narrow_terminal(width, shown):
    console = Console(width=width, markup=False)
    chain = [LABEL, OTHER, "ab" * 32]
    pages = [
        {"key": key, "parent": parent, "tier": "host, ssd", "hits": 1_234_567}
        for key, parent in zip(chain, [None, *chain], strict=False)
    ]
    with console.capture() as told:
        show.tree(completed({"pages": pages}, PageList), console)

    lines = [line.rstrip() for line in told.get().splitlines()]
    assert len(lines) == 1 + len(pages)
    assert lines[1].split()[1] == shown
    assert all(len(line) <= width for line in lines)


def test_stats_count_what_was_stored_what_left_and_what_was_refused(capsys):
    counts = {"lookup_pages": 10, "hit_pages": 5, "stored_pages": 1200, "stored_bytes": 3 << 30,
              "loaded_bytes": 1 << 30, "removed_evicted": 300, "removed_corrupt": 1,
              "refused_capacity": 7, "orphaned_bytes": 0}  # fmt: skip
    host = {"capacity_bytes": 4 << 30, "free_bytes": 1 << 30, "ready_bytes": 3 << 30}
    answer = {"node": "local", "counts": counts, "pages": 900, "core": "compiled",
              "mover": "native", "host": host, "ssd": None, "spaces": [],
              "sessions": []}  # fmt: skip
    show.stats(completed(answer, NodeStats), show.console())
    told = capsys.readouterr().out

    assert re.search(r"core\s.*compiled", told), told
    assert re.search(r"stored\s.*1,200 pages, 3\.0 GiB since the start", told), told
    assert re.search(r"loaded\s.*1\.0 GiB", told), told
    assert re.search(r"pages dropped\s.*corrupt 1, evicted 300", told), told
    assert re.search(r"refused\s.*capacity 7", told), told
    show.stats(completed({**answer, "counts": {}}, NodeStats), show.console())
    told = capsys.readouterr().out
    assert not re.search("stored|loaded|pages dropped|refused", told), "nothing happened"
    assert "no engine is connected" in told


def test_stats_say_what_runs_since_when_and_how_well(kvstore, stored: Stored):
    keys = stored.put(2)
    assert stored.space.lookup(keys).pages == 2
    status, told = kvstore("stats")

    assert status == 0
    for heard in (r"version\s.*\d+\.\d+\.\d+", r"up for\s.*\d+ (s|min)", r"policy\s.*lru",
                  r"hit rate\s.*\d+\.\d% of \d+ pages since the start", r"mover\s"):  # fmt: skip
        assert re.search(heard, told), heard
    answer = json.loads(kvstore("--json", "stats")[1])
    assert answer["uptime_s"] > 0
    assert answer["policy"] == "lru"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (3600, "1 h"), (90_061, "1 d 1 h"),
     (86_400 * 40 + 59, "40 d")],
)  # fmt: skip
def test_a_long_time_is_shown_in_its_largest_units(seconds, text):
    assert show.duration(seconds) == text


def test_a_hit_rate_needs_lookups():
    assert show.hit_rate({}) == "no lookups"
    assert show.hit_rate({"lookup_pages": 1000, "hit_pages": 333}) == "33.3% of 1,000 pages"


def test_stats_say_where_pages_were_found_and_how_long_things_took(capsys):
    def latency(*buckets: int) -> dict:
        return {"count": sum(buckets), "sum_s": 1.0, "buckets": list(buckets)}

    answer = {
        "node": "n", "counts": {}, "pages": 1, "mover": "m", "ssd": None, "spaces": [],
        "sessions": [], "host": {"capacity_bytes": 1, "free_bytes": 1},
        "latency_bounds_s": [0.001, 0.005],
        "latencies": {"lookup": latency(50, 49, 1), "disk_load": latency(0, 0, 7),
                      "put": latency(0, 0, 0)},
        "lookups": [{"model": "a", "host_pages": 5, "ssd_pages": 0, "missed_pages": 1},
                    {"model": "b", "host_pages": 0, "ssd_pages": 2, "missed_pages": 2}],
    }  # fmt: skip
    show.stats(completed(answer, NodeStats), show.console())

    told = capsys.readouterr().out
    assert "memory 50.0%, SSDs 20.0%, miss 30.0%" in told
    assert "p50 ≤ 1 ms, p99 ≤ 5 ms, 100 samples" in told
    assert "p50 > 5 ms, p99 > 5 ms, 7 samples" in told
    assert "put" not in told, "there was none"

    del answer["lookups"], answer["latencies"], answer["latency_bounds_s"]  # of an older node
    show.stats(completed(answer, NodeStats), show.console())
    assert "found in" not in capsys.readouterr().out
