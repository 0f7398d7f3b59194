"""key16 over every BF16 pattern, against the scalar definition."""

from __future__ import annotations

import torch

from keysieve import spec
from keysieve.reference.keys import canonicalize_, key16, logits_of_key16

PATTERNS = torch.arange(1 << 16)
EVERY_LOGIT = PATTERNS.to(torch.int16).view(torch.bfloat16)
CANONICAL = [spec.canonical_bits(bits) for bits in range(1 << 16)]


def bits(logits: torch.Tensor) -> list[int]:
    return (logits.view(torch.int16).to(torch.int32) & 0xFFFF).tolist()


def test_every_pattern_has_the_key_of_its_canonical_form() -> None:
    assert key16(EVERY_LOGIT).tolist() == [spec.key16(c) for c in CANONICAL]


def test_keys_order_as_the_values_do_and_never_are_empty() -> None:
    values = EVERY_LOGIT.to(torch.float32)
    number = ~values.isnan()
    order = torch.argsort(values[number], stable=True)
    keys = key16(EVERY_LOGIT)[number][order]
    ordered = values[number][order]
    assert bool((keys[1:] >= keys[:-1]).all())
    assert torch.equal(keys[1:] > keys[:-1], ordered[1:] > ordered[:-1])  # equal exactly where the values are
    assert int(key16(EVERY_LOGIT).min()) == spec.KEY16_NAN > spec.KEY16_EMPTY
    assert int(key16(EVERY_LOGIT).max()) == spec.KEY16_POS_INF


def test_named_keys() -> None:
    named = torch.tensor([float("nan"), -torch.inf, 0.0, -0.0, torch.inf]).to(torch.bfloat16)
    assert key16(named).tolist() == [0x003F, 0x007F, 0x8000, 0x8000, 0xFF80]


def test_keys_of_any_shape_and_stride() -> None:
    square = EVERY_LOGIT.view(256, 256)
    assert torch.equal(key16(square.t()), key16(square).t())
    assert key16(square[:0]).shape == (0, 256)


def test_inverse_gives_the_canonical_bits_back() -> None:
    assert bits(logits_of_key16(key16(EVERY_LOGIT))) == CANONICAL


def test_canonicalize_works_in_place_on_every_pattern() -> None:
    logits = EVERY_LOGIT.clone()
    assert canonicalize_(logits) is logits
    assert bits(logits) == CANONICAL
