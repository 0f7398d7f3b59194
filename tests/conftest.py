"""Shared by all tests: one torch thread (results must not depend on it; several only fight each other) and profiles."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Machines differ in speed; a slow one must not turn a passing property into a failing deadline. Derandomised, so that
# a run repeats: the long random search belongs to `keysieve check`.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")
