"""Run a fixed set of tied and random cases and print a digest of every output: ``digest_main.py THREADS``.

Started as a separate process by the determinism tests, so that thread count, hash seed and allocator state differ.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import keysieve as ks
from field.steps import outputs, run_step, spec_of
from keysieve.testing import Case, bits_of, draw_case, pattern_case, random_case


def cases() -> list[Case]:
    """Half-tied rows, a plateau, random bytes in every format with several rows a request, and a few drawn ones."""
    spec = spec_of(topk=512)
    made = [
        pattern_case(spec, "half_tied", [20000, 3000, 513], seed=1),
        pattern_case(spec, "relu_plateau", [40000], seed=2),
    ]
    for key_format in ("fp8_fp32", "fp8_ue8m0", "mxfp4"):
        wide = spec_of(key_format, heads=32, topk=256)
        made.append(random_case(wide, [[3000, 3001, 3002], [900, 0, 257]], next_n=3, seed=3))
    return made + [draw_case(seed, max_requests=3) for seed in range(4)]


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    digest = hashlib.sha256()
    for case in cases():
        for tensor in outputs(run_step(case)).values():
            digest.update(bits_of(tensor).numpy().tobytes())
        scores = ks.score(
            case.spec, case.query, case.index_cache(), case.weights, case.seq_lens, case.index_table, case.max_len
        )
        digest.update(bits_of(scores).numpy().tobytes())
    print(digest.hexdigest())


if __name__ == "__main__":
    main()
