"""Handoff: the KV of a request goes from a prefill engine's pool straight into a decode engine's.

``docs/handoff.md`` tells an engine's author what to call. The cores, ``sending`` and ``receiving``,
are pure: events in, effects out. ``prefill`` and ``decode`` carry them out with threads and TCP.
"""

__all__ = [
    "aux_data", "decode", "greeting", "job_watch", "memory", "mooncake", "prefill", "ranks",
    "registry", "rooms", "shared_memory", "states",
]  # fmt: skip
