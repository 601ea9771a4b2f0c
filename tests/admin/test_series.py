"""Goal: whoever meets a series for the first time reads in it what is counted."""

from prometheus_client.parser import text_string_to_metric_families

from tests.client.conftest import READY, Daemon, arguments


def test_every_series_says_what_is_counted(spawn, tmp_path):
    settings = {"ssd__directories": tmp_path / "ssd", "ssd__capacity_bytes": "64MiB",
                "ssd__segment_bytes": "16MiB"}  # fmt: skip
    own = Daemon(spawn(arguments(tmp_path / "own.sock", **settings), ready=READY))

    families = {
        one.name: one for one in text_string_to_metric_families(own.ask("/metrics").decode())
    }
    assert len(families) > 40
    short = [one.name for one in families.values() if len(one.documentation.split()) < 4]
    assert short == []
    capacity = families["kvstore_host_capacity_bytes"]
    assert capacity.samples[0].value == 64 << 20, "nothing is stored"
    assert "in use" not in capacity.documentation
