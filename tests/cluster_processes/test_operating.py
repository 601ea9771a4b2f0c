"""Goal: an operator sees what each node has of the others, where a page is, and what went wrong."""

import json

import pytest

from kvstore.cli import main
from kvstore.server import client
from tests.cluster_processes.conftest import ClusterNode, ClusterScene, fetch
from tests.conftest import wait_for
from tests.faults import content

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]
WAIT_S = 30.0


def asked(node: ClusterNode, method: str, path: str, **body: object) -> dict[str, object]:
    """The answer of the admin API of a node."""
    data = json.dumps(body).encode() if body else None
    admin = node.process.ready.group(2)
    status, text = client.send(admin, method, path, body=data, timeout_s=WAIT_S)
    assert status == 200, text
    found: dict[str, object] = json.loads(text)
    return found


def of(node: ClusterNode, other: ClusterNode) -> dict[str, object]:
    """The row of another node."""
    rows = asked(node, "GET", "/v1/nodes")["nodes"]
    assert isinstance(rows, list)
    (row,) = [one for one in rows if one["name"] == other.name]
    return dict(row)


def test_what_was_read_of_a_node_and_where_a_page_is_is_shown_until_that_node_ends(
    scene: ClusterScene, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = scene.start("a", "b")
    keys = content.keys(1, 6)
    assert scene.space(a).put(keys, content.pages(1, 6)).stored == 6
    there = scene.space(b)
    b.knows(a, 6)
    last = keys[5].hex()

    explained = asked(b, "POST", "/v1/explain", key=last)
    assert explained["verdict"] == "never_stored"
    assert explained["peers"] == {"a": [0]}
    assert fetch(there, keys) == 6
    explained = asked(b, "POST", "/v1/explain", key=last)
    assert (explained["verdict"], explained["read_from"]) == ("hit", "a")

    row = of(b, a)
    assert (row["state"], row["transport"], row["current"]) == ("up", "tcp", True)
    assert row["indexed_pages"] == {"CPU": 6}
    assert row["fetched_pages"] == 6
    assert row["fetched_bytes"] == sum(len(one) for one in content.pages(1, 6))
    assert row["bytes_per_s"]
    assert of(a, b)["reads_here"]
    assert asked(b, "GET", "/readyz")["cluster"] == "joined"

    a.process.kill()
    assert wait_for(lambda: of(b, a)["state"] == "down", WAIT_S)
    fault = of(b, a)["fault"]
    assert isinstance(fault, dict)
    assert fault["cause"] in ("closed", "unreachable")
    ready = asked(b, "GET", "/readyz")
    assert (ready["status"], ready["cluster"]) == ("ready", "alone"), "it serves its own pages"
    assert asked(b, "POST", "/v1/explain", key=last)["verdict"] == "hit"

    admin = b.process.ready.group(2)
    assert main(["nodes", "--url", admin]) == 0
    told = capsys.readouterr().out
    assert "no other node has a session with it" in told
    assert f"a: {fault['cause']}" in told or "a: unreachable" in told
    log = b.process.stderr
    assert log.count("node up peer=a") == 1
    assert log.count("node down peer=a") == 1
