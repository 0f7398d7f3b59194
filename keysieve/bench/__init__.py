"""Measurements: how time is taken (`timing`), and one module per op that measures it."""
