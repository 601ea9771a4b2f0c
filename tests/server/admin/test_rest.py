"""Goal: what an operator asks over HTTP is answered truly, and what is wrong has a stable code."""

import json

import msgspec
import pytest

from kvstore.config import HttpConfig, ServerConfig, load
from kvstore.protocol import counts
from kvstore.protocol.errors import ConfigError
from kvstore.server import answers, client
from kvstore.server.admin.routes import BODY_BYTES_MAX, PROMPT_BYTES_MAX, ROUTES
from kvstore.server.auth import tokens_of
from tests.client.conftest import READY, Daemon, arguments
from tests.server.conftest import PAGE_BYTES, TIMEOUT_S, Api, Stored, flip_a_byte

UNKNOWN = "ab" * 32
READ, OPERATE = "r" * 20, "o" * 20

# Looking


def test_a_space_is_shown_with_what_it_is_of(api, stored):
    stored.put(3)
    every = api.get("/v1/spaces?limit=1000")["spaces"]

    (mine,) = [one for one in every if one["space"] == stored.label]

    assert (mine["pages"], mine["host_bytes"]) == (3, 3 * PAGE_BYTES)
    assert mine["model"] == stored.space.identity.model
    assert mine["shards"][0]["heads"] == [0, 2]


def test_spaces_are_listed_a_stretch_at_a_time(api, stored):
    first = api.get("/v1/spaces?limit=1")
    assert len(first["spaces"]) == 1
    assert first["next"] in (1, None)
    assert api.get("/v1/spaces?cursor=100000")["spaces"] == []


def test_one_page_says_where_since_when_and_how_often(api, stored):
    keys = stored.put(3)
    with stored.space.get(keys[:2]) as views:
        assert len(views) == 2

    page = api.get(f"/v1/pages/{stored.label}/{keys[1].hex()}")

    assert (page["tier"], page["parent"], page["depth"]) == ("host", keys[0].hex(), 2)
    assert page["first_children"] == [keys[2].hex()]
    assert page["hits"] >= 1
    assert 0 <= page["used_s_ago"] <= page["stored_s_ago"] < 60
    assert len(page["shards"]["0"]["digest"]) == 32
    assert api.refused("GET", f"/v1/pages/{stored.label}/{UNKNOWN}")[:2] == (404, "not_found")


def test_pages_are_filtered_by_hits_age_tier_and_prefix(api, stored):
    keys = stored.put(4)
    stored.space.get(keys[:2]).close()
    listing = f"/v1/pages?space={stored.label}"

    def shown(query: str) -> set[str]:
        return {row["key"] for row in api.get(listing + query)["pages"]}

    every = {key.hex() for key in keys}
    assert shown("&hits_min=1") == {keys[1].hex()}
    assert shown("&hits_max=0") == every - {keys[1].hex()}
    assert shown("&tier=host&age_max_s=60") == every
    assert shown("&tier=ssd") == shown("&age_min_s=3600") == set()
    assert shown(f"&prefix={keys[2].hex()}") == {keys[2].hex(), keys[3].hex()}


def test_a_listing_shows_each_page_once_while_others_come_and_go(api, stored):
    stay = [key.hex() for key in stored.put(30)]
    leaving = stored.put(20, start=10_000)
    seen, cursor, stretches = [], "0", 0
    while cursor is not None:
        answer = api.get(f"/v1/pages?space={stored.label}&limit=7&cursor={cursor}")
        seen += [row["key"] for row in answer["pages"]]
        cursor, stretches = answer["next"], stretches + 1
        stored.put(1, start=20_000 + 100 * stretches)
        if stretches == 2:
            api.ended(api.post("/v1/evict", space=stored.label, key=leaving[0].hex()))

    assert len(seen) == len(set(seen))
    assert set(stay) <= set(seen)
    assert not {key.hex() for key in leaving} & set(seen)
    assert stretches >= 5


def test_a_tree_is_shown_heads_first_and_by_depth(api, stored):
    keys = stored.put(5)
    tree = f"/v1/tree?space={stored.label}"

    first = api.get(f"{tree}&limit=2")
    rest = api.get(f"{tree}&limit=100&cursor={first['next']}")

    rows = first["pages"] + rest["pages"]
    assert [row["key"] for row in rows] == [key.hex() for key in keys]
    assert [row["depth"] for row in rows] == [1, 2, 3, 4, 5]
    assert rest["next"] is None
    assert len(api.get(f"{tree}&depth=3")["pages"]) == 3
    assert len(api.get(f"{tree}&key={keys[3].hex()}&depth=1")["pages"]) == 2


def test_sessions_show_what_they_hold(api, daemon):
    with daemon.connect(name="holder") as store:
        mine = Stored(store)
        keys = mine.put(2)
        with mine.space.get(keys):
            (session,) = [
                one for one in api.get("/v1/sessions")["sessions"] if one["name"] == "holder"
            ]
            assert session["used_bytes"] > 0
            assert sum(process["leases"] for process in session["processes"]) == 1


def test_tiers_and_the_policy_are_shown_and_unknown_policies_refused(api):
    (host,) = api.get("/v1/tiers")["tiers"]
    assert (host["tier"], host["capacity_bytes"]) == ("host", 64 << 20)
    shown = api.get("/v1/policy")
    assert shown["name"] == "lru"
    assert {"lru", "lfu", "s3-fifo", "tinylfu", "kvstore"} == set(shown["known"])
    status, changed = api.send("PUT", "/v1/policy", {"name": "kvstore"})
    assert (status, changed["name"], changed["previous"]) == (200, "kvstore", "lru")
    assert changed["configured"] == "lru"
    assert api.send("PUT", "/v1/policy", {"name": "lru"})[0] == 200
    assert api.refused("PUT", "/v1/policy", {"name": "x"}) == (400, "invalid_argument", "name")


def test_the_configuration_says_where_each_value_is_from(api):
    values = {one["key"]: one for one in api.get("/v1/config")["values"]}

    assert values["host.capacity_bytes"]["source"] == "--set host.capacity_bytes"
    assert values["host.lease_s_max"]["source"] == "default"


def test_all_routes_are_described_with_the_types_of_their_answers(api):
    described = api.get("/openapi.json")

    schemas = described["components"]["schemas"]
    for route in ROUTES:
        path = route.path.replace(":number", "")
        shown = described["paths"][path][route.method.lower()]
        assert shown["description"], path
        refused = shown["responses"]["default"]["content"]["application/json"]["schema"]
        assert refused["$ref"].endswith("/ErrorAnswer"), path
        assert ("security" in shown) == (route.role is not None), path
        if route.gives is not None:
            given = shown["responses"][str(route.status)]["content"]["application/json"]["schema"]
            assert schemas[given["$ref"].rpartition("/")[2]]["properties"], path
    assert described["components"]["securitySchemes"]["bearer"]["scheme"] == "bearer"
    (asked,) = [
        one for one in described["paths"]["/v1/pages/{space}/{key}"]["get"]["parameters"]
        if one["name"] == "key"
    ]  # fmt: skip
    assert (asked["in"], asked["required"]) == ("path", True)
    body = described["paths"]["/v1/quotas/{space}"]["put"]["requestBody"]
    fields = body["content"]["application/json"]["schema"]["properties"]
    assert fields.keys() == {"quota_bytes", "reserved_bytes", "tier"}


def names(value: object, within: str = "") -> set[str]:
    """The names of an object's fields, those of nested objects under dotted names."""
    if isinstance(value, list):
        return {name for one in value for name in names(one, within)}
    if not isinstance(value, dict):
        return set()
    every = {f"{within}{name}" for name in value}
    return every | {part for name, one in value.items() for part in names(one, f"{within}{name}.")}


COUNTED = {
    "/v1/stats": counts.NodeStats, "/v1/tiers": counts.TierList, "/v1/policy": answers.Policy,
    "/readyz": answers.Readiness,
}  # fmt: skip


@pytest.mark.parametrize("tiers", [1, 2])
def test_what_is_counted_is_all_described(own_daemon_with, tmp_path, tiers):
    ssd = {"ssd__directories": tmp_path / "ssd", "ssd__capacity_bytes": "256MiB",
           "ssd__segment_bytes": "16MiB"}  # fmt: skip
    daemon = own_daemon_with(**(ssd if tiers == 2 else {}))
    with daemon.connect(name="counted") as store:
        Stored(store).put(3)
        found = {path: Api(daemon).get(path) for path in COUNTED}
        over_the_socket = store.stats()

    for path, kind in COUNTED.items():
        again = msgspec.to_builtins(msgspec.convert(found[path], kind))
        assert names(found[path]) <= names(again), f"{path} has what its type does not know"
    assert names(over_the_socket) == names(found["/v1/stats"])


# Changing


def test_pins_are_made_shown_and_ended(api, stored):
    keys = stored.put(3)
    made = api.post("/v1/pins", space=stored.label, key=keys[1].hex(), ttl_s=60)
    assert made["pages"] == 2
    (pin,) = [one for one in api.get("/v1/pins")["pins"] if one["pin"] == made["pin"]]
    assert 0 < pin["ends_in_s"] <= 60

    job = api.ended(api.post("/v1/evict", space=stored.label))
    assert job["result"] == {"dropped": 1, "kept": 2, "pinned": 2, "durable": True}
    assert api.send("DELETE", f"/v1/pins/{made['pin']}")[0] == 200
    assert api.refused("DELETE", f"/v1/pins/{made['pin']}") == (404, "not_found", "pin")
    assert api.ended(api.post("/v1/clear", space=stored.label[:12]))["result"]["dropped"] == 2
    assert stored.space.lookup(keys).pages == 0


def test_a_pin_beyond_the_budget_is_refused(own_daemon_with):
    daemon = own_daemon_with(admin__pin_budget_bytes=4096)
    with daemon.connect() as store:
        mine, api = Stored(store), Api(daemon)
        keys = mine.put(2)
        body = {"space": mine.label, "key": keys[1].hex()}
        assert api.refused("POST", "/v1/pins", body)[:2] == (409, "capacity")


def test_what_was_cleared_or_taken_out_is_explained(api, stored):
    keys = stored.put(4)
    api.ended(api.post("/v1/evict", space=stored.label, key=keys[2].hex()))

    answer = api.post("/v1/explain", space=stored.label, tokens=list(range(16)))
    assert (answer["verdict"], answer["hit_pages"], answer["asked_pages"]) == ("operator", 2, 4)

    api.ended(api.post("/v1/clear", space=stored.label))
    assert api.post("/v1/explain", key=keys[0].hex(), space=stored.label)["verdict"] == "cleared"
    assert api.post("/v1/explain", key=UNKNOWN)["verdict"] == "never_stored"


def test_a_space_with_a_quota_stays_within_it(api, stored):
    keys = stored.put(6)
    status, job = api.send("PUT", f"/v1/quotas/{stored.label}", {"quota_bytes": 4 * PAGE_BYTES})
    assert status == 202
    assert api.ended(job)["result"]["evicted_bytes"] == 2 * PAGE_BYTES
    assert stored.space.lookup(keys).pages == 4

    stored.put(3, start=50_000)
    (mine,) = [one for one in api.get("/v1/quotas")["quotas"] if one["space"] == stored.label]
    assert mine["used_bytes"] == mine["quota_bytes"] == 4 * PAGE_BYTES
    reserved = {"quota_bytes": 4 * PAGE_BYTES, "reserved_bytes": PAGE_BYTES}
    api.ended(api.send("PUT", f"/v1/quotas/{stored.label}", reserved)[1])
    api.ended(api.send("PUT", f"/v1/quotas/{stored.label}", {"quota_bytes": 4 * PAGE_BYTES})[1])
    (mine,) = [one for one in api.get("/v1/quotas")["quotas"] if one["space"] == stored.label]
    assert mine["reserved_bytes"] == 0, "a PUT replaces both"
    wrong = {"quota_bytes": 1, "reserved_bytes": 2}
    assert api.refused("PUT", f"/v1/quotas/{stored.label}", wrong)[1:] == (
        "invalid_argument", "reserved_bytes",
    )  # fmt: skip
    api.ended(api.send("PUT", f"/v1/quotas/{stored.label}", {})[1])
    assert stored.label not in {one["space"] for one in api.get("/v1/quotas")["quotas"]}


def test_verify_finds_a_flipped_byte_and_explain_says_quarantined(api, daemon, stored):
    keys = stored.put(5)
    flip_a_byte(daemon, stored.content(5)[3].tobytes())

    job = api.ended(api.post("/v1/verify", space=stored.label))

    assert job["state"] == "done"
    assert job["result"] == {"checked": 5, "corrupt": 1, "unreadable": 0, "skipped": 0}
    assert (job["done"], job["total"]) == (5, 5)
    assert stored.space.lookup(keys).pages == 3
    assert (
        api.post("/v1/explain", key=keys[3].hex(), space=stored.label)["verdict"] == "quarantined"
    )
    after = api.post("/v1/explain", key=keys[4].hex(), space=stored.label)
    assert (after["verdict"], after["head"]["verdict"]) == ("head_missing", "quarantined")
    assert api.get("/v1/stats")["counts"]["removed_corrupt"] >= 2
    assert api.get("/v1/stats")["host"]["pinned_bytes"] == 0


def test_verify_passes_what_is_whole_and_does_not_consume_what_is_read_once(api, stored):
    keys = stored.put(3)
    stored.put(1, start=90_000, read_once=True)

    page = api.ended(api.post("/v1/verify", space=stored.label, key=keys[0].hex()))
    space = api.ended(api.post("/v1/verify", space=stored.label))
    tier = api.ended(api.post("/v1/verify"))

    whole = {"corrupt": 0, "unreadable": 0}
    assert page["result"] == {"checked": 1, **whole, "skipped": 0}
    assert space["result"] == {"checked": 3, **whole, "skipped": 1}
    assert tier["result"]["checked"] >= 3
    assert tier["result"]["corrupt"] == 0
    assert stored.space.lookup(keys).pages == 3


def test_jobs_are_remembered_and_unknown_ones_are_not_found(api, stored):
    job = api.ended(api.post("/v1/verify", space=stored.label))

    assert job["job"] in {one["job"] for one in api.get("/v1/jobs")["jobs"]}
    assert api.send("DELETE", f"/v1/jobs/{job['job']}")[1]["state"] == "done"
    assert api.refused("GET", "/v1/jobs/999999") == (404, "not_found", "job")


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("POST", "/v1/prefetch", {"space": "@", "keys": [UNKNOWN]}, (409, "tier_unavailable", "")),
        ("POST", "/v1/move", {"space": "@", "keys": [UNKNOWN]}, (409, "tier_unavailable", "")),
        ("POST", "/v1/verify", {"tier": "ssd"}, (409, "tier_unavailable", "tier")),
        ("POST", "/v1/verify", {"key": UNKNOWN}, (400, "invalid_argument", "space")),
        ("POST", "/v1/evict", {"space": "@", "key": UNKNOWN}, (404, "not_found", "key")),
        ("POST", "/v1/evict", {"space": "@", "key": "zz"}, (400, "invalid_argument", "key")),
        ("POST", "/v1/evict", {"space": "nowhere"}, (404, "not_found", "space")),
        ("POST", "/v1/evict", {"spaces": "@"}, (422, "invalid_argument", "spaces")),
        ("POST", "/v1/evict", {}, (422, "invalid_argument", "space")),
        ("PUT", "/v1/quotas/@", {"space": "@"}, (422, "invalid_argument", "space")),
        ("PUT", "/v1/quotas/@", {"quota_bytes": 1 << 80}, (422, "invalid_argument", "quota_bytes")),
        ("POST", "/v1/move", {"space": "@", "keys": ["a", 1]}, (422, "invalid_argument", "keys.1")),
        ("GET", "/v1/pages?space=@&hit_min=1", None, (422, "invalid_argument", "hit_min")),
        ("POST", "/v1/clear", {}, (400, "invalid_argument", "space")),
        ("POST", "/v1/pins", {"space": "@", "key": UNKNOWN}, (404, "not_found", "key")),
        ("POST", "/v1/explain", {}, (400, "invalid_argument", "key")),
        ("POST", "/v1/explain", {"key": UNKNOWN, "shard": 0}, (400, "invalid_argument", "shard")),
        ("POST", "/v1/explain", {"tokens": [1]}, (400, "invalid_argument", "tokens")),
        ("POST", "/v1/explain", {"tokens": [-1] * 9}, (400, "invalid_argument", "tokens")),
        ("GET", "/v1/tree?space=@&cursor=00", None, (400, "invalid_argument", "cursor")),
        ("GET", f"/v1/tree?space=@&key={UNKNOWN}", None, (404, "not_found", "key")),
        ("GET", f"/v1/pages?space=@&prefix={UNKNOWN}", None, (404, "not_found", "prefix")),
        ("GET", "/v1/pages?space=@&tier=disk", None, (422, "invalid_argument", "tier")),
        ("GET", "/v1/pages?space=@&age_min_s=nan", None, (422, "invalid_argument", "age_min_s")),
        ("POST", "/v1/explain", None, (422, "invalid_argument", "")),
        ("GET", "/v1/nothing", None, (404, "not_found", "")),
        ("PATCH", "/v1/stats", None, (405, "method_not_allowed", "")),
    ],
)
def test_what_is_wrong_has_a_stable_code_and_names_the_field(
    api, stored, method, path, body, expected
):
    if body is not None and body.get("space") == "@":
        body = {**body, "space": stored.label}

    assert api.refused(method, path.replace("@", stored.label), body) == expected


def raw(api: Api, body: bytes, path: str = "/v1/explain", **headers: str) -> tuple[int, dict]:
    """The answer to what is sent as it is."""
    status, answer = client.send(
        api.url, "POST", path, body=body, headers={**api.headers, **headers}, timeout_s=TIMEOUT_S
    )
    return status, json.loads(answer)["error"]


@pytest.mark.parametrize(
    ("path", "body", "status", "heard"),
    [
        ("/v1/explain", b"{", 422, "not JSON"), ("/v1/explain", b"\xff", 422, "not JSON"),
        ("/v1/explain", b"[" * 100_000, 422, "body"), ("/v1/explain", b'"key"', 422, "an object"),
        ("/v1/evict", b'{"space": "\\ud800"}', 422, "not JSON"),
        ("/v1/evict", b"", 422, "the body is empty: send a JSON object"),
        ("/v1/evict", b"[]", 422, "got `array`: send a JSON object"),
        ("/v1/explain", b" " * (PROMPT_BYTES_MAX + 1), 413, "at most"),
        ("/v1/evict", b" " * (BODY_BYTES_MAX + 1), 413, "at most"),
    ],
)  # fmt: skip
def test_a_body_that_is_none_is_said(api, path, body, status, heard):
    told = raw(api, body, path)

    assert told[0] == status
    assert heard.replace("an object", "JSON object") in told[1]["message"]
    assert told[1]["code"] == ("too_large" if status == 413 else "invalid_argument")
    assert told[1]["field"] == ""
    assert "Content-Type" not in told[1]["message"], "it was not the cause"


# Tokens


@pytest.fixture
def own_daemon_with(spawn, tmp_path):
    """``own_daemon_with(section__key=value)``: a daemon configured so."""
    return lambda **settings: Daemon(
        spawn(arguments(tmp_path / "own.sock", **settings), ready=READY)
    )


def test_a_role_may_do_what_it_may_and_no_more(own_daemon_with, tmp_path):
    secret = tmp_path / "operate"
    secret.write_text(OPERATE + "\n")
    daemon = own_daemon_with(http__read_token=READ, http__operate_token_file=secret)
    nobody, stranger = Api(daemon, ""), Api(daemon, "x" * 20)
    reader, operator = Api(daemon, READ), Api(daemon, OPERATE)

    assert nobody.get("/healthz") == {"status": "ok"}
    assert nobody.get("/openapi.json")["paths"]
    assert nobody.get("/readyz")["status"] == "ready"
    for who in (nobody, stranger):
        for method, path in (
            ("GET", "/v1/stats"), ("GET", "/metrics"), ("GET", "/v1/config"), ("GET", "/v1/jobs"),
            ("POST", "/v1/explain"), ("POST", "/v1/clear"), ("DELETE", "/v1/pins/1"),
            ("PUT", "/v1/policy"),
        ):  # fmt: skip
            assert who.refused(method, path)[:2] == (401, "unauthorized"), path
    assert reader.get("/v1/stats")["node"] == "local"
    assert reader.refused("POST", "/v1/clear", {"all": True})[:2] == (403, "forbidden")
    assert reader.refused("PUT", "/v1/policy", {"name": "lru"})[:2] == (403, "forbidden")
    for who, status in ((nobody, 401), (stranger, 401), (reader, 403)):
        assert raw(who, b"{", "/v1/clear")[0] == status, "asked before it is read"
    assert operator.get("/v1/stats")["node"] == "local"
    assert operator.ended(operator.post("/v1/clear", all=True))["state"] == "done"
    values = {one["key"]: one["value"] for one in reader.get("/v1/config")["values"]}
    assert values["http.read_token"] == "***"
    assert READ not in str(values)


def test_without_a_token_only_loopback_is_served(tmp_path):
    for address in ("0.0.0.0", "10.0.0.1", "::"):
        with pytest.raises(ConfigError, match=r"http\.operate_token"):
            load(ServerConfig, None, {}, [f"http.host={address}"])

    assert load(ServerConfig, None, {}, ["http.host=0.0.0.0", f"http.read_token={READ}"])


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        ({"read_token": READ, "operate_token": READ}, "equal"),
        ({"read_token": "ü" * 20}, "http.read_token"), ({"operate_token": "a\n" * 20}, "ASCII"),
    ],
)  # fmt: skip
def test_tokens_that_could_not_work_are_refused(tokens, said):
    with pytest.raises(ConfigError, match=said):
        tokens_of(HttpConfig(**tokens))


@pytest.mark.parametrize("setting", ["http.read_token=short", "http.operate_token_file=/nowhere/x"])
def test_a_token_that_is_none_ends_the_start(spawn, tmp_path, setting):
    process = spawn([*arguments(tmp_path / "own.sock"), "--set", setting])

    assert process.wait() == 2
    assert setting.partition("=")[0] in process.stderr


def test_a_daemon_ends_at_once_while_a_job_runs(own_daemon_with):
    daemon = own_daemon_with(host__capacity_bytes="256MiB")
    with daemon.connect() as store:
        Stored(store).put(2000)
        Api(daemon).post("/v1/verify")

    assert daemon.process.stop() == 0
