"""Goal: the dashboard and the alerts ask for what nodes and Conductors export, and rightly."""

import asyncio
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from conductor.front import metrics
from kvstore.config import ServerConfig, load, values
from kvstore.events.publisher import EventPublisher, StoredEvent
from tests.client.conftest import (
    FLAT,
    READY,
    Daemon,
    arguments,
    content,
    identity,
    new_keys,
    open_space,
)
from tests.conductor.fake_nodes import FakeNode, beside
from tests.conductor.fakes import FakeEngine, serving
from tests.conductor.protocols.test_push import PUSHED, decode, later, prefill
from tests.conftest import ROOT, Process
from tests.deploy.promql import Selector, grouping, selectors
from tests.loops import eventually

DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana.json").read_text())
GROUPS = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
RULES = [rule for group in GROUPS for rule in group["rules"]]
PANELS = [one for one in DASHBOARD["panels"] if one["type"] != "row"]
OF_TARGETS = {"job", "instance"}
"""Labels that Prometheus adds."""
OF_COUNTERS = {"rate", "increase", "irate"}
OF_GAUGES = {"changes", "delta", "deriv", "max_over_time", "min_over_time", "avg_over_time"}
CONDUCTOR = "kvstore_conductor_"


@dataclass
class Series:
    """Series of one name: their type, and the values of each label."""

    kind: str
    samples: int = 0
    labels: dict[str, set[str]] = field(default_factory=dict)


def series_of(text: str) -> dict[str, Series]:
    """What an exposition has, by the names of its samples."""
    found: dict[str, Series] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            one = found.setdefault(sample.name, Series(family.type))
            one.samples += 1
            for name, value in sample.labels.items():
                one.labels.setdefault(name, set()).add(value)
    return found


@pytest.fixture(scope="module")
def node_series(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Series]]:
    """Of a node with both tiers and a peer that is not there, after a little traffic; and of
    one with a directory that is not there."""
    folder = tmp_path_factory.mktemp("node")
    cluster = {"cluster__name": "blue", "cluster__listen": "127.0.0.1:0",
               "cluster__transfer_listen": "127.0.0.1:0"}  # fmt: skip
    settings = {"ssd__directories": folder / "ssd", "ssd__capacity_bytes": "64MiB",
                "ssd__segment_bytes": "16MiB", **cluster,
                "cluster__nodes": '["other=127.0.0.1:1"]'}  # fmt: skip
    other = {"cluster__directory": "redis", "redis__endpoints": "127.0.0.1:1", **cluster}
    environ = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with_directory = Process(arguments(folder / "b.sock", **other), environ, folder / "other")
    process = Process(arguments(folder / "kv.sock", **settings), environ, folder / "daemon")
    try:
        with_directory.wait_ready(READY, 30.0)
        process.wait_ready(READY, 30.0)
        of_other = series_of(Daemon(with_directory).ask("/metrics").decode())
        daemon = Daemon(process)
        with daemon.connect() as store:
            space = open_space(store, model='a "model"\n\\')
            keys = new_keys(space, 3)
            space.put(keys, content(3, FLAT.page_bytes(identity())))
            space.lookup(keys)
        yield of_other | series_of(daemon.ask("/metrics").decode())
    finally:
        for one in (process, with_directory):
            assert one.stop() == 0, one.report()


@pytest.fixture(scope="module")
def conductor_series(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Series]:
    """Of a Conductor after requests that went well and that did not."""
    trace = {"trace_file": str(tmp_path_factory.mktemp("traced") / "trace.jsonl")}

    async def scraped() -> str:
        with EventPublisher("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", topic=b"x@a@m") as events:
            a, node = FakeEngine("a", "mixed", events=events.bound_endpoint), FakeNode("n")
            p, d = prefill(), decode()
            p.report = d.report = PUSHED
            a.metrics = "vllm:num_requests_running 3\nvllm:num_requests_waiting 1\n"
            async with beside(node), serving(a, decisions=trace) as client:
                assert (await client.operate("/v1/nodes", {"url": node.url}))[0] == 201
                await eventually(lambda: client.is_current("engine/a"))
                await eventually(
                    lambda: client.conductor.queue.dispatcher.loads.others.reported("a")
                )
                key = b"k" * 32
                stored = StoredEvent(
                    block_hashes=[key], parent_block_hash=None, token_ids=[], block_size=4,
                    medium="GPU", space="ab" * 32, shard=0,
                )  # fmt: skip
                events.publish([stored])
                await eventually(lambda: client.entries == 1)
                assert (await client.complete("a prompt"))[0] == 200
                a.broken = "reset"
                assert (await client.complete("a prompt"))[0] >= 500
                a.broken = "midway"
                await client.complete("a prompt", stream=True)
                follower = client.followed("engine/a")
                assert follower is not None
                follower.faults.note("frames", "none")
                a.broken = "reset"
                async with later(client, p, d):
                    assert (await client.complete("a prompt"))[0] == 200
                return (await client.get("/metrics"))[1]

    series = series_of(asyncio.run(scraped()))
    for name in (
        "advice_rate", "advice_short", "advice_gain", "admission_load", "ttft_error", "engine_lent",
        "local_tokenizer",
    ):  # fmt: skip
        # They need minutes of load, or a setting; tests/conductor has both.
        labels = {label: set[str]() for label in metrics._GAUGES[name][1]}
        series.setdefault(CONDUCTOR + name, Series("gauge", 0, labels))
    for name in ("admission", "lendings"):
        labels = {label: set[str]() for label in metrics._COUNTS[name][1]}
        series.setdefault(CONDUCTOR + f"{name}_total", Series("counter", 0, labels))
    return series


@pytest.fixture(scope="module")
def exported(
    node_series: dict[str, Series], conductor_series: dict[str, Series]
) -> dict[str, Series]:
    return {**conductor_series, **node_series, "up": Series("gauge", 1)}


def expressions() -> list[tuple[str, str, str]]:
    """Where each expression is, the expression, and the words that are made of its labels."""
    panels = [
        (f"panel {panel['title']}", target["expr"], target["legendFormat"])
        for panel in PANELS
        for target in panel["targets"]
    ]
    rules = [
        (f"alert {rule['alert']}", rule["expr"], " ".join(rule["annotations"].values()))
        for rule in RULES
    ]
    return [*panels, *rules]


ALL = expressions()


def faults_of(selector: Selector, exported: dict[str, Series]) -> Iterator[str]:
    """What is wrong with a selector."""
    name, series = selector.name, exported.get(selector.name)
    if series is None:
        yield f"{name} is not exported"
        return
    for label, operator, value in selector.matchers:
        if label in OF_TARGETS:
            continue
        if label not in series.labels:
            yield f"{name} has no label {label}"
            continue
        wanted = value.split("|") if operator in ("=~", "!~") else [value]
        for one in set(wanted) - series.labels[label]:
            yield f"{label} of {name} is never {one}"
    counts = series.kind == "counter" or (series.kind == "histogram")
    if counts and not (selector.ranged and selector.function in OF_COUNTERS):
        yield f"{name} is a counter, and is taken as it is"
    if not counts and selector.ranged and selector.function not in OF_GAUGES:
        yield f"{selector.function}({name}): {name} is a gauge"
    if selector.quantile != name.endswith("_bucket"):
        yield f"histogram_quantile takes buckets, and nothing else does: {name}"


def labels_of(expression: str, exported: dict[str, Series]) -> set[str]:
    """Labels that a result may have."""
    return OF_TARGETS | {
        label for one in selectors(expression) for label in exported[one.name].labels
    }


def test_every_expression_asks_for_what_is_exported_and_as_what_it_is(exported):
    faults = [
        f"{where}: {fault}"
        for where, expression, _ in ALL
        for selector in selectors(expression)
        for fault in faults_of(selector, exported)
    ]
    assert faults == []
    assert len(ALL) > 90


def test_every_expression_has_a_selector_and_quantiles_keep_the_buckets():
    for where, expression, _ in ALL:
        assert list(selectors(expression)), where
        assert ("le" in grouping(expression)) == ("histogram_quantile" in expression), where


def test_what_is_grouped_by_and_what_is_told_are_labels_of_the_series(exported):
    for where, expression, words in ALL:
        known = labels_of(expression, exported)
        told = set(re.findall(r"\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}", words))
        assert grouping(expression) <= known, where
        assert told <= known, where
        groups = re.findall(r"\bby \(([^)]*)\)", expression)
        if groups and "{{" in words:
            every = {label for group in groups for label in re.findall(r"\w+", group)}
            assert told <= every, f"{where}: what is told is not grouped by"


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("rate(kvstore_no_such_total[5m])", "is not exported"),
        ("kvstore_refused_total > 0", "is a counter"),
        ("rate(kvstore_pages[5m])", "is a gauge"),
        ('rate(kvstore_removed_total{kind="corrupt"}[5m])', "has no label kind"),
        ('rate(kvstore_removed_total{cause=~"corrupt|rotten"}[5m])', "is never rotten"),
        ("histogram_quantile(0.5, rate(kvstore_put_seconds_sum[5m]))", "takes buckets"),
        ("rate(kvstore_put_seconds_bucket[5m])", "takes buckets"),
        ("sum by (le) (kvstore_put_seconds_bucket)", "taken as it is"),
    ],
)
def test_expressions_that_are_wrong_are_found(exported, expression, fault):
    found = [text for one in selectors(expression) for text in faults_of(one, exported)]
    assert any(fault in text for text in found), found


def test_names_of_models_that_clients_choose_do_not_break_the_text(node_series):
    found = node_series["kvstore_lookup_tier_pages_total"].labels
    assert found["model"] == {'a "model"\n\\'}
    assert found["tier"] == {"host", "ssd", "miss"}


def test_counters_and_only_counters_are_named_total(exported):
    for name, series in exported.items():
        assert name.endswith("_total") == (series.kind == "counter"), name
        assert not name.endswith("_created")


# The files


def test_every_alert_says_how_bad_it_is_what_it_is_and_what_to_do():
    names = [rule["alert"] for rule in RULES]
    assert len(names) == len(set(names)) > 25
    for rule in RULES:
        assert rule["labels"].keys() == {"severity"}, rule
        assert rule["labels"]["severity"] in ("critical", "warning"), rule
        assert rule["annotations"].keys() == {"summary", "description"}
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"], rule["alert"]
        assert len(rule["annotations"]["description"].split()) > 10, rule["alert"]
        assert re.fullmatch(r"\d+[mh]", rule.get("for", "1m")), rule["alert"]


def test_settings_and_commands_that_alerts_name_exist():
    known = {one["key"] for one in values(load(ServerConfig, None, {}))}
    named = {
        key
        for rule in RULES
        for key in re.findall(r"`(\w+\.\w+)`", rule["annotations"]["description"])
    }
    assert named <= known, named - known
    assert len(named) > 4


def test_the_dashboard_can_be_imported():
    variables = {one["name"]: one for one in DASHBOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == (
        "datasource", "prometheus",
    )  # fmt: skip
    numbers = [one["id"] for one in DASHBOARD["panels"]]
    assert len(numbers) == len(set(numbers))
    places = [tuple(one["gridPos"].values()) for one in DASHBOARD["panels"]]
    assert len(places) == len(set(places)), "no panel lies on another"
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        for target in panel["targets"]:
            assert re.search(r"\$(instance|conductor)\b", target["expr"]), panel["title"]
            used = set(re.findall(r"\$(\w+)", target["expr"])) - {"__rate_interval"}
            assert used <= variables.keys()


def test_the_dashboards_variables_are_labels_of_what_is_exported(exported):
    for one in DASHBOARD["templating"]["list"]:
        if one["type"] == "query":
            found = re.fullmatch(r"label_values\((\w+), (\w+)\)", one["definition"])
            assert found is not None
            assert found[1] in exported
            assert found[2] in OF_TARGETS


# The documents


def documented(file: str, heading: str) -> Iterator[tuple[str, set[str]]]:
    """Name and labels of each series in the first column of a section's tables."""
    text = (ROOT / "docs" / file).read_text()
    section = text.split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]
    for line in section.splitlines():
        if line.startswith("| `"):
            for name, labels in re.findall(r"`(\w+)(?:\{([^}]*)\})?`", line.split("|")[1]):
                yield name, set(labels.split(",")) - {""}


def named(series: dict[str, Series]) -> dict[str, set[str]]:
    """As documents name them: a histogram by its own name."""
    found: dict[str, set[str]] = {}
    for name, one in series.items():
        if one.kind == "histogram":
            name = re.sub(r"_(bucket|count|sum)$", "", name)
        found.setdefault(name, set()).update(one.labels.keys() - {"le"})
    return found


def test_the_metrics_page_lists_every_series_of_a_node_with_its_labels(node_series):
    there = dict(documented("operations/metrics.md", "## Series of a node"))
    there = {name: labels for name, labels in there.items() if re.match("kvstore_|process_", name)}
    assert there == named(node_series)


def test_the_conductors_page_lists_every_series_of_a_conductor(conductor_series):
    there = {
        name if name.startswith("process_") else CONDUCTOR + name: labels
        for name, labels in documented("conductor.md", "## Metrics")
    }
    assert there == named(conductor_series)


def test_the_metrics_page_says_what_every_alert_is(exported):
    text = (ROOT / "docs/operations/metrics.md").read_text()
    assert [one["alert"] for one in RULES if f"`{one['alert']}`" not in text] == []


def test_the_scrape_configuration_gives_the_jobs_that_alerts_name():
    text = (ROOT / "docs/deployment.md").read_text()
    blocks = re.findall(r"```yaml.*?\n(.*?)```", text, flags=re.DOTALL)
    [scrape] = [block for block in map(yaml.safe_load, blocks) if "scrape_configs" in block]
    jobs = {one["job_name"] for one in scrape["scrape_configs"]}
    assert scrape["rule_files"] == ["alerts.yaml"]
    asked = {
        value
        for _, expression, _ in ALL
        for one in selectors(expression)
        for label, _, value in one.matchers
        if label == "job"
    }
    assert asked == jobs
