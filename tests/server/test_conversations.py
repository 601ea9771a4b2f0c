"""Goal: operators and engines keep conversations, and see which, for how long, and what is not."""

import re

from kvstore.server import client
from tests.server.conftest import PAGE_BYTES, TIMEOUT_S


def test_a_conversation_is_kept_shown_explained_and_ended(api, stored):
    keys = stored.put(3)

    kept = api.post(
        "/v1/conversations",
        space=stored.label, key=keys[2].hex(), conversation="chat", ttl_s=600,
    )  # fmt: skip

    assert kept == {"conversation": "chat", "pages": 3, "cause": "", "ends_in_s": 600.0}
    listed = api.get("/v1/conversations")
    (row,) = listed["conversations"]
    assert (row["conversation"], row["pages"], row["tier"]) == ("chat", 3, "host")
    assert 590 < row["ends_in_s"] <= 600
    assert row["bytes"] == listed["used_bytes"] == 3 * PAGE_BYTES
    said = api.post("/v1/explain", key=keys[1].hex())
    assert re.search(r"kept for conversation chat \((59\d|600) s left\)$", said["text"])
    page = api.get(f"/v1/pages/{stored.label}/{keys[1].hex()}")
    assert page["pins"] == 1

    for name, pages in (("chat", 3), ("nobody's", 0)):
        ended = api.post("/v1/conversations/end", space=stored.label, conversation=name)
        assert ended["pages"] == pages


def test_an_engine_keeps_a_conversation_and_the_metrics_say_what_is_not_kept(
    api, stored, wait_until
):
    keys = stored.put(3)
    missing = stored.space.page_keys(range(500_000, 500_000 + 4096))[:2]

    stored.space.keep_conversation(keys, "engine's", 60.0, 2 * PAGE_BYTES)
    stored.space.keep_conversation(missing, "nothing", 60.0)

    def pages():
        found = {one["conversation"]: one for one in api.get("/v1/conversations")["conversations"]}
        return [found.get(name, {}).get("pages") for name in ("engine's", "nothing")]

    wait_until(lambda: pages() == [2, None])
    text = client.send(api.url, "GET", "/metrics", timeout_s=TIMEOUT_S)[1].decode()
    assert 'kvstore_not_kept_pages_total{cause="bytes"} 1.0' in text
    assert 'kvstore_not_kept_pages_total{cause="missing"} 2.0' in text
    stored.space.end_conversation("engine's")
    wait_until(lambda: pages()[0] is None)


def test_a_conversation_is_kept_a_day_at_most(api, stored):
    keys = stored.put(1)

    kept = api.post(
        "/v1/conversations",
        space=stored.label, key=keys[0].hex(), conversation="for years", ttl_s=1e8,
    )  # fmt: skip

    assert kept["ends_in_s"] == 86_400
    (row,) = api.get("/v1/conversations")["conversations"]
    assert 86_300 < row["ends_in_s"] <= 86_400
    text = client.send(api.url, "GET", "/metrics", timeout_s=TIMEOUT_S)[1].decode()
    assert "kvstore_shortened_keeps_total 1.0" in text
    assert "kvstore_gave_way_pages_total 0.0" in text
