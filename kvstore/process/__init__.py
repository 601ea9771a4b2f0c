"""Parts that every program uses: the log, listening sockets, small and private files, faults."""

__all__ = [
    "collector",
    "connecting",
    "faults",
    "listeners",
    "logs",
    "privatefile",
    "smallfile",
    "tls",
]
