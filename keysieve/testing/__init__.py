"""Generators and comparisons for testing an exact selection: what the project's own tests and ``keysieve check`` use.

Everything is made from a seed on the CPU and can be moved to a device (:meth:`Case.to`). Keys are written as bytes
from the cache layout alone (:mod:`~keysieve.testing.inject`), pools and tables are poisoned wherever the contract says
that contents must not matter (:mod:`~keysieve.testing.paging`), scores are the patterns that selections have got wrong
(:mod:`~keysieve.testing.scores`), and results are compared bit by bit (:mod:`~keysieve.testing.compare`).

Example::

    case = pattern_case(IndexerSpec(heads=8, topk=64), "relu_plateau", [1000, 65], seed=3)
    out = indexer(case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table, **case.paging())
    # case.logits[r] holds the scores that request r's keys must get
"""

from keysieve.testing.cases import Case, draw_case, injected_case, pattern_case, random_case
from keysieve.testing.compare import GuardedRows, assert_bitwise_equal, assert_untouched, bits_of, guarded_rows
from keysieve.testing.inject import InjectedKeys, Probe, canonical_bf16, inject_keys, probe_query
from keysieve.testing.paging import (
    OUT_OF_RANGE_IDS,
    key_planes,
    make_pool,
    ragged_lengths,
    scattered_table,
    slots_of,
    write_tokens,
)
from keysieve.testing.random_keys import random_codes, random_e4m3, random_query
from keysieve.testing.scores import DIGIT_SPLITS, PATTERNS, ScorePattern, scores_of_key16
from keysieve.testing.slices import relocate, take_requests

__all__ = [
    "DIGIT_SPLITS",
    "OUT_OF_RANGE_IDS",
    "PATTERNS",
    "Case",
    "GuardedRows",
    "InjectedKeys",
    "Probe",
    "ScorePattern",
    "assert_bitwise_equal",
    "assert_untouched",
    "bits_of",
    "canonical_bf16",
    "draw_case",
    "guarded_rows",
    "inject_keys",
    "injected_case",
    "key_planes",
    "make_pool",
    "pattern_case",
    "probe_query",
    "ragged_lengths",
    "random_case",
    "random_codes",
    "random_e4m3",
    "random_query",
    "relocate",
    "scattered_table",
    "scores_of_key16",
    "slots_of",
    "take_requests",
    "write_tokens",
]
