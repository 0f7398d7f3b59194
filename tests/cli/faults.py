"""Deliberate faults, one deviation from the contract each, and the stage of ``keysieve check`` that must find it.

Most are errors that have been made in the field. A fault is a function that patches keysieve's own code; importing the
modules that hold them fills the list, in the order of keysieve's own steps.
"""

from __future__ import annotations

import faults_writers  # isort: skip
import faults_scores  # isort: skip
import faults_selection  # isort: skip
import faults_shards  # isort: skip
from fault_registry import FAULTS, Fault

__all__ = ["FAULTS", "Fault", "faults_scores", "faults_selection", "faults_shards", "faults_writers"]
