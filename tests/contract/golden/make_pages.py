"""Writes the golden pages of this folder; run by hand when the contract changes (it must not).

    python tests/contract/golden/make_pages.py

A page per format, from the keys of :func:`golden_keys`, laid out byte by byte here with the exact rules of
``exact_codes.py``. Neither torch nor keysieve takes part.
"""

from __future__ import annotations

import struct
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import exact_codes as exact  # noqa: E402 - the path above must come first when this runs as a script

FLOOR_FP8 = np.float32(1e-4)
FLOOR_FP4 = Fraction(6) * Fraction(2) ** -126
FILES = ("fp8_ue8m0", "fp8_fp32", "fp8_fp32_pow2", "mxfp4", "mxfp4_half_to_zero")


def golden_keys() -> np.ndarray:
    """float32 [64, 128]: a different scale per token, signs, ties, zero and tiny tokens, exact maxima."""
    token, d = np.meshgrid(np.arange(64), np.arange(128), indexing="ij")
    keys = ((37 * token + 29 * d) % 193 - 96).astype(np.float32) * np.exp2((token % 11 - 7).astype(np.float32))
    keys *= np.where(d // 32 == token % 4, np.float32(0.0625), np.float32(1.0))  # blocks of 32 of their own size
    keys[5] = 0.0
    keys[6] = np.float32(1e-6)  # below the FP8 floor
    keys[7] = 0.0
    keys[7, 3] = -448.0
    keys[8, 64:96] = 0.0  # one zero block
    keys[9, :8] = [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]  # E2M1 ties at scale 1
    keys[9, 8:32] = -keys[9, 7]
    keys[10] = np.float32(2.0**-130)  # subnormal, below both floors
    return keys.astype(np.float32)


def page(name: str) -> bytes:
    """The 64 * width bytes of a page: all codes, then all scale words."""
    codes, scales = bytearray(), bytearray()
    for key in golden_keys():
        values = list(key)
        if name.startswith("mxfp4"):
            ties = "zero" if name.endswith("to_zero") else "even"
            nibbles: list[int] = []
            for block in range(4):
                part, scale_byte = exact.mxfp4_block(values[32 * block : 32 * block + 32], ties, FLOOR_FP4)
                nibbles += part
                scales.append(scale_byte)
            codes += bytes(nibbles[i] | nibbles[i + 1] << 4 for i in range(0, 128, 2))
            continue
        key_codes, scale = exact.fp8_key(values, pow2=name != "fp8_fp32", floor=FLOOR_FP8)
        codes += bytes(key_codes)
        if name == "fp8_ue8m0":
            power = exact.power_of_two_scale(Fraction(float(scale)), 1)
            scales += bytes([power + 127] * 4)
        else:
            scales += struct.pack("<f", scale)
    return bytes(codes + scales)


def main() -> None:
    for name in FILES:
        text = page(name).hex()
        lines = [text[i : i + 128] for i in range(0, len(text), 128)]
        (HERE / f"{name}.hex").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
