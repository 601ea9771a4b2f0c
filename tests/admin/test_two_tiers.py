"""Goal: with an SSD tier the admin API says which tier a page is in, and acts on both."""

import pytest

from tests.admin.conftest import PAGE_BYTES, Api, Stored
from tests.client.conftest import READY, Daemon, arguments


@pytest.fixture
def two_tiers(spawn, tmp_path):
    config = tmp_path / "server.toml"
    config.write_text(
        f'[ssd]\ndirectories = ["{tmp_path / "ssd"}"]\ncapacity_bytes = "256MiB"\n'
        'segment_bytes = "16MiB"\nwrite = "through"\nadmission = "all"\n'
    )
    return Daemon(spawn([*arguments(tmp_path / "own.sock"), "--config", str(config)], ready=READY))


def test_pages_on_disk_are_shown_explained_limited_and_cleared(two_tiers, wait_until):
    with two_tiers.connect() as store:
        mine, api = Stored(store), Api(two_tiers)
        keys = mine.put(20)
        listing = f"/v1/pages?space={mine.label}"
        wait_until(lambda: len(api.get(f"{listing}&tier=ssd")["pages"]) == 20)
        assert [tier["tier"] for tier in api.get("/v1/tiers")["tiers"]] == ["host", "ssd"]

        limits = {"quota_bytes": 5 * PAGE_BYTES}
        assert api.ended(api.send("PUT", f"/v1/quotas/{mine.label}", limits)[1])["state"] == "done"
        last = api.post("/v1/explain", key=keys[19].hex())
        assert (last["verdict"], last["shards"]) == ("hit", {"0": ["ssd"]})
        assert len(api.get(f"{listing}&tier=host")["pages"]) == 5
        assert api.ended(api.post("/v1/verify"))["result"]["checked"] == 5

        assert api.ended(api.post("/v1/clear", space=mine.label))["result"]["dropped"] == 20
        assert api.get(listing)["pages"] == []
        assert api.post("/v1/explain", key=keys[19].hex())["verdict"] == "cleared"
