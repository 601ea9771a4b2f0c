"""The costs of requests in seconds: estimated from datasheets, then fitted. Pure."""

__all__ = ["book", "hardware", "prior", "shapes"]
