"""Routing: engines, their cached prefixes, the queue, policies and the decision log. Pure."""

__all__ = [
    "admission", "bringing", "capacity", "choices", "columns", "decisions", "dispatcher",
    "engines", "fleet", "joining", "naming", "packing", "places", "policy", "prefixes",
    "recent", "requests", "scheduler",
]  # fmt: skip
