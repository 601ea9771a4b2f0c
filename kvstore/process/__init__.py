"""Parts that every program uses: the log, listening sockets, private files, fault counts."""

__all__ = ["collector", "faults", "listeners", "logs", "privatefile", "tls"]
