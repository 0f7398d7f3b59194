"""Bits of the device flag word that kernels raise and the host reads. No cutlass here."""

FLAG_BAD_PAGE = 0
"""A needed page id was outside the pool; nothing was read, and the logits of its keys are NaN."""
FLAG_BAD_LENGTH = 1
"""A length beyond the page table or max_context; its row is treated as empty."""
FLAG_OVERFLOW = 2
"""The step needs more logits than the buffer holds; requests that do not fit whole are treated as empty."""
FLAG_BAD_OWNER = 3
"""A row_request outside the KV block table; its row is treated as empty."""
FLAG_RANKS_DIFFER = 4
"""Context-parallel ranks made different calls; by all-gather, where no kernel can wait or trap, all rows are empty."""

TEXTS = {
    FLAG_BAD_PAGE: "index_table held a page id outside the cache; the logits of that page's keys became NaN",
    FLAG_BAD_LENGTH: "seq_lens held a length beyond the page table or max_context; its row was left empty",
    FLAG_OVERFLOW: "the step needed more logits than max_total_keys allows; the requests beyond it were left empty",
    FLAG_BAD_OWNER: "row_request named a row outside kv_table; its row was left empty",
    FLAG_RANKS_DIFFER: "context-parallel ranks made different calls (rows, site or lengths); all rows were left empty",
}


def describe(word: int) -> str:
    """What a flag word says, empty for 0."""
    return "; ".join(text for bit, text in TEXTS.items() if word >> bit & 1)
