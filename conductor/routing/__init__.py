"""Routing: engines, their cached prefixes, the queue, policies and the decision log. Pure."""

__all__ = [
    "admission", "bringing", "capacity", "choices", "columns", "decisions", "desk", "dispatcher",
    "engines", "fleet", "joining", "journal", "naming", "packing", "places", "policy", "prefixes",
    "recent", "requests", "scheduler",
]  # fmt: skip
