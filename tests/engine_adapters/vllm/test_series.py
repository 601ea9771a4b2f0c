"""Goal: the page of the adapter lists every series of it, with every label, and no others."""

import re
from pathlib import Path

from kvstore.engine import counts, tiering

PAGE = Path(__file__).resolve().parents[3] / "docs/engines/vllm.md"


def test_the_page_lists_every_series_of_the_connector_and_of_the_tier():
    named = re.findall(r"`kvstore:(\w+)_total(\{[\w,]+\})?`", PAGE.read_text())
    assert dict(sorted(named, key=lambda one: one[1])) == {
        **dict.fromkeys(counts.SERIES, ""),
        **{f"tier_{name}": "" for name in tiering.SERIES},
        "load_choices": "{choice,reason}",
        "device_failures": "{reason}",
    }


def test_the_page_says_what_every_label_means():
    rows = {line.split("`")[1]: line for line in PAGE.read_text().splitlines() if "| `kv" in line}
    kinds, reasons = (set(one) for one in zip(*counts.CHOICES.values(), strict=True))
    for series, values in (
        ("kvstore:load_choices_total{choice,reason}", kinds | reasons),
        ("kvstore:device_failures_total{reason}", set(counts.DEVICE_FAILURES.values())),
    ):
        assert not [value for value in values if f"`{value}`" not in rows[series]]
