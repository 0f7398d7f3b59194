"""Two ranks in two processes on two devices, over NVLink (`dcp_two.py` holds the tasks)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from dcp_two import TASKS
from harness import cases, devices


@devices(2)
@cases(*TASKS, "expandable groups")
def test_two_ranks(device: torch.device, case: str) -> None:
    del device
    script = Path(__file__).with_name("dcp_two.py")
    command = [sys.executable, str(script), *case.split()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stdout[-1500:] + done.stderr[-2500:]
