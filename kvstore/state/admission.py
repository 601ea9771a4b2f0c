"""Stub."""


class Admission:
    """Stub."""

    def admit(self, chain, size_bytes, now_ns):
        return len(chain)
