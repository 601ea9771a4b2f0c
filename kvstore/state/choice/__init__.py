"""Policies: which page to evict, which to write to disk, and how much each space may have."""

__all__ = ["admission", "conversations", "eviction", "ghosts", "policies", "policy", "quotas"]
