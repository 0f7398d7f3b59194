"""An exact selection that shares nothing with keysieve's own: numpy, straight from the bytes, a stable sort.

It decodes the cache page by page, makes every logit by the written rule (``docs/contract.md``, "Logits": exact dots,
float32 head sum in ascending head order, one rounding to BF16) and sorts. It is slow and obvious on purpose. The demo
and the client tests hold every selection to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PAGE = 64

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


def _e4m3_values() -> npt.NDArray[np.float64]:
    """The 256 values of E4M3: sign, 4 exponent bits of bias 7, 3 mantissa bits, no infinities, 0x7F and 0xFF NaN."""
    values = np.empty(256)
    for code in range(256):
        exponent, mantissa = code >> 3 & 15, code & 7
        magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
        magnitude = np.nan if code & 0x7F == 0x7F else magnitude
        values[code] = -magnitude if code & 0x80 else magnitude
    return values


_E4M3 = _e4m3_values()
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_UE8M0 = np.array([2.0 ** (code - 127) for code in range(255)] + [np.nan])


def _decode_e2m1(packed: Bytes) -> npt.NDArray[np.float64]:
    """``[..., n]`` bytes to ``[..., 2n]`` values, low nibble first."""
    nibbles = np.stack((packed & 15, packed >> 4), axis=-1)
    return np.asarray(_E2M1[nibbles.reshape(*packed.shape[:-1], 2 * packed.shape[-1])])


def bf16_bits(x: Floats) -> npt.NDArray[np.uint16]:
    """Float32 to BF16 bits, nearest even; -0 as +0, every NaN as 0xFFC0."""
    raw = x.view(np.uint32).astype(np.uint64)
    bits = ((raw + 0x7FFF + (raw >> 16 & 1)) >> 16).astype(np.uint16)
    bits[bits == 0x8000] = 0
    bits[np.isnan(x)] = 0xFFC0
    return bits


def bf16_values(bits: npt.NDArray[np.uint16]) -> Floats:
    """BF16 bits as float32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Pool:
    """A paged cache as bytes: uint8 ``[pages, 64, width]`` and the name of its format."""

    data: Bytes
    key_format: str

    def keys(self, page_ids: Ints, count: int) -> tuple[npt.NDArray[np.float64], Floats]:
        """The first ``count`` keys of a request, in float64 ``[count, 128]``, and their float32 scales ``[count]``.

        MXFP4 keys come with their block scales multiplied in (exactly) and scales of 1.
        """
        width = self.data.shape[2]
        pages = self.data[page_ids].reshape(len(page_ids), PAGE * width)
        codes = pages[:, : PAGE * (width - 4)].reshape(-1, width - 4)[:count]
        words = np.ascontiguousarray(pages[:, PAGE * (width - 4) :]).reshape(-1, 4)[:count]
        if self.key_format == "mxfp4":
            values = _decode_e2m1(codes).reshape(count, 4, 32) * _UE8M0[words][..., None]
            return values.reshape(count, 128), np.ones(count, np.float32)
        scales = words.view(np.float32)[:, 0].copy()
        if self.key_format == "fp8_ue8m0":
            scales = _UE8M0[words[:, 0]].astype(np.float32)
        return np.asarray(_E4M3[codes]), scales


def decode_query(query: Bytes, words: npt.NDArray[np.int32] | None) -> npt.NDArray[np.float64]:
    """Query codes ``[rows, heads, 128 | 64]`` to float64 ``[rows, heads, 128]``; MXFP4 with its block scales in."""
    if words is None:
        return np.asarray(_E4M3[query])
    scales = _UE8M0[np.ascontiguousarray(words)[..., None].view(np.uint8)]
    values = _decode_e2m1(query).reshape(*query.shape[:2], 4, 32) * scales[..., None]
    return np.asarray(values.reshape(*query.shape[:2], 128))


def logits(query: npt.NDArray[np.float64], weights: Floats, keys: npt.NDArray[np.float64], scales: Floats) -> Floats:
    """The rounded logits ``[rows, keys]`` of a request, as float32 values of BF16 numbers."""
    rows, heads, _ = query.shape
    flat = query.reshape(rows * heads, 128)
    # Exact: E4M3 products summed 128 times fit a float64, and so does every block of 32 in MXFP4. Blocks in order.
    dots = flat[:, :32] @ keys[:, :32].T
    for block in range(32, 128, 32):
        dots += flat[:, block : block + 32] @ keys[:, block : block + 32].T
    rectified: Floats = np.maximum(dots.astype(np.float32), np.float32(0)).reshape(rows, heads, keys.shape[0])
    total: Floats = np.zeros((rows, keys.shape[0]), np.float32)
    for head in range(heads):
        total = total + rectified[:, head] * weights[:, head, None]
    return bf16_values(bf16_bits(total * scales))


def best(row: Floats, k: int) -> Ints:
    """Positions of the first ``k`` of a stable descending sort (lower position wins a tie, NaN last), ascending."""
    return np.sort(np.argsort(-row, kind="stable")[:k])


@dataclass(frozen=True)
class Tie:
    """Where a row's selection was cut: the K-th best value, how many keys have it, how many of those were taken."""

    value: float
    equal: int
    taken: int

    @property
    def cut(self) -> bool:
        """Whether equal keys stood on both sides of the cut."""
        return self.taken < self.equal


def tie_at_threshold(row: Floats, chosen: Ints) -> Tie:
    """The threshold of a row of logits ``[keys]`` given the positions chosen from it (at least one)."""
    value = row[chosen].min()
    return Tie(float(value), int((row == value).sum()), int((row[chosen] == value).sum()))
