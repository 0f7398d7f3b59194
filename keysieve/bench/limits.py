"""What a device can do at most, for the devices where that was measured: every limit and share of it comes from here.

A device that is not listed has no limit in its records, and a dash where one would be printed: another device's would
say nothing about it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rates:
    """read: bytes a second that a grid-stride read of 4 GiB reaches; products: FP8 operations a second that large
    products reach."""

    read: float
    products: float


H200 = "NVIDIA H200"
RATES = {H200: Rates(read=4.27e12, products=1.58e15)}
"""Name of a device, as the driver gives it -> its rates."""


def rates_of(device: torch.device) -> Rates | None:
    """The rates of a CUDA device, or None where nobody has measured them."""
    return RATES.get(torch.cuda.get_device_name(device))


def rounded(us: float | None, digits: int) -> float | None:
    """Microseconds for a record."""
    return None if us is None else round(us, digits)


def limit_text(limit_us: float | None, width: int = 0) -> str:
    """A limit in microseconds for a line of output; a dash where there is none."""
    return f"{'-' if limit_us is None else f'{limit_us:.1f}':>{width}}"


def share_text(limit_us: float | None, us: float) -> str:
    """How much of the limit was reached, four characters wide."""
    return f"{'-':>4}" if limit_us is None else f"{limit_us / us:4.0%}"
