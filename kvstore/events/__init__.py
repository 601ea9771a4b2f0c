"""KV events: the publisher, the server for followers, and the ZMTP protocol."""

__all__ = ["publisher", "questions", "zmtp"]
