"""The costs of requests in seconds: estimated from datasheets, then fitted. Pure."""
