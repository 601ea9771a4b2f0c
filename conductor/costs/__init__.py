"""What serving a request costs, in seconds: estimated from datasheets, then fitted. Pure."""
