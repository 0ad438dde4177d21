"""Shipped for tests: virtual clock and in-memory twins of the ports."""
