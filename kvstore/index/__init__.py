"""The prefix index (which engine or node has which pages), and the followers that update it."""

__all__ = [
    "apply", "blocks", "child", "control", "credentials", "directory", "face", "feed",
    "followers", "keys", "layout", "payload", "process", "reading", "runs", "scope", "table",
    "tunnel",
]  # fmt: skip
