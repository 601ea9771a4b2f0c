"""Goal: with an SSD tier the admin API says which tier a page is in, and acts on both."""

import json
from pathlib import Path

import pytest

from kvstore.cli import main
from kvstore.server.jobs import RUNNING_MAX
from tests.client.conftest import READY, Daemon, arguments
from tests.server.conftest import PAGE_BYTES, Api, Stored


@pytest.fixture
def two_tiers(spawn, tmp_path):
    config = tmp_path / "server.toml"
    config.write_text(
        f'[ssd]\ndirectories = ["{tmp_path / "ssd"}"]\ncapacity_bytes = "256MiB"\n'
        'segment_bytes = "16MiB"\nwrite = "through"\nadmission = "all"\n'
    )
    return Daemon(spawn([*arguments(tmp_path / "own.sock"), "--config", str(config)], ready=READY))


def test_pages_on_disk_are_shown_explained_limited_and_cleared(two_tiers, wait_until, capsys):
    with two_tiers.connect() as store:
        mine, api = Stored(store), Api(two_tiers)
        keys = mine.put(20)
        listing = f"/v1/pages?space={mine.label}"
        wait_until(lambda: len(api.get(f"{listing}&tier=ssd")["pages"]) == 20)
        assert [tier["tier"] for tier in api.get("/v1/tiers")["tiers"]] == ["host", "ssd"]
        wear = api.get("/v1/policy")["ssd"]["wear"]
        assert wear["today_bytes"] >= 20 * PAGE_BYTES
        assert wear["forecast_bytes"] > wear["today_bytes"]
        for words, heard in ((["stats"], "SSD tier"), (["top", "--once"], "of 256.0 MiB (6%)")):
            assert main([*words, "--url", two_tiers.admin]) == 0
            assert heard in capsys.readouterr().out

        limits = {"quota_bytes": 5 * PAGE_BYTES}
        assert api.ended(api.send("PUT", f"/v1/quotas/{mine.label}", limits)[1])["state"] == "done"
        last = api.post("/v1/explain", key=keys[19].hex())
        assert (last["verdict"], last["shards"]) == ("hit", {"0": ["ssd"]})
        assert len(api.get(f"{listing}&tier=host")["pages"]) == 5
        for tier, checked in (("host", 5), ("ssd", 20), (None, 25)):
            job = api.ended(api.post("/v1/verify", tier=tier))
            assert (job["done"], job["total"], job["result"]["checked"]) == (checked,) * 3

        assert api.ended(api.post("/v1/clear", space=mine.label))["result"]["dropped"] == 20
        assert api.get(listing)["pages"] == []
        assert api.post("/v1/explain", key=keys[19].hex())["verdict"] == "cleared"


def test_every_metric_of_a_node_is_documented(two_tiers):
    known = (Path(__file__).parents[2] / "docs" / "operations" / "metrics.md").read_text()
    lines = two_tiers.ask("/metrics").decode().splitlines()
    named = {line.split()[2] for line in lines if line.startswith("# TYPE ")}

    assert len(named) > 40
    assert not {name for name in named if f"`{name}" not in known}


def flip_on_disk(folder: Path, wanted: bytes) -> None:
    """Change one byte of the page that holds ``wanted`` in a segment file."""
    for path in folder.glob("**/*.kvlog"):
        with path.open("r+b") as file:
            at = file.read().find(wanted)
            if at >= 0:
                file.seek(at + 7)
                file.write(bytes([wanted[7] ^ 1]))
                return
    pytest.fail("the page is in no segment")


def on_disk_only(api: Api, mine: Stored, wait_until, pages: int) -> None:
    """Wait until all pages are on disk, then take their memory."""
    listing = f"/v1/pages?space={mine.label}&tier=ssd"
    wait_until(lambda: len(api.get(listing)["pages"]) == pages)
    for limits in ({"quota_bytes": PAGE_BYTES}, {}):
        job = api.ended(api.send("PUT", f"/v1/quotas/{mine.label}", limits)[1])
        assert job["state"] == "done"


def test_a_flipped_byte_in_a_segment_is_found_and_its_page_is_a_miss(
    two_tiers, tmp_path, wait_until
):
    with two_tiers.connect() as store:
        mine, api = Stored(store), Api(two_tiers)
        keys = mine.put(20)
        on_disk_only(api, mine, wait_until, 20)
        flip_on_disk(tmp_path / "ssd", mine.content(20)[12].tobytes())
        assert mine.space.lookup(keys).pages == 20, "nobody has noticed"

        page = api.ended(api.post("/v1/verify", space=mine.label, key=keys[3].hex(), tier="ssd"))
        assert (page["result"]["checked"], page["result"]["corrupt"]) == (1, 0)
        job = api.ended(api.post("/v1/verify", space=mine.label, tier="ssd"))

        found = job["result"]
        assert found["corrupt"] == 1
        assert found["checked"] + found["skipped"] == job["done"] == job["total"] == 20
        assert mine.space.lookup(keys).pages == 12
        asked = {"key": keys[12].hex(), "space": mine.label}
        assert api.post("/v1/explain", **asked)["verdict"] == "quarantined"
        assert api.get("/v1/stats")["counts"]["disk_corrupt_records"] == 1
        assert b"kvstore_ssd_corrupt_records_total 1.0" in two_tiers.ask("/metrics")


def test_the_command_verifies_a_tier_by_a_deadline(two_tiers, capsys, wait_until):
    def verify(*words: str) -> tuple[int, dict]:
        status = main(["verify", *words, "--json", "--url", two_tiers.admin])
        return status, json.loads(capsys.readouterr().out)

    with two_tiers.connect() as store:
        mine, api = Stored(store), Api(two_tiers)
        mine.put(20)
        on_disk_only(api, mine, wait_until, 20)

        status, job = verify(mine.label, "--tier", "ssd")
        assert (status, job["state"], job["result"]["checked"]) == (0, "done", 20)
        status, job = verify("--tier", "ssd", "--deadline", "0.000001")
        assert (status, job["result"]["complete"]) == (0, False)


def test_a_lower_quota_is_kept_when_pages_have_to_be_written_first(spawn, tmp_path):
    settings = {
        "ssd__directories": tmp_path / "ssd", "ssd__capacity_bytes": "256MiB",
        "ssd__segment_bytes": "16MiB", "ssd__write": "back",
    }  # fmt: skip
    daemon = Daemon(spawn(arguments(tmp_path / "own.sock", **settings), ready=READY))
    with daemon.connect() as store:
        mine, api = Stored(store), Api(daemon)
        keys = mine.put(20)
        path = f"/v1/quotas/{mine.label}"

        job = api.ended(api.send("PUT", path, {"quota_bytes": 5 * PAGE_BYTES})[1])
        assert job["result"] == {"evicted_bytes": 15 * PAGE_BYTES}
        assert mine.space.lookup(keys).tiers == {"host": 5, "ssd": 15}
        with mine.space.get(keys[:3]):
            job = api.ended(api.send("PUT", path, {"quota_bytes": PAGE_BYTES})[1])
        assert job["result"] == {"evicted_bytes": 2 * PAGE_BYTES, "complete": False}, "in use"


def test_a_movement_says_what_is_there_in_the_end(two_tiers, capsys, wait_until):
    def kvstore(*words: str, status: int = 0) -> dict:
        assert main([*words, "--json", "--url", two_tiers.admin]) == status
        return json.loads(capsys.readouterr().out or "{}")

    unknown = "cd" * 32
    with two_tiers.connect() as store:
        mine = Stored(store)
        keys = [key.hex() for key in mine.put(20)]
        head = kvstore("move", mine.label, keys[0], unknown, "--deadline", "0.2")
        assert head["result"] == {"there": 0, "kept": 1, "missing": 1, "complete": False}
        assert (head["done"], head["total"]) == (0, 2), "what follows it is in memory"
        tail = kvstore("move", mine.label, *keys[10:])
        assert tail["result"] == {"there": 10, "kept": 0, "missing": 0}
        back = kvstore("prefetch", mine.label, *keys)
        assert back["result"] == {"there": 20, "kept": 0, "missing": 0}
        with mine.space.get(mine.space.page_keys(range(80))[:20]):
            held = kvstore("move", mine.label, *keys, "--deadline", "0.2")
        assert held["result"] == {"there": 0, "kept": 20, "missing": 0, "complete": False}
        for verb in ("move", "prefetch"):
            kvstore(verb, mine.label, unknown, status=1)


def test_quotas_and_pins_on_the_ssd_are_set_shown_and_kept(two_tiers, capsys, wait_until):
    def kvstore(*words: object) -> dict:
        assert main([*map(str, words), "--json", "--url", two_tiers.admin]) == 0
        return json.loads(capsys.readouterr().out)

    with two_tiers.connect() as store:
        mine, api = Stored(store), Api(two_tiers)
        keys = mine.put(20)
        on_disk_only(api, mine, wait_until, 20)
        record = api.get("/v1/spaces")["spaces"][0]["ssd_bytes"] // 20
        assert record >= PAGE_BYTES

        pin = kvstore("pin", mine.label, keys[11].hex(), "--tier", "ssd")
        assert (pin["tier"], pin["pages"], pin["bytes"]) == ("ssd", 12, 12 * record)
        shown = kvstore("pins")
        assert (shown["pins"][0]["tier"], shown["ssd_used_bytes"]) == ("ssd", 12 * record)
        assert shown["ssd_budget_bytes"] == (256 << 20) // 4
        words = ("quota", mine.label, "--tier", "ssd")
        limits = kvstore(*words, "--quota-bytes", 5 * record, "--reserved-bytes", record)
        (mine_there,) = [one for one in limits["quotas"] if one["tier"] == "ssd"]
        assert mine_there["used_bytes"] == 12 * record, "what is pinned stays"
        assert mine.space.lookup(keys).pages == 12
        assert api.post("/v1/explain", key=keys[15].hex())["verdict"] == "evicted"

        kvstore("unpin", pin["pin"])
        limits = kvstore(*words, "--quota-bytes", 5 * record)
        assert [one["used_bytes"] for one in limits["quotas"]] == [5 * record]
        assert mine.space.lookup(keys).pages == 5
        status, code, field = api.refused(
            "PUT", f"/v1/quotas/{mine.label}", {"tier": "ssd", "reserved_bytes": 1 << 40}
        )
        assert (status, code, field) == (409, "capacity", "reserved_bytes")
        assert b'kvstore_removed_total{cause="quota"} 15.0' in two_tiers.ask("/metrics")


def test_without_an_ssd_tier_nothing_can_be_asked_of_it(api, stored):
    key = stored.put(1)[0].hex()
    for method, path, body in (
        ("POST", "/v1/pins", {"space": stored.label, "key": key, "tier": "ssd"}),
        ("PUT", f"/v1/quotas/{stored.label}", {"quota_bytes": 1, "tier": "ssd"}),
    ):
        assert api.refused(method, path, body) == (409, "tier_unavailable", "tier")


def test_a_job_too_many_is_refused_and_a_limit_that_needs_one_is_not_set(two_tiers):
    with two_tiers.connect() as store:
        mine, api = Stored(store), Api(two_tiers)
        keys = mine.put(2)
        body = {"space": mine.label, "keys": [key.hex() for key in keys], "deadline_s": 3000}
        with mine.space.get(keys):  # in use: they stay, and the jobs wait for them
            jobs = [api.post("/v1/move", **body) for _ in range(RUNNING_MAX)]
            limits = {"quota_bytes": 4 * PAGE_BYTES}

            assert api.refused("POST", "/v1/verify", {})[:2] == (409, "busy")
            assert api.refused("PUT", f"/v1/quotas/{mine.label}", limits)[:2] == (409, "busy")
            assert api.get("/v1/quotas")["quotas"] == []
            for job in jobs:
                assert api.send("DELETE", f"/v1/jobs/{job['job']}")[0] == 200
                ended = api.ended(job)
                assert (ended["state"], ended["result"]["kept"]) == ("cancelled", 2)
        assert api.ended(api.post("/v1/verify"))["state"] == "done"


def test_a_prompt_longer_than_one_question_is_explained(two_tiers):
    with two_tiers.connect() as store:
        mine, api = Stored(store), Api(two_tiers)
        keys = mine.put(1500)
        size = mine.space.identity.page_tokens
        wanted = mine.space.page_keys(range(1600 * size))
        assert wanted[:1500] == keys

        told = api.post("/v1/explain", tokens=list(range(1600 * size)), space=mine.label)

    assert (told["hit_pages"], told["asked_pages"]) == (1500, 1600)
    assert told["key"] == wanted[1500].hex()
    assert told["verdict"] == "never_stored"
