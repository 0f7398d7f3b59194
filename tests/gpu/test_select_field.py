"""Selection faults that people met elsewhere, each as a small input with a known answer. Letters: kinds of fault."""

from __future__ import annotations

import torch
from harness import cases, poison
from select_cases import oracle_positions, values
from test_select import K, Outputs, run_select, run_topk, selector, sms_for

from keysieve.kernels.select_config import CLUSTERS
from keysieve.kernels.select_host import topk_workspace_bytes


def bits(pattern: torch.Tensor) -> torch.Tensor:
    """Integers 0..0xFFFF as BF16 bits."""
    return torch.where(pattern >= 0x8000, pattern - 0x10000, pattern).to(torch.int16).view(torch.bfloat16)


def check(device: torch.device, x: torch.Tensor, k: int, clusters: tuple[int, ...] = CLUSTERS) -> list[Outputs]:
    """topk of the rows of `x`, whole, with every number of blocks a row, against a stable sort."""
    rows, length = x.shape
    lens = torch.full((rows,), length, dtype=torch.int32, device=device)
    done = []
    for cluster in clusters:
        out = Outputs(rows, k, device)
        room = poison((topk_workspace_bytes(rows, length, k, sms_for(rows, cluster)),), torch.uint8, device)
        selector(device, k, rows, length, cluster, False).topk(x, lens, workspace=room, **out.given)
        out.check(list(x), [length] * rows, None)
        done.append(out)
    return done


def test_a_scores_too_small_or_too_large_for_half_precision(device: torch.device) -> None:
    noise = torch.rand(2, 65_536, device=device)
    check(device, (noise * 1e-7 + 1e-7).to(torch.bfloat16), K)
    check(device, (noise * 2e4 + 7e4).to(torch.bfloat16), K)


def test_a_scores_that_differ_in_their_low_bits_only(device: torch.device) -> None:
    low = torch.randint(0, 1024, (2, 65_536), device=device)
    check(device, bits(0x3C00 + low), K)
    check(device, bits(0x4040 + (low & 31)), K)


@cases(512, 1024, K)
def test_a_rows_with_k_and_k_plus_one_keys(device: torch.device, case: int) -> None:
    for length in (case, case + 1):
        check(device, values("gaussian", 64, length, case, device, 3), case, (1, 2))
    check(device, values("exactk", 2, 32_768, case, device, 4), case)


def test_a_few_positives_before_a_wide_plateau(device: torch.device) -> None:
    x = torch.zeros(2, 200_003, dtype=torch.bfloat16, device=device)
    x[0, [5, 100_000, 200_002]] = 1
    x[1, :3] = 2
    for out in check(device, x, 1024):
        assert out.positions[0, -1] == 200_002
        assert out.positions[0, :4].tolist() == [0, 1, 2, 3]


def test_a_nested_ties_at_each_digit(device: torch.device) -> None:
    x = torch.full((1, 32_768), 0x3F00, device=device)  # below the cluster
    x[0, :9_407] = 0x4000 + torch.arange(9_407, device=device) % 256  # one top byte
    x[0, 9_407:12_000] = 0x4020 + torch.arange(2_593, device=device) % 3
    x[0] = x[0, torch.randperm(32_768, device=device)]
    check(device, bits(x), 512)


@cases(131_072, 131_073, 262_144, 1 << 20)
def test_a_winners_in_the_first_percent(device: torch.device, case: int) -> None:
    for out in check(device, values("planted", 1, case, K, device, 6), K):
        assert out.positions[0, :16].tolist() == list(range(16))


def test_b_ties_at_the_border_of_rounded_scores(device: torch.device) -> None:
    x = torch.randn(1, 131_072, device=device).to(torch.bfloat16)
    first = check(device, x, K)[0].positions
    for _ in range(20):
        for out in check(device, x, K):
            assert torch.equal(out.positions, first)


def test_b_two_equal_keys_compete_for_the_last_slot(device: torch.device) -> None:
    x = torch.full((1, 40_000), -1.0, device=device)
    x[0, torch.randperm(30_000, device=device)[: K - 1]] = 1
    x[0, [31_234, 39_999]] = 0.5
    out = check(device, x.to(torch.bfloat16), K)[0]
    assert 31_234 in out.positions[0].tolist()
    assert 39_999 not in out.positions[0].tolist()
    lens = torch.tensor([40_000], dtype=torch.int32, device=device)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    again = Outputs(1, K, device)
    for cluster in CLUSTERS:
        use = selector(device, K, 1, 40_000, cluster, False)
        for _ in range(1_100):
            use.topk(x.to(torch.bfloat16), lens, **again.given)
            wrong += (again.positions != out.positions).sum()
    assert int(wrong) == 0


@cases(2050, 2051)
def test_b_a_cut_inside_groups_of_equal_keys(device: torch.device, case: int) -> None:
    check(device, values("pairs", 4, 50_000, case, device, 9), case)


def test_b_a_batch_and_its_slices_agree(device: torch.device) -> None:
    x = values("few", 64, 9_000, K, device, 1)
    lens = torch.full((64,), 9_000, dtype=torch.int32, device=device)
    whole = check(device, x, K, (1,))[0].positions
    for size in (32, 1):
        for first in range(0, 64, size):
            out = Outputs(size, K, device)
            selector(device, K, size, 9_000, 1, False).topk(
                x[first : first + size], lens[first : first + size], **out.given
            )
            assert torch.equal(out.positions, whole[first : first + size])


def test_c_fewer_finite_keys_than_slots(device: torch.device) -> None:
    x = torch.full((1, 5_003), float("-inf"), device=device)
    finite = torch.randperm(5_003, device=device)[:500]
    x[0, finite] = torch.randn(500, device=device)
    for out in check(device, x.to(torch.bfloat16), K):
        chosen = set(out.positions[0].tolist())
        assert set(finite.tolist()) <= chosen
        assert max(chosen) < 5_003


@cases(262_143, 262_145, 262_209)
def test_c_lengths_beside_a_power_of_two(device: torch.device, case: int) -> None:
    check(device, values("relu", 64, case, K, device, 2), K, (1, 2))


def test_d_empty_and_padding_rows_among_others(device: torch.device) -> None:
    for cluster in CLUSTERS:
        run_select(device, "gaussian", K, [0, 5_000, 0, 0, 70_000, 0], 1, cluster, counted=True)
        run_topk(device, "gaussian", K, [0, 5_000, 0, -5, 70_000, 0], cluster, mapped=True, stride=1, at=1)
        run_select(device, "gaussian", K, [9_000, 8_999, 0, 0, 3_000, 12_000, 0, 2_100], 4, cluster, counted=False)


def test_d_short_contexts_are_identities(device: torch.device) -> None:
    lens = list(range(1, 65))
    x = torch.full((64, 64), float("nan"), dtype=torch.bfloat16, device=device)
    out = Outputs(64, K, device)
    short = torch.tensor(lens, dtype=torch.int32, device=device)
    selector(device, K, 64, 64, 1, False).topk(x, short, **out.given)
    out.check(list(x), lens, None)


def test_d_what_lies_past_a_row_never_wins(device: torch.device) -> None:
    x = torch.full((3, 30_000), float("inf"), dtype=torch.bfloat16, device=device)
    lens = [20_001, 2_049, 16_385]
    for t, n in enumerate(lens):
        x[t, :n] = values("gaussian", 1, n, K, device, t)[0]
    given = torch.tensor(lens, dtype=torch.int32, device=device)
    for cluster in CLUSTERS:
        out = Outputs(3, K, device)
        selector(device, K, 3, 30_000, cluster, False).topk(x, given, **out.given)
        out.check(list(x), lens, None)


def test_e_neighbouring_rows_keep_apart(device: torch.device) -> None:
    """Lengths of 1 modulo 256, dense rows, different winners in each."""
    x = torch.randn(16, 4_097, device=device).to(torch.bfloat16)
    for t in range(16):
        x[t, t * 50 : t * 50 + 700] += 30
    for out in check(device, x, 700, (1,)):
        for t in range(16):
            assert torch.equal(out.positions[t], torch.arange(t * 50, t * 50 + 700, dtype=torch.int32, device=device))


def test_j_many_shared_rows_back_to_back(device: torch.device) -> None:
    """A hundred thousand launches of shared rows, without a pause."""
    x = values("gaussian", 2, 20_000, 64, device, 5)
    lens = torch.full((2,), 20_000, dtype=torch.int32, device=device)
    out = Outputs(2, 64, device)
    use = selector(device, 64, 2, 20_000, 8, False)
    use.topk(x, lens, **out.given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(1_000):
            use.topk(x, lens, **out.given)
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize(device)
    out.check(list(x), [20_000] * 2, None)


def test_j_shared_rows_beside_a_kernel_that_holds_the_chip(device: torch.device) -> None:
    x = values("relu", 16, 131_072, K, device, 5)
    lens = torch.full((16,), 131_072, dtype=torch.int32, device=device)
    out = Outputs(16, K, device)
    use = selector(device, K, 16, 131_072, 8, False)
    a = torch.randn(4_096, 4_096, dtype=torch.bfloat16, device=device)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(200):
            a = a @ a * 1e-3
    for _ in range(200):
        use.topk(x, lens, **out.given)
    torch.cuda.synchronize(device)
    want = oracle_positions(x[15], 131_072, K)
    assert torch.equal(out.positions[15], want)
    out.check(list(x), [131_072] * 16, None)
