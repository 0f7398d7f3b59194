"""Decode context parallelism: every rank holds 1/W of every context, candidates are exchanged and merged exactly."""

from __future__ import annotations

from keysieve.dcp.base import ContextParallel, ExchangeError, Winners

__all__ = ["ContextParallel", "ExchangeError", "Winners"]
