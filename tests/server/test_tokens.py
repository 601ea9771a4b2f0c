"""Goal: who may know prompts gets the tokens of pages, wherever these are, and nobody else does."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.cli import main
from kvstore.protocol.page import PrefixKeys
from kvstore.state.tree.places import HEADER_BYTES, Place
from kvstore.tier.record import decode_header, decode_identity
from tests.client.conftest import READY, Daemon, arguments, new_keys
from tests.events.test_event_access import events_of
from tests.server.conftest import PAGE_BYTES, Api, Stored
from tests.server.test_two_tiers import on_disk_only

PAGES = 12
TENANT = {"model": "m", "tenant": "red"}
READ, OPERATE = "read-token-of-20-bytes", "operate-token-20-bytes"


@pytest.fixture
def start(spawn, tmp_path):
    """Starts a daemon whose directory is that of those before it."""
    config = tmp_path / "server.toml"
    config.write_text(
        f'[ssd]\ndirectories = ["{tmp_path / "ssd"}"]\ncapacity_bytes = "256MiB"\n'
        'segment_bytes = "16MiB"\nwrite = "through"\nadmission = "all"\nsync = "always"\n'
    )

    def started(**settings: Any) -> Daemon:
        command = [*arguments(tmp_path / "own.sock", **settings), "--config", str(config)]
        return Daemon(spawn(command, ready=READY))

    return started


def stop(daemon: Daemon) -> None:
    assert daemon.process.stop() == 0, daemon.process.report()


def tokens_of(keys: PrefixKeys) -> list[list[int]]:
    assert keys.tokens is not None
    return keys.tokens.reshape(len(keys), -1).tolist()


def stored_events(daemon: Daemon, medium: str) -> dict[bytes, list[int]]:
    """Key → its tokens, as the last event of that medium told them; none = an empty list."""
    found: dict[bytes, list[int]] = {}
    for event in events_of(daemon.replay):
        if event["type"] == "BlockStored" and event["medium"] == medium:
            ids, size = event["token_ids"], event["block_size"]
            for at, key in enumerate(event["block_hashes"]):
                found[key] = ids[at * size : (at + 1) * size]
    return found


def records_of(folder: Path) -> dict[bytes, bytes]:
    """Key → tokens of each record in a directory's segments."""
    log = decode_identity((folder / "kvstore-log.json").read_bytes()).log
    found = {}
    for path in folder.glob("*.kvlog"):
        segment, content = int(path.stem.partition("-")[2], 16), path.read_bytes()
        for at in range(0, len(content), HEADER_BYTES):
            block = content[at : at + HEADER_BYTES]
            header = decode_header(block, log, Place(segment, at))
            if header is not None:
                found[header.key] = header.tokens
    return found


def test_tokens_are_in_the_records_and_in_the_events_of_a_later_start(start, tmp_path, wait_until):
    daemon = start(events__tokens="true")
    with daemon.connect() as store:
        mine, api = Stored(store, **TENANT), Api(daemon)
        keys = mine.put(PAGES)
        on_disk_only(api, mine, wait_until, PAGES)
    known = dict(zip([bytes(key) for key in keys], tokens_of(keys), strict=True))
    assert stored_events(daemon, "CPU") == stored_events(daemon, "STORAGE") == known
    stop(daemon)
    records = records_of(tmp_path / "ssd")
    assert {key: np.frombuffer(of, "<u4").tolist() for key, of in records.items()} == known

    daemon = start(events__tokens="true")
    wait_until(lambda: len(stored_events(daemon, "STORAGE")) == PAGES)
    assert stored_events(daemon, "STORAGE") == known, "read from the records, a start knows none"
    with daemon.connect() as store:
        space = Stored(store, **TENANT).space
        pages = [np.zeros(PAGE_BYTES, np.uint8) for _ in range(PAGES)]
        assert space.get(keys, pages) == PAGES
        wait_until(lambda: len(stored_events(daemon, "CPU")) == PAGES)
    assert stored_events(daemon, "CPU") == known
    stop(daemon)

    daemon = start()
    wait_until(lambda: len(stored_events(daemon, "STORAGE")) == PAGES)
    assert not any(stored_events(daemon, "STORAGE").values()), "unless they are asked for"
    stop(daemon)


def test_a_directory_whose_records_have_no_tokens_is_used_as_before(start, tmp_path, wait_until):
    daemon = start(events__tokens="true")
    with daemon.connect() as store:
        mine, api = Stored(store, **TENANT), Api(daemon)
        keys = PrefixKeys(new_keys(mine.space, PAGES).packed)
        pages = mine.content(PAGES)
        assert mine.space.put(keys, pages).stored == PAGES
        on_disk_only(api, mine, wait_until, PAGES)
    stop(daemon)
    assert set(records_of(tmp_path / "ssd").values()) == {b""}

    daemon = start(events__tokens="true")
    wait_until(lambda: len(stored_events(daemon, "STORAGE")) == PAGES)
    assert not any(stored_events(daemon, "STORAGE").values())
    with daemon.connect() as store:
        mine, api = Stored(store, **TENANT), Api(daemon)
        read = [np.zeros(PAGE_BYTES, np.uint8) for _ in range(PAGES)]
        assert mine.space.get(keys, read) == PAGES
        assert all(np.array_equal(one, page) for one, page in zip(read, pages, strict=True))
        shown = api.get(f"/v1/pages/{mine.label}/{bytes(keys[0]).hex()}/tokens")["prompt"]
    assert [one["tokens"] for one in shown] == [None]
    stop(daemon)


def test_an_operator_is_told_the_tokens_of_a_page_in_any_tier_and_a_reader_is_not(
    start, wait_until, capsys
):
    daemon = start(http__read_token=READ, http__operate_token=OPERATE)
    reader, operator, api = Api(daemon, READ), Api(daemon, OPERATE), Api(daemon)
    with daemon.connect() as store:
        mine = Stored(store, **TENANT)
        keys = mine.put(PAGES)
        of = tokens_of(keys)
        path = f"/v1/pages/{mine.label}/{bytes(keys[5]).hex()}"

        in_memory = operator.get(f"{path}/tokens?pages=3")
        on_disk_only(api, mine, wait_until, PAGES)
        assert operator.get(path)["tier"] == "ssd"
        assert operator.get(f"{path}/tokens?pages=3") == in_memory
        assert api.get(f"{path}/tokens") == {
            "space": mine.label,
            "prompt": [{"key": bytes(keys[5]).hex(), "depth": 6, "tokens": of[5]}],
        }

        assert [one["tokens"] for one in in_memory["prompt"]] == of[3:6]
        assert [one["depth"] for one in in_memory["prompt"]] == [4, 5, 6]
        everything = operator.get(f"{path}/tokens?pages=1024")["prompt"]
        assert [one["tokens"] for one in everything] == of[:6], "no further than the first page"
        assert reader.refused("GET", f"{path}/tokens")[:2] == (403, "forbidden")
        assert Api(daemon, "").refused("GET", f"{path}/tokens")[:2] == (401, "unauthorized")
        assert api.refused("GET", f"/v1/pages/{mine.label}/{'ab' * 32}/tokens")[0] == 404
        assert api.refused("GET", f"{path}/tokens?pages=0")[0] == 422

        words = ["tokens", mine.label, bytes(keys[5]).hex(), "--pages", "3", "--url", daemon.admin]
        assert main(words) == 0
        out = capsys.readouterr().out
        assert [line.split()[-1] for line in out.splitlines()] == [
            ",".join(map(str, page)) for page in of[3:6]
        ]


TOKENS = re.compile(r"\b70000\d\d\b")
"""The tokens of the next two tests, and no part of another number, as seconds have many digits."""


def test_every_look_at_a_prompt_is_in_the_log_and_no_prompt_is(daemon, api, stored, wait_until):
    keys = stored.put(2, start=7_000_000)
    name = bytes(keys[1]).hex()
    assert len(api.get(f"/v1/pages/{stored.label}/{name}/tokens?pages=2")["prompt"]) == 2

    def line() -> str:
        found = re.findall(r".*operation=ShowTokens.*", daemon.process.stderr)
        return found[0] if found else ""

    wait_until(line, what="a line of the log")
    assert "role=operate" in line()
    assert f"key={name}" in line()
    assert not TOKENS.search(daemon.process.stderr)


def test_nothing_else_that_is_shown_has_tokens_in_it(api, stored):
    keys = stored.put(2, start=7_000_000)
    name = bytes(keys[1]).hex()
    shown = [
        api.get(f"/v1/pages?space={stored.label}"), api.get(f"/v1/pages/{stored.label}/{name}"),
        api.get(f"/v1/tree?space={stored.label}"), api.post("/v1/explain", key=name),
        api.get("/v1/stats"),
    ]  # fmt: skip

    assert name in json.dumps(shown)
    assert not TOKENS.search(json.dumps(shown))
