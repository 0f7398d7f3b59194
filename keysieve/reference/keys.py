"""key16 of BF16 tensors: the order in which keys are selected.

Key16 is an unsigned 16-bit image of a BF16 logit that is larger for a better key. It is held in int32 tensors here,
because torch has few operations on uint16. The scalar form is :func:`keysieve.spec.key16`.
"""

from __future__ import annotations

import torch

from keysieve.spec import CANONICAL_NAN, KEY16_NAN, KEY16_ZERO

_NAN_INT16 = CANONICAL_NAN - 0x10000
"""The canonical NaN's bits as a signed 16-bit number."""

_NEG_ZERO_INT16 = -0x8000


def _key16_of_bits() -> torch.Tensor:
    """int32 ``[65536]``: the key16 of every BF16 bit pattern, foreign ones included."""
    bits = torch.arange(1 << 16, dtype=torch.int32, device="cpu")
    magnitude = bits & 0x7FFF
    key = torch.where(bits >= 0x8000, bits ^ 0xFFFF, bits ^ 0x8000)
    key[magnitude == 0] = KEY16_ZERO
    key[magnitude > 0x7F80] = KEY16_NAN
    return key


_KEY16 = _key16_of_bits()


def key16(logits: torch.Tensor) -> torch.Tensor:
    """int32 of the shape of ``logits`` (bfloat16): each logit's key16, 0x003F..0xFF80; never 0, which means empty.

    -0 counts as +0 and every NaN as the canonical one, so foreign logits may be passed as they are.
    """
    # A table of 256 KiB is read faster than the arithmetic is done in separate tensor operations.
    bits = logits.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    return _KEY16.to(bits.device).index_select(0, bits.reshape(-1)).view(bits.shape)


def logits_of_key16(key: torch.Tensor) -> torch.Tensor:
    """bfloat16 of the shape of ``key`` (any integer dtype, values 0..0xFFFF): the logits with those key16."""
    wide = key.to(torch.int32)
    bits = torch.where(wide >= KEY16_ZERO, wide ^ 0x8000, wide ^ 0xFFFF)
    return torch.where(bits >= 0x8000, bits - 0x10000, bits).to(torch.int16).view(torch.bfloat16)


def canonicalize_(logits: torch.Tensor) -> torch.Tensor:
    """``logits`` (bfloat16), changed in place: -0 becomes +0, every NaN becomes the canonical NaN 0xFFC0."""
    bits = logits.view(torch.int16)
    nan = (bits & 0x7FFF) > 0x7F80
    bits.masked_fill_(bits == _NEG_ZERO_INT16, 0)
    bits.masked_fill_(nan, _NAN_INT16)
    return logits
