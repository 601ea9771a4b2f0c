"""The tiers: host memory, the SSD log, devices."""

__all__ = ["base", "directories", "disk", "gpu", "host", "lane", "slab", "ssd", "stale", "vectored"]
