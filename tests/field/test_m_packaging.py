"""Kind M: imports, architecture gates, and refusals that name what cannot be served.

The rest of the kind lies beside what it is about: M1, M2 tests/compile/test_kernel_cache.py; M3, M4
tests/contract/test_host_variants.py; M6, M7 tests/compile/test_toolchain.py; M11 tests/compile/test_cli_compile.py.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import keysieve as ks
from field.steps import spec_of

IMPORT_PROBE = """
import sys, torch
base = set(sys.modules)
import keysieve
new = {name.split('.')[0] for name in set(sys.modules) - base}
assert not torch.cuda.is_initialized()
for heavy in ('cutlass', 'transformers', 'matplotlib', 'rich', 'triton', 'cuda'):
    assert heavy not in new, heavy
spec = keysieve.IndexerSpec(heads=32, topk=2048)
assert keysieve.supports(spec, next_n=4, backend='cpu', device='cpu') is None
why = keysieve.supports(spec, next_n=4, backend='auto', device='cuda')
assert isinstance(why, str) and why, why
for backend in ('sm90', 'sm100'):
    assert isinstance(keysieve.supports(spec, backend=backend), str)
try:
    keysieve.DecodeIndexer(spec, max_rows=1, max_context=64, device='cuda')
except keysieve.KeysieveError as refusal:
    assert why in str(refusal), (why, str(refusal))
else:
    raise AssertionError('an indexer for a device that does not exist')
assert not torch.cuda.is_initialized()
print('fine')
"""


def test_m5_import_needs_no_device_and_makes_no_context() -> None:
    """No GPU is visible: the import works, initialises nothing, loads no DSL; a CUDA indexer is refused with reasons.

    The reason that ``supports`` gives is the text the error carries; there is no fallback to another device.
    """
    environment = dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_PROBE], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "fine"


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    """Make torch report one CUDA device of that compute capability."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, **__: (major, minor))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_, **__: f"pretended sm_{major}{minor}")


@pytest.mark.parametrize(("major", "minor"), [(7, 5), (8, 0), (8, 9), (11, 0), (12, 0), (12, 1), (13, 0)])
@pytest.mark.parametrize("backend", ["auto", "sm90", "sm100"])
def test_m8_architectures_are_allowed_by_name(
    monkeypatch: pytest.MonkeyPatch, backend: str, major: int, minor: int
) -> None:
    """A gate that excludes what is known to be too old lets unknown chips in: every other capability is refused.

    The reason names what was found, and what is served.
    """
    pretend_gpu(monkeypatch, major, minor)
    why = ks.supports(spec_of(heads=32), next_n=1, backend=backend, device="cuda")
    assert isinstance(why, str)
    assert f"{major}.{minor}" in why or f"sm_{major}{minor}" in why or f"({major}, {minor})" in why
    with pytest.raises(ks.UnsupportedError):
        ks.DecodeIndexer(spec_of(heads=32), max_rows=1, max_context=64, backend=backend, device="cuda")


@pytest.mark.parametrize(("major", "minor", "backend", "other"), [(9, 0, "sm90", "sm100"), (10, 0, "sm100", "sm90")])
def test_m8_one_backend_does_not_serve_the_others_chip(
    monkeypatch: pytest.MonkeyPatch, major: int, minor: int, backend: str, other: str
) -> None:
    """Hopper's kernels do not run on Blackwell, nor the other way round: refused, with the one that does."""
    pretend_gpu(monkeypatch, major, minor)
    why = ks.supports(spec_of(heads=32), backend=other, device="cuda")
    assert isinstance(why, str)
    assert f"got '{other}'" in why
    assert f"accepted: '{backend}'" in why


@pytest.mark.parametrize("backend", ["cuda", "triton", "sm80", "SM90", ""])
def test_m8_a_backend_that_does_not_exist(backend: str) -> None:
    """An unknown name is an error that lists the names, not a guess."""
    with pytest.raises(ks.KeysieveError, match="backend") as refusal:
        ks.DecodeIndexer(spec_of(), max_rows=1, max_context=64, device="cpu", backend=backend)
    for name in ("auto", "cpu", "sm90", "sm100"):
        assert name in str(refusal.value)


@pytest.mark.parametrize("page", [1, 16, 32, 63, 65, 128, 256, 0, -64])
def test_m9_other_page_sizes_name_the_allowed_one(page: int) -> None:
    """Hidden page-size needs surface as garbage: 64, and a refusal that says so, in the spec and in a cache."""
    with pytest.raises(ks.KeysieveError, match=r"page.*64"):
        ks.IndexerSpec(heads=32, topk=2048, page=page)
    if page > 0:
        with pytest.raises(ks.KeysieveError, match="64") as refusal:
            ks.IndexCache(spec_of(), torch.zeros(3, page, 132, dtype=torch.uint8))
        assert str(page) in str(refusal.value)


@pytest.mark.parametrize("topk", [0, -1, 4097, 65536, 2048.0, "2048", True, None])
def test_m10_an_unsupported_topk_is_named(topk: object) -> None:
    """An error about something else sends the reader elsewhere: the refusal names topk, the value and the range."""
    with pytest.raises(ks.KeysieveError, match=r"topk.*1\.\.4096") as refusal:
        ks.IndexerSpec(heads=32, topk=topk)  # type: ignore[arg-type]  # wrong types are part of the case
    assert str(topk) in str(refusal.value)


@pytest.mark.parametrize("k", [0, -1, 4097, 2.0, None])
def test_m10_the_public_top_k_names_k(k: object) -> None:
    """The same for ``topk(logits, lengths, k)``, whose argument is called k."""
    logits, lengths = torch.zeros(2, 64, dtype=torch.bfloat16), torch.tensor([64, 3], dtype=torch.int32)
    with pytest.raises(ks.KeysieveError, match=r"\bk\b.*4096"):
        ks.topk(logits, lengths, k)  # type: ignore[arg-type]  # wrong types are part of the case
