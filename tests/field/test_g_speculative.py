"""Kind G: several query rows per request, compressed contexts, rollbacks, layers that share a workspace."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from oracle.step import expected_step

import keysieve as ks
from field.steps import FORMATS, assert_step, check_step, chosen, indexer_for, run_step, spec_of
from keysieve.testing import Case, assert_bitwise_equal, injected_case, pattern_case, random_case, slots_of


@pytest.mark.parametrize("key_format", FORMATS)
@pytest.mark.parametrize("next_n", range(1, 9))
def test_g1_every_number_of_draft_rows(next_n: int, key_format: str) -> None:
    """1 to 8 rows per request, 3 and 5 to 7 included, that end in different pages and tiles."""
    lengths = [[base + row for row in range(next_n)] for base in (1, 60, 126, 500)]
    check_step(random_case(spec_of(key_format, topk=64), lengths, next_n=next_n, seed=next_n))


@pytest.mark.parametrize("next_n", [0, 9, 16, -1])
def test_g1_more_rows_than_that_are_refused(next_n: int) -> None:
    """next_n out of range is refused when the indexer is made, by name."""
    with pytest.raises(ks.KeysieveError, match="next_n"):
        ks.DecodeIndexer(spec_of(), max_rows=64, max_context=4096, next_n=next_n, device="cpu", backend="cpu")
    why = ks.supports(spec_of(), next_n=next_n, backend="cpu", device="cpu")
    assert isinstance(why, str)
    assert "next_n" in why


@pytest.mark.parametrize("key_format", FORMATS)
def test_g1_one_indexer_prepared_for_several(key_format: str) -> None:
    """next_n as a tuple: the calls alternate, and each is what its own indexer gives."""
    spec = spec_of(key_format, topk=64)
    shared = ks.DecodeIndexer(spec, max_rows=32, max_context=600, next_n=(1, 3, 4), device="cpu", backend="cpu")
    for next_n in (3, 1, 4, 3, 1):
        lengths = [[200 + 7 * request + row for row in range(next_n)] for request in range(4)]
        case = random_case(spec, lengths, next_n=next_n, seed=10 + next_n)
        check_step(case, shared)


@pytest.mark.parametrize("key_format", FORMATS)
def test_g4_a_query_does_not_see_its_own_unfinished_group(key_format: str) -> None:
    """Four tokens share an entry: a query at position p sees (p + 1) // 4 finished entries.

    The unfinished group's entry is already in the cache, half written, with the best score of all: lengths in entries
    keep it out for (p + 1) mod 4 = 1, 2, 3, and let it in once it is finished.
    """
    spec = spec_of(key_format, topk=8)
    for start in (4 * 63, 4 * 127 - 1, 4 * 20):
        positions = [start + row for row in range(4)]
        entries = [(position + 1) // 4 for position in positions]
        scores = torch.rand(max(entries) + 1, generator=torch.Generator().manual_seed(start))
        scores[min(entries) :] = 1e30
        case = injected_case(spec, [scores], next_n=4, lengths=[entries])
        out = check_step(case)
        for row, count in enumerate(entries):
            assert max(chosen(out, row)) < count


@pytest.mark.parametrize("key_format", FORMATS)
def test_g5_each_draft_row_finds_its_own_winner(key_format: str) -> None:
    """Arguments swapped between rows give a draft row its neighbour's runners-up: four rows, four planted winners.

    Through the quantisers: queries and keys are floats, winner j is a key along row j's query.
    """
    spec = spec_of(key_format, heads=8, topk=5)
    gen = torch.Generator().manual_seed(5)
    requests, next_n, length = 3, 4, 300
    q = torch.randn(requests * next_n, 8, 128, generator=gen)
    tables = (torch.randperm(15, generator=gen).to(torch.int32)).reshape(requests, 5)
    cache = ks.IndexCache.empty(spec, pages=15, device="cpu")
    planted = {}
    for request in range(requests):
        keys = 0.1 * torch.randn(length, 128, generator=gen)
        places = torch.randperm(length - 4, generator=gen)[:next_n].tolist()
        for j, place in enumerate(places):
            planted[request * next_n + j] = place
            keys[place] = 3 * q[request * next_n + j].sum(0)
        cache.append(keys, slots_of(tables[request], length))
    query, q_scale = ks.quantize_query(spec, q)
    weights = ks.fold_weights(torch.ones(requests * next_n, 8), q_scale, 0.088)
    lengths = torch.tensor([length - 3 + row for _ in range(requests) for row in range(next_n)], dtype=torch.int32)
    case = Case("built by hand", 5, spec, next_n, query, cache.data, weights, lengths, tables)
    out = check_step(case)
    arguments = (query, cache, weights, lengths, tables)
    best = ks.score(spec, *arguments, max_len=length).float().argmax(1)
    for row, place in planted.items():
        assert place in chosen(out, row)
        assert int(best[row]) == place


@pytest.mark.parametrize("key_format", FORMATS)
def test_g6_a_rollback_leaves_nothing_behind(key_format: str) -> None:
    """Score at 5,000, roll back three tokens, append others in their slots, score again: as a fresh run would.

    Whatever is remembered of the rejected keys (logits, maxima, a threshold) would survive in the second answer.
    """
    spec = spec_of(key_format, topk=512)
    gen = torch.Generator().manual_seed(6)
    base = random_case(spec, [5000], seed=6)
    indexer = indexer_for(base, max_context=5001)
    slots = slots_of(base.index_table[0], 5000)
    cache = base.index_cache()
    cache.append(20 * torch.randn(3, 128, generator=gen), slots[4997:])  # rejected drafts with large scores
    rejected = check_step(base, indexer)
    shorter = replace(base, seq_lens=torch.tensor([4997], dtype=torch.int32))
    check_step(shorter, indexer)
    cache.append(0.01 * torch.randn(3, 128, generator=gen), slots[4997:])
    again = check_step(base, indexer)
    assert_step(again, expected_step(base), "the appended keys")
    assert not torch.equal(again.positions, rejected.positions)


def test_g7_layers_that_share_a_workspace_do_not_mix() -> None:
    """One indexer serves all layers of a model, the draft layer too: interleaved calls are independent."""
    spec = spec_of(topk=128)
    layers = [
        pattern_case(spec, "gaussian", [[900, 901], [0, 50]], next_n=2, seed=70),
        pattern_case(spec, "relu_plateau", [[900, 901], [0, 50]], next_n=2, seed=71),
        pattern_case(spec, "descending", [[130, 131], [700, 701]], next_n=2, seed=72),
    ]
    shared = indexer_for(layers[0], max_context=1000)
    for _ in range(2):
        results = [run_step(layer, shared, out=torch.empty(4, 128, dtype=torch.int32)) for layer in layers]
        for layer, result in zip(layers, results, strict=True):
            assert_bitwise_equal(result.rows, expected_step(layer).rows, layer)


def test_g7_results_without_an_output_buffer_are_not_overwritten_by_the_next_layer() -> None:
    """A result the caller still holds stays what it was when the next layer runs on the same indexer."""
    spec = spec_of(topk=128)
    first = pattern_case(spec, "gaussian", [900, 50], seed=73)
    second = pattern_case(spec, "descending", [800, 60], seed=74)
    shared = indexer_for(first, max_context=1000)
    held = run_step(first, shared)
    run_step(second, shared)
    assert_step(held, expected_step(first), "a result held across the next call")
