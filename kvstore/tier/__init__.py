"""The tiers: host memory, the SSD log, devices."""

__all__ = ["directories", "disk", "gpu", "host", "lane", "slab", "ssd", "stale", "vectored"]
