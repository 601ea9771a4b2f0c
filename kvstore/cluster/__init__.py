"""Other nodes: who they are, which pages they have, and the sessions in which pages are read."""

__all__ = [
    "access", "asked", "configured", "copier", "directory", "greeting", "membership",
    "messages", "probe", "records", "serving", "side", "standing", "store", "stores", "talk",
    "tls", "watched", "ways",
]  # fmt: skip
