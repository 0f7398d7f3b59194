"""Decode context parallelism: every rank holds 1/W of every context, candidates are exchanged and merged exactly."""

from __future__ import annotations

from keysieve.dcp.base import ContextParallel, ExchangeError, Winners
from keysieve.dcp.exchange import Exchange
from keysieve.dcp.gather import Gather

__all__ = ["ContextParallel", "Exchange", "ExchangeError", "Gather", "Winners"]
