"""Decode context parallelism: maps, candidate rows, merge, protocol, and real processes."""
