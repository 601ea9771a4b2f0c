"""The engine-independent part of adapters: decides what to load and store, and when."""

__all__ = [
    "chain", "conversations", "counts", "identity", "label", "load_choice", "load_decisions",
    "messages", "opening", "options", "pace", "pending", "requests", "scheduler", "start",
    "tiering", "transfer", "worker",
]  # fmt: skip
