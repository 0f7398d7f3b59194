"""One row of a million keys, step and public score, in a process of its own: prints its peak resident bytes.

``peak_memory_main.py KEYS HEADS``. The pool's bytes are drawn in place, so what the process needs beyond torch and the
132 MB of keys is the library's.
"""

from __future__ import annotations

import sys

import torch

import keysieve as ks
from keysieve.bench.cpu import peak_bytes  # not getrusage's figure, which a process inherits from the one that forks it


def main() -> None:
    keys, heads = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    spec = ks.IndexerSpec(heads=heads, topk=2048, key_format="fp8_ue8m0")
    pages = -(-keys // 64)
    cache = ks.IndexCache.empty(spec, pages=pages, device="cpu")
    gen = torch.Generator().manual_seed(0)
    for first in range(0, pages, 512):
        part = cache.data[first : first + 512]
        part.random_(0, 0x60, generator=gen)  # finite codes, small scales
    query = torch.randint(0, 0x50, (1, heads, 128), generator=gen, dtype=torch.uint8).view(torch.float8_e4m3fn)
    weights = torch.rand(1, heads, generator=gen)
    lengths = torch.tensor([keys], dtype=torch.int32)
    table = torch.randperm(pages, generator=gen).to(torch.int32)[None]
    indexer = ks.DecodeIndexer(spec, max_rows=1, max_context=keys, next_n=1, device="cpu", backend="cpu")
    before = peak_bytes()
    out = indexer(query, cache, weights, lengths, table, positions=True)
    logits = ks.score(spec, query, cache, weights, lengths, table, max_len=keys)
    positions, _ = ks.topk(logits, lengths, 2048)
    assert int(out.counts[0]) == 2048
    assert torch.equal(positions, out.positions)
    print(peak_bytes(), peak_bytes() - before, indexer.workspace_bytes)


if __name__ == "__main__":
    main()
