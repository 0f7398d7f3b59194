"""The way to the Blackwell scorer: which configuration a spec means, what is refused, which integers are launched."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch

import keysieve as ks
from keysieve import backends, sm100
from keysieve.checks import KeysieveError
from keysieve.kernels import score_words_host, sm100_score_config
from keysieve.launch import ARCH_OF_CAPABILITY


def arguments(config: sm100_score_config.ScoreConfig, requests: int) -> list[torch.Tensor]:
    rows, form = requests * config.next_n, config.format
    return [
        torch.zeros(rows, config.heads, form.query_width, dtype=torch.uint8),
        torch.zeros(5, 64, form.width, dtype=torch.uint8),
        torch.zeros(rows, config.heads),
        torch.zeros(rows, dtype=torch.int32),
        torch.zeros(requests, 7, dtype=torch.int32),
    ]


def names_of_the_entry() -> list[str]:
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed (extra: gpu)")
    from keysieve.kernels.sm100_score import ScoreKernel

    return list(inspect.signature(ScoreKernel.entry).parameters)[1:-1]  # without self and the stream


@pytest.mark.parametrize("key_format", ["fp8_fp32", "mxfp4"])
def test_the_integers_mean_what_the_entry_names(key_format: str) -> None:
    config = sm100_score_config.ScoreConfig(key_format, "bf16", 32, 2, "compact", "float32")
    query, cache, weights, lens, table = arguments(config, 3)
    words = torch.zeros(6, 32, dtype=torch.int32) if key_format == "mxfp4" else None
    logits, tops = torch.empty(4096, dtype=torch.bfloat16), torch.empty(512, dtype=torch.int16)
    starts, flags = torch.empty(4, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    calls: list[tuple[int, ...]] = []
    score_words_host.score_compact(
        lambda *integers: calls.append(integers),
        config,
        *(query, cache, weights, lens, table),
        topk=100,
        max_context=10_000,
        logits=logits,
        tops=tops,
        starts=starts,
        flags=flags,
        blocks=148,
        chained=True,
        words=words,
    )
    (integers,) = calls
    given = dict(zip(names_of_the_entry(), integers, strict=True))
    tensors = {"keys": cache, "query": query, "weights": weights, "lens": lens, "table": table}
    tensors |= {"logits": logits, "tops": tops, "starts": starts, "flags": flags}
    for name, tensor in tensors.items():
        assert given[name] == tensor.data_ptr(), name
    assert given["words"] == (0 if words is None else words.data_ptr())
    assert given["page_stride"] == config.format.page_bytes
    assert (given["table_stride"], given["pages"], given["requests"]) == (7, 5, 3)
    assert (given["limit"], given["skip"]) == (7 * 64, 100)
    assert given["capacity"] == 4096 // 256
    assert (given["blocks"], given["use_pdl"]) == (148, 1)


def test_pitched_launches_have_the_pitch_and_no_tops() -> None:
    config = sm100_score_config.ScoreConfig("mxfp4", "fp32", 8, 1, "pitched", "bfloat16")
    logits = torch.empty(2, 1024, dtype=torch.bfloat16)
    calls: list[tuple[int, ...]] = []
    score_words_host.score_pitched(
        lambda *integers: calls.append(integers),
        config,
        *arguments(config, 2),
        max_context=300,
        logits=logits,
        flags=torch.zeros(1, dtype=torch.int32),
        blocks=132,
        words=torch.zeros(2, 8, dtype=torch.int32),
    )
    given = dict(zip(names_of_the_entry(), calls[0], strict=True))
    assert (given["pitch"], given["tops"], given["starts"], given["skip"], given["limit"]) == (1024, 0, 0, 0, 300)


def test_scale_words_must_be_contiguous() -> None:
    config = sm100_score_config.ScoreConfig("mxfp4", "fp32", 8, 1, "pitched", "float32")
    with pytest.raises(KeysieveError, match="scale words"):
        score_words_host.score_pitched(
            lambda *_integers: pytest.fail("launched"),
            config,
            *arguments(config, 2),
            max_context=300,
            logits=torch.empty(2, 1024, dtype=torch.bfloat16),
            flags=torch.zeros(1, dtype=torch.int32),
            blocks=132,
            words=torch.zeros(2, 16, dtype=torch.int32)[:, ::2],
        )


def test_the_backend_serves_what_the_kernel_admits() -> None:
    backend = sm100.Sm100Backend()
    admitted = set(sm100_score_config.KERNEL.admitted("sm_100a"))
    for config in admitted:
        spec = ks.IndexerSpec(config.heads, 2048, config.key_format, numerics=config.numerics)
        assert backend._no_scorer(spec, config.next_n) is None
        assert backend.score_config(spec, config.next_n, config.layout, config.weights) == config
    spec = ks.IndexerSpec(32, 2048, "mxfp4")
    assert backend.score_config(spec, 1, "compact", "float32").numerics == "bf16", "the default on Blackwell"
    assert "next_n 9" in str(backend._no_scorer(spec, 9))


def test_blackwells_lead_here() -> None:
    served = [capability for capability, name in backends.ARCHITECTURES.items() if name == "sm100"]
    assert served
    assert {ARCH_OF_CAPABILITY[capability] for capability in served} == set(sm100_score_config.KERNEL.archs)
    assert backends.load("sm100").name == "sm100"


def test_it_says_that_nobody_has_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = sm100.Sm100Backend()
    kernel = backend.scorer(ks.IndexerSpec(64, 2048, "mxfp4"))[0]
    monkeypatch.setattr("keysieve.gpu.Launcher", lambda *_args: object())
    with pytest.warns(sm100.UntriedWarning, match="not run") as told:
        backend.launcher(torch.device("cuda", 0), kernel, "one")
    assert told.pop(sm100.UntriedWarning).filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backend.launcher(torch.device("cuda", 0), kernel, "two")


def test_mxfp4_without_scale_words_is_refused_before_the_launch() -> None:
    config = sm100_score_config.ScoreConfig("mxfp4", "fp32", 8, 1, "pitched", "bfloat16")
    calls: list[tuple[int, ...]] = []
    with pytest.raises(KeysieveError, match="scale words"):
        score_words_host.score_pitched(
            lambda *integers: calls.append(integers),
            config,
            *arguments(config, 2),
            max_context=300,
            logits=torch.empty(2, 1024, dtype=torch.bfloat16),
            flags=torch.zeros(1, dtype=torch.int32),
            blocks=148,
        )
    assert not calls
