"""Handoff: the KV of a request goes from a prefill engine's pool straight into a decode engine's.

``docs/handoff.md`` tells an engine's author what to call. The cores, ``sending`` and ``receiving``,
are pure: events in, effects out. ``prefill`` and ``decode`` carry them out with threads and TCP.
"""
