"""Kind F, heads: ReLU, the sum over heads, head counts, rotation, and side tensors that are slices."""

from __future__ import annotations

import struct
from dataclasses import replace
from functools import partial

import pytest
import torch
from oracle.score import gather_keys
from oracle.score import logits as brute_force
from oracle.step import expected_step, row_bits

import keysieve as ks
from field.byhand import MINUS_FIVE, ONE, THREE, TWO, fp8_query, one_request, scores_of
from field.steps import FORMATS, UNSET, check_step, chosen, poisoned, refusal_of, run_step, spec_of
from keysieve.testing import assert_bitwise_equal, assert_untouched, random_case


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
def test_f2_relu_before_the_sum_over_heads(heads: int, numerics: str) -> None:
    """Dots +3 and -5 with weights 1 score 3, not -2; and every pair of heads is summed."""
    cache = torch.zeros(1, 64, 132, dtype=torch.uint8)
    cache.view(-1)[0::128][:64] = ONE  # element 0 of each key; the scale plane follows the 64 keys
    cache.view(-1)[64 * 128 :] = torch.frombuffer(bytearray(struct.pack("<64f", *[1.0] * 64)), dtype=torch.uint8)
    spec = spec_of(heads=heads, topk=4, numerics=numerics)
    for first in range(heads):
        second = (first + 1) % heads
        query = fp8_query([{first: {0: THREE}, second: {0: MINUS_FIVE}}, {first: {0: THREE}, second: {0: TWO}}], heads)
        case = one_request(spec, cache, query, torch.ones(2, heads), 64)
        assert scores_of(case)[:, 0].tolist() == [3.0, 5.0]


@pytest.mark.parametrize("exponent", [-20, -30, -60])
@pytest.mark.parametrize("lane", range(4))
def test_f_bf16_accumulation_is_fused(lane: int, exponent: int) -> None:
    """numerics bf16: ``a * b + c`` is rounded once, not by way of float32 or float64 and not as product, then sum.

    17 * 19 = 323 and 17 * 21 = 357 lie half way between two BF16; the tiny value that the lane already holds decides
    the rounding, however small it is.
    """
    cache = torch.zeros(1, 64, 132, dtype=torch.uint8)
    cache.view(-1)[0 : 64 * 128 : 128] = ONE
    cache.view(-1)[1 : 64 * 128 : 128] = ONE
    cache.view(-1)[64 * 128 :] = torch.frombuffer(bytearray(struct.pack("<64f", *[1.0] * 64)), dtype=torch.uint8)
    rows = [{lane: {0: ONE}, lane + 4: {0: 0x58, 1: ONE}}] * 4  # dots 1 and 16 + 1
    weights = torch.zeros(4, 8)
    weights[:, lane] = torch.tensor([1.0, -1.0, 1.0, -1.0]) * 2.0**exponent
    weights[:, lane + 4] = torch.tensor([19.0, 19.0, 21.0, 21.0])
    spec = spec_of(topk=4, numerics="bf16")
    case = one_request(spec, cache, fp8_query(rows), weights, 64)
    assert scores_of(case)[:, 0].tolist() == [324.0, 322.0, 358.0, 356.0]
    check_step(case, numerics="bf16")


def hadamard(size: int) -> torch.Tensor:
    """The orthogonal Hadamard matrix of a power-of-two size."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / size**0.5


@pytest.mark.parametrize("key_format", FORMATS)
def test_f6_rotating_query_and_keys_alike_selects_alike(key_format: str) -> None:
    """No rotation is applied here, so rotating both sides changes scores only by quantisation; one side is garbage.

    Twenty keys stand clear of the rest: rotated query with rotated keys finds exactly them, as unrotated with
    unrotated does; a cache that holds unrotated keys under a rotated query does not.
    """
    spec = spec_of(key_format, heads=8, topk=20)
    gen = torch.Generator().manual_seed(6)
    direction = torch.randn(128, generator=gen)
    direction /= direction.norm()
    q = direction.expand(1, 8, 128) * 4 + 0.05 * torch.randn(1, 8, 128, generator=gen)
    keys = torch.randn(300, 128, generator=gen)
    keys -= (keys @ direction)[:, None] * direction
    winners = sorted(torch.randperm(300, generator=gen)[:20].tolist())
    keys[winners] += 30 * direction
    rotation = hadamard(128)

    def selected(query: torch.Tensor, stored: torch.Tensor) -> list[int]:
        cache = ks.IndexCache.empty(spec, pages=5, device="cpu")
        cache.append(stored, torch.arange(300))
        codes, q_scale = ks.quantize_query(spec, query)
        weights = ks.fold_weights(torch.ones(1, 8), q_scale, 1.0)
        return chosen(run_step(one_request(spec, cache.data, codes, weights, 300)), 0)

    assert selected(q, keys) == winners
    assert selected(q @ rotation, keys @ rotation) == winners
    assert selected(q @ rotation, keys) != winners


@pytest.mark.parametrize("key_format", FORMATS)
def test_f6_append_stores_the_keys_as_they_are(key_format: str) -> None:
    """A unit vector stays a unit vector: one nonzero code at its own element, no rotation hidden in the writer."""
    spec = spec_of(key_format)
    cache = ks.IndexCache.empty(spec, pages=2, device="cpu")
    cache.append(torch.eye(128), torch.arange(128))
    codes, _ = gather_keys(cache.data.numpy(), [0, 1], 128)
    if key_format == "mxfp4":
        low, high = codes & 15, codes >> 4
        elements = torch.stack([torch.from_numpy(low), torch.from_numpy(high)], 2).reshape(128, 128)
    else:
        elements = torch.from_numpy(codes)
    assert_bitwise_equal((elements != 0).int(), torch.eye(128).int(), "nonzero codes")


@pytest.mark.parametrize("head_dim", [32, 64, 127, 256])
def test_f7_other_head_dims_are_refused(head_dim: int) -> None:
    """head_dim is 128: anything else is named, by the spec and by a query of another width."""
    with pytest.raises(ks.KeysieveError, match=r"head_dim.*128"):
        ks.IndexerSpec(heads=32, topk=2048, head_dim=head_dim)
    case = random_case(spec_of(topk=4), [100], seed=7)
    rows = poisoned(1, 4)
    narrow = replace(case, query=torch.zeros(1, 8, head_dim, dtype=torch.uint8).view(torch.float8_e4m3fn))
    with assert_untouched(rows=rows), pytest.raises(ks.KeysieveError, match="query"):
        run_step(narrow, out=rows)
    assert bool((rows == UNSET).all())


@pytest.mark.parametrize("heads", [1, 4, 7, 12, 24, 48, 128, 0, -8])
def test_f8_head_counts_that_no_backend_has_are_refused_at_once(heads: int) -> None:
    """The refusal comes when the spec is made, names the count and says to pad with zero heads."""
    with pytest.raises(ks.KeysieveError, match="heads") as refusal:
        ks.IndexerSpec(heads=heads, topk=2048)
    assert str(heads) in str(refusal.value)
    assert "zero" in str(refusal.value)


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize(("heads", "padded"), [(12, 16), (24, 32), (8, 64)])
def test_f8_zero_heads_change_nothing(heads: int, padded: int, numerics: str) -> None:
    """What the refusal advises is exact: heads of zero query and zero weight leave every logit's bits as they were.

    The brute force sums the real heads only (fp32 numerics), or the padded ones (bf16, whose accumulators alternate).
    """
    spec = spec_of(heads=padded, topk=30, numerics=numerics)
    case = random_case(spec, [200, 130], seed=8)
    assert isinstance(case.query, torch.Tensor)
    case.query.view(torch.uint8)[:, heads:] = 0
    case.weights[:, heads:] = 0
    check_step(case, numerics=numerics)
    if numerics == "fp32":
        codes, scales = gather_keys(case.cache.numpy(), case.index_table[0].tolist(), 200)
        query = case.query[0, :heads].view(torch.uint8).numpy()
        bits = brute_force("fp8_fp32", "fp32", query, None, case.weights[0, :heads].double().numpy(), codes, scales)
        want = torch.from_numpy(bits.view("int16")).view(torch.bfloat16)
        assert_bitwise_equal(scores_of(case)[0], want, "logits without the zero heads")


@pytest.mark.parametrize("key_format", FORMATS)
def test_f9_side_tensors_that_are_slices(key_format: str) -> None:
    """Weights and query cut out of larger tensors: read with their strides, or refused; never silently misread."""
    spec = spec_of(key_format, topk=40)
    case = random_case(spec, [[200, 201], [64, 65]], next_n=2, seed=9)
    want = expected_step(case)

    def cut(tensor: torch.Tensor, dim: int, step: int) -> torch.Tensor:
        raw = tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
        shape = list(raw.shape)
        shape[dim] = shape[dim] * step + 3
        wide = torch.full(shape, 113, dtype=raw.dtype)
        part = wide.narrow(dim, 1, raw.shape[dim] * step)[(slice(None),) * dim + (slice(None, None, step),)]
        part.copy_(raw)
        return part.view(tensor.dtype) if step == 1 or dim < raw.dim() - 1 else part

    variants = [replace(case, weights=cut(case.weights, dim, step)) for dim in (0, 1) for step in (1, 2)]
    queries = list(case.query) if isinstance(case.query, tuple) else [case.query]
    for which, tensor in enumerate(queries):
        for dim in range(tensor.dim() - 1):
            changed = [cut(t, dim, 2) if i == which else t for i, t in enumerate(queries)]
            variants.append(replace(case, query=(changed[0], changed[1]) if len(changed) == 2 else changed[0]))
    read = 0
    for variant in variants:
        rows = poisoned(case.rows, 40)
        refusal = refusal_of(partial(run_step, variant, out=rows))
        if refusal is not None:
            assert "weights" in refusal or "query" in refusal
            assert bool((rows == UNSET).all())
            continue
        assert_bitwise_equal(rows, want.rows, "rows from sliced tensors")
        read += 1
    assert read >= 1


@pytest.mark.parametrize("key_format", FORMATS)
def test_f9_bfloat16_weights(key_format: str) -> None:
    """Weights may be bfloat16: the same numbers as float32 weights that are exact in it."""
    case = random_case(spec_of(key_format, topk=40), [200, 64], seed=90)
    half = case.weights.to(torch.bfloat16)
    exact = replace(case, weights=half.float())
    out = check_step(exact)
    assert_bitwise_equal(run_step(replace(case, weights=half)).rows, out.rows, "rows with bfloat16 weights")


@pytest.mark.parametrize("numerics", ["fp32", "bf16"])
@pytest.mark.parametrize("heads", [8, 16, 32, 64])
@pytest.mark.parametrize("key_format", FORMATS)
def test_f_random_bytes_score_as_the_contract_says(key_format: str, heads: int, numerics: str) -> None:
    """Random query, keys, scales and weights in every format, head count and numerics: every logit's bits."""
    spec = spec_of(key_format, heads=heads, topk=64, numerics=numerics)
    case = random_case(spec, [[257, 256, 0], [65, 64, 63]], next_n=3, seed=heads)
    logits = scores_of(case)
    for row in range(case.rows):
        bits = row_bits(case, row, numerics)
        want = torch.from_numpy(bits.view("int16")).view(torch.bfloat16)
        assert_bitwise_equal(logits[row, : len(bits)], want, f"logits of row {row}")
    check_step(case, numerics=numerics)
