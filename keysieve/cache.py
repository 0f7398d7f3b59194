"""The paged index cache: allocate, wrap an engine's tensor, append by slots, read back.

A page holds 64 tokens and is *planar*: all key codes of the page, token after token, then all scale words of the page
(``docs/contract.md``, "Index cache"). It is not 64 records of key and scale, although the tensor's shape
``[pages, 64, width]`` looks like it; use the methods here, or :func:`key_plane` and :func:`scale_plane`, rather than
indexing ``data`` by token.
"""

from __future__ import annotations

from typing import Final

import torch

from keysieve.checks import describe, refuse, require_int, require_tensor
from keysieve.quantize import check_write_options, decode_scales, dequantize_keys, quantize_keys
from keysieve.spec import PAGE, IndexerSpec, KeyFormat, require_spec

ALIGNMENT: Final = 16
"""Bytes that a cache's base address and page stride are multiples of, so that kernels may read 16 bytes at a time."""

_MAX_PAGES: Final = 2**31 - 1
_COPY_REMEDY: Final = "Allocate the pool with IndexCache.empty, or view your pool as uint8 [pages, 64, width]."


def bytes_per_token(spec: IndexerSpec) -> int:
    """Index cache bytes a token takes, scale included: 132 (FP8) or 68 (MXFP4). Page padding is not counted."""
    return spec.format.width


def slots_of(index_table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Slots of one request's key positions: ``index_table[position // 64] * 64 + position % 64``.

    Args:
        index_table: int32 or int64 [table pages], the request's page ids in order.
        positions: int64 [n] key positions; a negative one gives slot -1, which :meth:`IndexCache.append` skips.

    Returns:
        int64 [n].
    """
    pages = index_table.to(torch.int64)[(positions.clamp(min=0)) // PAGE]
    return torch.where(positions < 0, torch.full_like(positions, -1), pages * PAGE + positions % PAGE)


def pages_of_blocks(block_table: torch.Tensor, pages_per_block: int) -> torch.Tensor:
    """The index table of a pool whose manager hands out blocks of several consecutive pages.

    Args:
        block_table: int32 [requests, blocks] of block ids.
        pages_per_block: 64-token pages in a block (a manager block of 640 tokens is 10).

    Returns:
        int32 [requests, blocks * pages_per_block]: block b is pages ``b * pages_per_block ..``; a negative id stays
        negative in all its columns.
    """
    require_int("pages_per_block", pages_per_block, 1, _MAX_PAGES, "Give the manager's block size / 64.")
    first = block_table.unsqueeze(-1) * pages_per_block
    pages = first + torch.arange(pages_per_block, dtype=block_table.dtype, device=block_table.device)
    return torch.where(first < 0, first, pages).flatten(-2)


def key_plane(fmt: KeyFormat, data: torch.Tensor) -> torch.Tensor:
    """View of a pool's key codes: uint8 [pages, 64, key_bytes], page stride as in ``data``."""
    return data.as_strided((data.shape[0], PAGE, fmt.key_bytes), (data.stride(0), fmt.key_bytes, 1))


def scale_plane(fmt: KeyFormat, data: torch.Tensor) -> torch.Tensor:
    """View of a pool's scale words as bytes: uint8 [pages, 64, 4], page stride as in ``data``."""
    pages = data.as_strided((data.shape[0], fmt.page_bytes), (data.stride(0), 1))
    return pages[:, fmt.scale_offset :].view(data.shape[0], PAGE, fmt.scale_bytes)


def _check_pool(spec: IndexerSpec, data: torch.Tensor) -> torch.Tensor:
    """``data`` if it is a pool that every backend can read, or a refusal."""
    fmt = spec.format
    require_tensor("tensor", data, dtypes=(torch.uint8,), shape=(None, PAGE, fmt.width), remedy=_COPY_REMEDY)
    if data.stride(2) != 1 or data.stride(1) != fmt.width:
        accepted = f"dense pages: strides (any, {fmt.width}, 1)"
        refuse("tensor strides", got=tuple(data.stride()), accepted=accepted, remedy=_COPY_REMEDY)
    require_int("tensor.shape[0]", data.shape[0], 0, _MAX_PAGES, "Page ids are int32: use fewer pages.")
    stride = data.stride(0)
    if data.shape[0] > 1 and (stride < fmt.page_bytes or stride % ALIGNMENT):
        accepted = f"a multiple of {ALIGNMENT} bytes, at least the {fmt.page_bytes} bytes of a page"
        remedy = "Pad the bytes between pages to a multiple of 16."
        refuse("tensor.stride(0)", got=stride, accepted=accepted, remedy=remedy)
    _check_address(data)
    return data


def _check_address(data: torch.Tensor) -> None:
    """Refuse a pool that does not begin at a multiple of 16 bytes."""
    if torch.compiler.is_compiling():  # tensors without addresses; the operators wrap them again when they run
        return
    if data.shape[0] and data.data_ptr() % ALIGNMENT:
        accepted = f"a multiple of {ALIGNMENT} bytes"
        remedy = "Start the view at a 16-byte boundary, or copy the pool into one from IndexCache.empty."
        refuse("tensor address", got=f"{data.data_ptr() % ALIGNMENT} mod {ALIGNMENT}", accepted=accepted, remedy=remedy)


def _rebuilt(
    kind: type[IndexCache],
    spec: IndexerSpec,
    data: torch.Tensor,
    scale_rounding: str | None,
    fp4_rounding: str,
    amax_floor: float | None,
) -> IndexCache:
    """An unpickled cache: its planes are views of its data again."""
    return kind(spec, data, scale_rounding=scale_rounding, fp4_rounding=fp4_rounding, amax_floor=amax_floor)


class IndexCache:
    """A paged pool of quantised indexer keys, in the bytes that the contract fixes.

    Args:
        spec: the indexer; ``spec.key_format`` is the pool's format.
        tensor: uint8 [pages, 64, width], width 132 (FP8) or 68 (MXFP4); dim 0 may have any stride that is a multiple
            of 16 bytes and at least a page, dims 1 and 2 are dense, the address is 16-byte aligned. It is wrapped, not
            copied: what lies between pages is never touched.
        scale_rounding: ``fp8_fp32`` only: ``"plain"`` (default: ``amax / 448``) or ``"pow2"`` (rounded up to a power
            of two, the byte-portable choice).
        fp4_rounding: ``mxfp4`` only: ``"half_even"`` (default) or ``"half_to_zero"``.
        amax_floor: smallest block maximum assumed; None: 1e-4 (FP8), 6 * 2**-126 (MXFP4).

    The three options govern :meth:`append` alone; readers read any of them.

    Raises:
        KeysieveError: the tensor or an option does not fit; the text says what does.
    """

    def __init__(
        self,
        spec: IndexerSpec,
        tensor: torch.Tensor,
        *,
        scale_rounding: str | None = None,
        fp4_rounding: str = "half_even",
        amax_floor: float | None = None,
    ) -> None:
        require_spec(spec)
        check_write_options(spec.format, scale_rounding, fp4_rounding, amax_floor)
        self._data = _check_pool(spec, tensor)
        self._spec = spec
        self._scale_rounding = scale_rounding
        self._fp4_rounding = fp4_rounding
        self._amax_floor = amax_floor
        self._keys = key_plane(spec.format, tensor)
        self._scales = scale_plane(spec.format, tensor)

    @classmethod
    def empty(
        cls,
        spec: IndexerSpec,
        pages: int,
        device: torch.device | str = "cpu",
        *,
        scale_rounding: str | None = None,
        fp4_rounding: str = "half_even",
        amax_floor: float | None = None,
    ) -> IndexCache:
        """A new pool of ``pages`` dense pages on ``device``, contents undefined until appended to."""
        require_spec(spec)
        require_int("pages", pages, 0, _MAX_PAGES, "Give the number of 64-token pages.")
        tensor = torch.empty((pages, PAGE, spec.format.width), dtype=torch.uint8, device=device)
        return cls(spec, tensor, scale_rounding=scale_rounding, fp4_rounding=fp4_rounding, amax_floor=amax_floor)

    def __reduce__(self) -> tuple[object, ...]:
        # The planes are views of `data`: pickled as they are they would come back as pools of their own.
        options = (self._scale_rounding, self._fp4_rounding, self._amax_floor)
        return _rebuilt, (type(self), self._spec, self._data, *options)

    # --- what it is ------------------------------------------------------------------------------------------------

    @property
    def data(self) -> torch.Tensor:
        """The wrapped tensor itself, uint8 [pages, 64, width]."""
        return self._data

    @property
    def spec(self) -> IndexerSpec:
        return self._spec

    @property
    def format(self) -> KeyFormat:
        return self._spec.format

    @property
    def pages(self) -> int:
        """Pages in the pool; page ids are ``0 .. pages - 1``, slots ``0 .. pages * 64 - 1``."""
        return self._data.shape[0]

    @property
    def device(self) -> torch.device:
        return self._data.device

    @property
    def page_stride(self) -> int:
        """Bytes from one page to the next."""
        return self._data.stride(0) if self.pages > 1 else self.format.page_bytes

    @property
    def bytes_per_token(self) -> int:
        return bytes_per_token(self._spec)

    def __repr__(self) -> str:
        name = self._spec.key_format
        return f"IndexCache({name}, {self.pages} pages of {PAGE} tokens, stride {self.page_stride} B, {self.device})"

    # --- writing ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def append(self, keys: torch.Tensor, slots: torch.Tensor) -> None:
        """Quantise ``keys`` into ``slots``.

        Of several keys for one slot the last (highest row) is stored, on every device and in every run. Scratch is
        proportional to the number of keys, never to the pool; nothing synchronises, so this may be captured in a CUDA
        graph. On a CUDA device a slot beyond the pool is skipped like a negative one, since the host cannot see it.

        Args:
            keys: float32 or bfloat16 [n, 128], any strides, on the cache's device.
            slots: int64 [n], ``page * 64 + token``; negative: the key is skipped.

        Raises:
            KeysieveError: wrong shape, dtype or device, or (cpu) a slot beyond the pool. Nothing has been written.
        """
        float_types = (torch.float32, torch.bfloat16)
        require_tensor("keys", keys, dtypes=float_types, shape=(None, self._spec.head_dim), device=self.device)
        remedy = "Pass one slot per key; cut off the keys of padding tokens, or give them slot -1."
        require_tensor("slots", slots, dtypes=(torch.int64,), shape=(keys.shape[0],), device=self.device, remedy=remedy)
        if self.device.type == "cpu":
            self._refuse_beyond("slots", slots)
        if slots.numel() == 0 or self.pages == 0:
            return
        codes, scales = quantize_keys(
            self._spec,
            keys,
            scale_rounding=self._scale_rounding,
            fp4_rounding=self._fp4_rounding,
            amax_floor=self._amax_floor,
        )
        targets, winners, any_valid = self._resolve(slots)
        page, token = targets // PAGE, targets % PAGE
        # Where no slot is valid at all every lane writes back what slot 0 holds: no data-dependent shapes, no host.
        self._keys[page, token] = torch.where(any_valid, codes[winners], self._keys[page, token])
        self._scales[page, token] = torch.where(any_valid, scales[winners], self._scales[page, token])

    def _resolve(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Per lane a slot to write and the key row to write there, equal slots naming equal rows.

        Lanes with an invalid slot repeat the write of the highest valid slot, so that any order of the writes gives
        the same bytes. Returns targets int64 [n], winners int64 [n] and whether there is any valid slot (bool []).
        """
        invalid = (slots < 0) | (slots >= self.pages * PAGE)
        ordered, order = torch.sort(torch.where(invalid, torch.full_like(slots, -1), slots), stable=True)
        last_of_run = torch.searchsorted(ordered, ordered, right=True) - 1
        winners = order[last_of_run]
        skipped = ordered < 0
        targets = torch.where(skipped, ordered[-1].clamp(min=0), ordered)
        return targets, torch.where(skipped, order[-1], winners), ordered[-1] >= 0

    def _refuse_beyond(self, argument: str, slots: torch.Tensor) -> None:
        """Refuse a slot at or beyond the end of the pool (reads the values)."""
        highest = int(slots.max()) if slots.numel() else -1
        if highest >= self.pages * PAGE:
            accepted = f"slots below {self.pages * PAGE} ({self.pages} pages of {PAGE}), or negative to skip"
            refuse(argument, got=highest, accepted=accepted, remedy="A slot is page id * 64 + token in page.")

    # --- reading back ----------------------------------------------------------------------------------------------

    def codes(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The raw bytes of slots (copies): codes uint8 [n, key_bytes] and scale words uint8 [n, 4].

        Args:
            slots: int64 [n] within the pool, on the cache's device; their values are checked, which synchronises.

        Raises:
            KeysieveError: a slot outside the pool, or not int64 [n].
        """
        require_tensor("slots", slots, dtypes=(torch.int64,), shape=(None,), device=self.device)
        self._refuse_beyond("slots", slots)
        if slots.numel() and int(slots.min()) < 0:
            accepted = f"0..{self.pages * PAGE - 1}"
            refuse("slots", got=int(slots.min()), accepted=accepted, remedy="Only append takes negative slots.")
        page, token = slots // PAGE, slots % PAGE
        return self._keys[page, token], self._scales[page, token]

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """The dequantised keys of slots, float32 [n, 128]; see :meth:`codes` for ``slots`` and errors."""
        codes, scales = self.codes(slots)
        return dequantize_keys(self._spec, codes, scales)

    def page_codes(self, pages: torch.Tensor) -> torch.Tensor:
        """Key codes of whole pages (a copy): uint8 [n, 64, key_bytes]. ``pages``: int32/int64 [n], in the pool."""
        flat = self._keys.view(self.pages, PAGE * self.format.key_bytes)
        return flat.index_select(0, pages).view(-1, PAGE, self.format.key_bytes)

    def page_scales(self, pages: torch.Tensor) -> torch.Tensor:
        """Decoded scales of whole pages (a copy): float32 [n, 64] (FP8) or [n, 64, 4] (MXFP4, one per 32 elements)."""
        flat = self._scales.view(self.pages, PAGE * self.format.scale_bytes)
        words = flat.index_select(0, pages).view(-1, PAGE, self.format.scale_bytes)
        return decode_scales(self.format, words)


def require_cache(spec: IndexerSpec, cache: object, device: torch.device | None = None) -> IndexCache:
    """``cache`` if it is an :class:`IndexCache` of ``spec``'s format (and on ``device``), or a refusal.

    The heads and topk of the cache's own spec do not matter: several indexers may read one pool.
    """
    if not isinstance(cache, IndexCache):
        remedy = "Wrap the tensor: IndexCache(spec, tensor)."
        refuse("cache", got=describe(cache), accepted="an IndexCache", remedy=remedy)
    if cache.format != spec.format:
        got = f"{cache.format.name} ({cache.format.width} bytes a token)"
        accepted = f"{spec.key_format} ({spec.format.width} bytes a token)"
        remedy = "Build the cache and the indexer with the same key_format."
        refuse("cache", got=got, accepted=accepted, remedy=remedy)
    if device is not None and cache.device != device:
        remedy = "Keep the cache on the indexer's device."
        refuse("cache", got=f"on {cache.device}", accepted=f"on {device}", remedy=remedy)
    _check_address(cache.data)  # not looked at where the cache was made while torch.compile traced
    return cache
