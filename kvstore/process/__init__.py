"""Parts that every program uses: the log, listening sockets, private files, fault counts."""
