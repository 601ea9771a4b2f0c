"""Engines that use kvstore: each in a folder of its own, never importing another."""
