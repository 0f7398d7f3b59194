"""Small, randomly initialised models of every transformers class the integration is meant for.

Only widths are small: the classes, their attention, their caches and their indexers are transformers' own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

VOCABULARY = 96

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "initializer_range": 0.2,
    "max_position_embeddings": 4096,
    "index_head_dim": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    # No end-of-text token: generation in the tests runs its full length.
    "eos_token_id": None,
}
_VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@dataclass(frozen=True)
class Family:
    """How to make a tiny model of one class.

    Attributes:
        config: the text configuration's class.
        model: the model's class.
        layers: decoder layers.
        indexers: how many of them run an indexer of their own.
        settings: on top of the common ones.
        attentions: the attention implementations the class has.
        outer: for classes with a vision tower: the outer configuration's class, the tower's, and its settings.
    """

    config: str
    model: str
    layers: int
    indexers: int
    settings: dict[str, Any] = field(default_factory=dict)
    attentions: tuple[str, ...] = ("eager", "sdpa")
    outer: tuple[str, str, dict[str, Any]] | None = None

    @property
    def present(self) -> bool:
        """Whether the installed transformers has this class (5.17 lacks some that 5.24 has)."""
        return hasattr(transformers, self.model)

    def build(self, *, heads: int = 8, topk: int = 24, attention: str = "eager", seed: int = 0) -> nn.Module:
        """A model in eval mode with float32 weights."""
        torch.manual_seed(seed)
        settings = _COMMON | {"index_n_heads": heads, "index_topk": topk} | self.settings
        settings = {name: value for name, value in settings.items() if value != "absent"}
        config = getattr(transformers, self.config)(num_hidden_layers=self.layers, **settings)
        if self.outer is not None:
            outer, vision, extra = self.outer
            tower = getattr(transformers, vision)(**_VISION | extra)
            config = getattr(transformers, outer)(text_config=config, vision_config=tower)
        config._attn_implementation = attention
        model: nn.Module = getattr(transformers, self.model)(config).eval()
        return model


FAMILIES = {
    "deepseek_v32": Family("DeepseekV32Config", "DeepseekV32ForCausalLM", 2, 2, {"first_k_dense_replace": 1}),
    # "F" runs its own indexer, "S" reuses the selection of the layer before it.
    "glm_moe_dsa": Family(
        "GlmMoeDsaConfig",
        "GlmMoeDsaForCausalLM",
        3,
        2,
        {"first_k_dense_replace": 1, "index_topk_pattern": "FSF"},
    ),
    "axk2": Family("AXK2Config", "AXK2ForCausalLM", 2, 2, {"first_k_dense_replace": 1}),
    "hy_v4": Family(
        "HYV4Config",
        "HYV4ForCausalLM",
        3,
        2,
        {"indexer_types": ["full", "full", "shared"]},
        attentions=("eager",),
    ),
    "hy_v4_vl": Family(
        "HYV4VLTextConfig",
        "HYV4VLForConditionalGeneration",
        3,
        2,
        {"indexer_types": ["full", "full", "shared"]},
        attentions=("eager",),
        outer=("HYV4VLConfig", "HYV4VLVisionConfig", {"out_hidden_size": 64, "max_image_size": 64}),
    ),
    "dots3_note": Family(
        "Dots3NoteTextConfig",
        "Dots3NoteForCausalLM",
        3,
        2,
        {
            "first_k_dense_replace": 1,
            "shared_experts_intermediate_size": 32,
            "layer_types": ["indexed_attention", "sliding_attention", "indexed_attention"],
            "sliding_window_size": 16,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_q_lora_rank": 32,
            "swa_kv_lora_rank": 32,
            "head_dim": 80,
        },
    ),
    "mistral_large4": Family(
        "MistralLarge4TextConfig",
        "MistralLarge4ForConditionalGeneration",
        3,
        2,
        {
            "index_topk_pattern": "FFS",
            # The second layer's indexer has no RoPE.
            "no_rope_layers": [1, 0, 1],
            "first_k_dense_replace": 1,
            "q_lora_rank": "absent",
        },
        outer=("MistralLarge4Config", "PixtralVisionConfig", {"head_dim": 16, "image_size": 32, "patch_size": 16}),
    ),
}
