"""KV events: the publisher, the server for followers, and the ZMTP protocol."""
