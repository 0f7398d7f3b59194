"""A rank's best keys of every row, as candidate rows: what context-parallel ranks send each other.

A candidate row of N entries is int32 ``[N + planes * ceil(N / 32)]``:

* word j < N is ``key16 << 16 | (0xFFFF - (l & 0xFFFF))`` for local index l, or 0 when empty;
* bit ``j % 32`` of word ``N + p * ceil(N / 32) + j // 32`` is bit ``16 + p`` of entry j's local index.

``planes`` is fixed by the longest local length any rank can have, so all ranks and steps use the same. Entries are in
ascending local index, empty ones last. (The rule is section 6 of the contract.)
"""

from __future__ import annotations

import torch

from keysieve.checks import describe, refuse, require_int, require_tensor
from keysieve.reference.keys import key16
from keysieve.reference.topk import topk
from keysieve.spec import MAX_TOPK, candidate_words

MAX_PLANES = 10
"""Local indices of 26 bits: the longest context that can be planned for, on one rank."""


def local_topk(
    logits: torch.Tensor, local_lens: torch.Tensor, n: int, planes: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's first ``min(n, local length)`` keys by (logit descending, local index ascending).

    Args:
        logits: BF16 ``[rows, length]``, unit stride in the last dimension; this rank's keys by local index.
        local_lens: int32 or int64 ``[rows]`` or ``[requests, next_n]``; keys of each row on this rank, 0 or
            less for none.
        n: entries of a candidate row, 1..4096.
        planes: bit planes for the local index above its low 16 bits, 1..10.

    Returns:
        ``(words, counts)``: candidate rows int32 ``[rows, n + planes * ceil(n / 32)]`` and int32 ``[rows]``.

    Raises:
        KeysieveError: a wrong dtype or shape, a row longer than its logits, or with more keys than ``planes`` can
            index.
    """
    logits, local_lens = check_local_topk(logits, local_lens, n, planes)
    longest = int(local_lens.max()) if local_lens.numel() else 0
    if longest > logits.shape[1]:
        # Left empty on this rank alone, the row would lose winners in the merge.
        refuse(
            "local_lens",
            got=f"a row of {longest} local keys for logits of {logits.shape[1]} columns",
            accepted=f"at most {logits.shape[1]}",
            remedy="Score all of this rank's keys of every row.",
        )
    if longest > 1 << (16 + planes):
        refuse(
            "planes",
            got=f"{planes} for a row of {longest} local keys",
            accepted=f"up to {1 << (16 + planes)} local keys with {planes} plane(s)",
            remedy="Use keysieve.spec.index_planes(longest local length) on every rank.",
        )
    picked, counts = topk(logits, local_lens, n)
    local = picked.to(torch.int64)
    keys = key16(logits.gather(1, local.clamp_min(0))) if logits.shape[1] else torch.zeros_like(picked)
    keys = torch.where(local < 0, torch.zeros_like(keys), keys)
    return pack_candidates(keys, local, planes), counts


def check_local_topk(
    logits: torch.Tensor, local_lens: torch.Tensor, n: int, planes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors of a :func:`local_topk` call, lengths flattened, if dtypes, shapes and numbers are accepted."""
    require_int("n", n, 1, MAX_TOPK, "Offer between topk / world and topk candidates a row.")
    require_planes(planes)
    kinds = (torch.int32, torch.int64)
    logits = require_tensor("logits", logits, dtypes=(torch.bfloat16,), shape=(None, None), unit_inner=True)
    if isinstance(local_lens, torch.Tensor) and local_lens.dim() == 2 and local_lens.numel() == logits.shape[0]:
        local_lens = local_lens.reshape(-1)  # as local_seq_lens gives them for [requests, next_n]
    local_lens = require_tensor("local_lens", local_lens, dtypes=kinds, shape=(logits.shape[0],), device=logits.device)
    return logits, local_lens


def require_planes(planes: object) -> int:
    """``planes`` if candidate rows can have that many bit planes, or a refusal."""
    remedy = "Use keysieve.spec.index_planes(longest local length), the same on all ranks."
    return require_int("planes", planes, 1, MAX_PLANES, remedy)


def pack_candidates(keys: torch.Tensor, local: torch.Tensor, planes: int) -> torch.Tensor:
    """Candidate rows from key16 values and local indices, both integer ``[..., n]``; key16 0 marks an empty entry.

    Returns int32 ``[..., n + planes * ceil(n / 32)]``. Entries are packed in the order given.
    """
    keys = keys.to(torch.int64)
    live = keys > 0
    local = torch.where(live, local.to(torch.int64), 0)
    head = torch.where(live, keys << 16 | (0xFFFF - (local & 0xFFFF)), 0)
    n = keys.shape[-1]
    groups = -(-n // 32)
    padded = torch.nn.functional.pad(local, (0, groups * 32 - n)).reshape(*local.shape[:-1], groups, 32)
    place = torch.arange(32, device=keys.device)
    tail = [(((padded >> (16 + p)) & 1) << place).sum(-1) for p in range(planes)]
    return _as_int32(torch.cat([head, *tail], dim=-1))


def unpack_candidates(words: torch.Tensor, planes: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The key16 values and local indices in candidate rows int32 ``[..., words]``; both int64 ``[..., n]``.

    An empty entry has key16 0 and local index -1.
    """
    n = entries_of(words.shape[-1], planes)
    wide = words.to(torch.int64) & 0xFFFFFFFF
    keys = wide[..., :n] >> 16
    local = 0xFFFF - (wide[..., :n] & 0xFFFF)
    groups = -(-n // 32)
    place = torch.arange(32, device=words.device)
    for p in range(planes):
        plane = wide[..., n + p * groups : n + (p + 1) * groups]
        bits = (plane.unsqueeze(-1) >> place & 1).flatten(-2)[..., :n]
        local = local | bits << (16 + p)
    return keys, torch.where(keys > 0, local, -1)


def entries_of(words: int, planes: int) -> int:
    """How many entries a candidate row of ``words`` int32 words has, or a refusal if no row is that long."""
    most = words * 32 // (32 + planes)
    fitting = [n for n in range(max(most - planes, 1), most + 1) if candidate_words(n, planes) == words]
    if not fitting:
        refuse(
            "words",
            got=f"candidate rows of {words} int32 words with planes={planes}",
            accepted="n + planes * ceil(n / 32) words",
            remedy="Pass the candidate rows of local_topk unchanged, and the planes they were made with.",
        )
    return fitting[0]


def require_candidates(argument: str, words: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """``words`` of all ranks as one int32 ``[world, rows, words]`` tensor."""
    accepted = "int32 [world, rows, words], or a list of world tensors [rows, words]"
    listed = words if isinstance(words, list | tuple) else [words]
    if not listed or not all(isinstance(w, torch.Tensor) for w in listed):
        got = ", ".join(type(w).__name__ for w in listed) or "an empty list"
        refuse(argument, got=got, accepted=accepted, remedy="Pass the candidate rows of all ranks in rank order.")
    if isinstance(words, list | tuple):
        shapes = {tuple(w.shape) for w in words}
        if len(shapes) != 1:
            refuse(
                argument,
                got=f"candidate rows of shapes {sorted(shapes)}",
                accepted="one shape [rows, words] on all ranks",
                remedy="Call every rank with the same rows, n and planes.",
            )
        words = torch.stack(list(words))
    if words.dim() != 3:
        refuse(
            argument,
            got=describe(words),
            accepted=accepted,
            remedy="Stack the candidate rows of all ranks in rank order.",
        )
    return require_tensor(argument, words, dtypes=(torch.int32,), shape=(None, None, None))


def _as_int32(wide: torch.Tensor) -> torch.Tensor:
    """Unsigned 32-bit values held in int64, as the int32 of the same bits."""
    return torch.where(wide >= 1 << 31, wide - (1 << 32), wide).to(torch.int32)
