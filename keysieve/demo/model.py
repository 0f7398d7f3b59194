"""The demo's model and text: a small ``glm_moe_dsa`` of transformers with seeded random weights, reading bytes."""

from __future__ import annotations

import inspect
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import nn

DEFAULT_TEXT = "tide_tables.txt"


def read_text(path: Path | None) -> bytes:
    """The bytes of ``path``, or of the text that ships with keysieve."""
    if path is not None:
        return path.read_bytes()
    return resources.files("keysieve.demo").joinpath(DEFAULT_TEXT).read_bytes()


def build_model(*, topk: int, context: int, heads: int = 32, seed: int = 0) -> nn.Module:
    """A four-layer model over bytes, in eval mode; three layers index, the third reuses the second's selection.

    The indexer is as in GLM-5: 32 heads of 128, interleaved RoPE on 64 of them. Everything around it is narrow. The
    weights are random, so the model has nothing to say; what it attends to is what its random indexers rank first.
    """
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    torch.manual_seed(seed)
    config = GlmMoeDsaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=2,
        kv_lora_rank=64,
        q_lora_rank=64,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        index_n_heads=heads,
        index_head_dim=128,
        index_topk=topk,
        index_topk_pattern="FFSF",
        max_position_embeddings=max(context, 64),
        initializer_range=0.08,
        # Bytes have no special tokens.
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    config._attn_implementation = "eager"
    model: nn.Module = GlmMoeDsaForCausalLM(config).eval()
    return model


class Reader:
    """Feeds bytes to a model, a few at a time, and keeps its cache."""

    def __init__(self, model: nn.Module):
        from transformers import DynamicCache

        self._model = model
        # transformers 5.24 calls the argument cache, earlier ones past_key_values.
        names = inspect.signature(model.forward).parameters
        self._name = "cache" if "cache" in names else "past_key_values"
        self._cache = DynamicCache(config=model.config)

    def feed(self, text: bytes) -> torch.Tensor:
        """Run the model on the next bytes; its next-byte logits, float ``[1, 1, 256]``."""
        ids = torch.tensor([list(text)])
        arguments: dict[str, Any] = {self._name: self._cache, "use_cache": True, "logits_to_keep": 1}
        with torch.no_grad():
            logits: torch.Tensor = self._model(input_ids=ids, **arguments).logits
        return logits
