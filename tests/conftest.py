"""Shared by all tests: one torch thread (results must not depend on it; several only fight each other) and profiles."""

from __future__ import annotations

from contextlib import suppress

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# Machines differ in speed; a slow one must not turn a passing property into a failing deadline. Derandomised, so that
# a run repeats: the long random search belongs to `keysieve check`.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

# Derandomised examples still come from the numbers in the source of the modules that happen to be imported by then: a
# property was tried on other examples alone than after other tests, and on others again in another division of the
# tests among processes. tests/structure/test_repeatable.py notices if this name is gone.
with suppress(ImportError):
    from hypothesis.internal.conjecture import providers

    providers._get_local_constants = lambda: providers.Constants()
