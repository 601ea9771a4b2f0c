"""The tiers: host memory, the SSD log, devices."""
