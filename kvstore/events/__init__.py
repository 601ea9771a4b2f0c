"""KV events: published, served to followers, and read."""
