"""Transports: the bytes of pages between the memories of two nodes."""

__all__ = ["base", "engine", "engine_messages", "mooncake", "streams", "tcp"]
