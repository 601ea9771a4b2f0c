"""Policies: which page to evict, which to write to disk, and how much each space may have."""

__all__ = [
    "admission", "classes", "conversations", "eviction", "ghosts", "policies", "policy", "quotas",
]  # fmt: skip
