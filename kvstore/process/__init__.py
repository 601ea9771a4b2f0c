"""Parts that every program uses: the log, listening sockets, small and private files, faults."""

__all__ = ["collector", "faults", "listeners", "logs", "privatefile", "smallfile", "tls"]
