"""The contract: key formats, page bytes, limits, order and special values.

This module imports nothing but the error helpers and the standard library, so that the kernels, the reference and the
tools all read the same constants. Everything here is observable in bytes and is covered by tests;
``docs/contract.md`` is the same contract in prose.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from keysieve.checks import refuse, require_choice, require_int

HEAD_DIM: Final = 128
"""Elements of one indexer key and of one head of an indexer query."""

PAGE: Final = 64
"""Tokens a page of the index cache holds."""

TILE: Final = 128
"""Keys in one unit of scoring work: two pages."""

GROUP: Final = 8
"""Keys that share one entry of ``tops``, the largest key16 of an aligned group."""

PITCH_MULTIPLE: Final = 512
"""The pitch of a pitched logits buffer is a multiple of this many elements."""

HEADS: Final = (8, 16, 32, 64)
MAX_NEXT_N: Final = 8
MAX_TOPK: Final = 4096
MAX_WORLD: Final = 16
MAX_REQUESTS: Final = 4096
MAX_CONTEXT: Final = 1 << 26
"""Largest context that can be planned for, in keys. Positions and physical rows are int32."""

AMAX_FLOOR_FP8: Final = 1e-4
"""Smallest block maximum assumed by the FP8 writers, so that an all-zero block gets a finite scale."""

AMAX_FLOOR_MXFP4: Final = 6.0 * 2.0**-126
FP8_MAX: Final = 448.0
"""Largest finite E4M3 value."""

FP4_MAX: Final = 6.0
"""Largest E2M1 value."""

MX_BLOCK: Final = 32
"""Elements that share one UE8M0 scale in MXFP4."""

NUMERICS: Final = ("fp32", "bf16")
BACKENDS: Final = ("cpu", "sm90", "sm100")


@dataclass(frozen=True)
class KeyFormat:
    """Bytes of one index cache format (2-D planar page: all keys of a page, then all scales of the page).

    Attributes:
        name: the format's name, as in ``IndexerSpec.key_format``.
        key_bytes: bytes of one token's key codes (128 E4M3 codes, or 64 bytes of two E2M1 codes each).
        scale_bytes: bytes of one token's scale word (always one 32-bit word).
        scale_kind: ``"fp32"``, ``"ue8m0"`` (four equal bytes) or ``"ue8m0x4"`` (one byte per 32 elements).
    """

    name: str
    key_bytes: int
    scale_bytes: int
    scale_kind: str

    @property
    def width(self) -> int:
        """Bytes a token takes: the last dimension of the cache tensor."""
        return self.key_bytes + self.scale_bytes

    @property
    def scale_offset(self) -> int:
        """Byte offset of the scale plane inside a page."""
        return PAGE * self.key_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, without any padding between pages."""
        return PAGE * self.width

    @property
    def is_fp8(self) -> bool:
        return self.key_bytes == HEAD_DIM

    @property
    def query_width(self) -> int:
        """Last dimension of the query codes: 128 E4M3 codes or 64 bytes of E2M1 pairs."""
        return self.key_bytes


FORMATS: Final[dict[str, KeyFormat]] = {
    "fp8_ue8m0": KeyFormat("fp8_ue8m0", key_bytes=128, scale_bytes=4, scale_kind="ue8m0"),
    "fp8_fp32": KeyFormat("fp8_fp32", key_bytes=128, scale_bytes=4, scale_kind="fp32"),
    "mxfp4": KeyFormat("mxfp4", key_bytes=64, scale_bytes=4, scale_kind="ue8m0x4"),
}

# --- order ---------------------------------------------------------------------------------------------------------

KEY16_EMPTY: Final = 0
"""Never the image of a logit: marks an empty candidate."""

CANONICAL_NAN: Final = 0xFFC0
"""The BF16 bits every NaN logit is stored as; its key16 is 0x003F, below the 0x007F of -inf and above empty."""

KEY16_NAN: Final = 0x003F
KEY16_NEG_INF: Final = 0x007F
KEY16_ZERO: Final = 0x8000
KEY16_POS_INF: Final = 0xFF80


def key16(bits: int) -> int:
    """The order-preserving unsigned image of BF16 ``bits`` (0..0xFFFF) that are already canonical: larger is better.

    Canonical means that -0 is +0 and every NaN is :data:`CANONICAL_NAN`; :func:`canonical_bits` makes them so.
    """
    return bits ^ 0xFFFF if bits & 0x8000 else bits ^ 0x8000


def bits_of_key16(key: int) -> int:
    """The BF16 bits whose :func:`key16` is ``key``."""
    return key ^ 0x8000 if key & 0x8000 else key ^ 0xFFFF


def canonical_bits(bits: int) -> int:
    """BF16 ``bits`` with -0 turned into +0 and every NaN into :data:`CANONICAL_NAN`."""
    if bits & 0x7FFF > 0x7F80:
        return CANONICAL_NAN
    return 0 if bits == 0x8000 else bits


def selected_count(seq_len: int, topk: int) -> int:
    """Keys a row selects: ``min(max(seq_len, 0), topk)``."""
    return min(max(seq_len, 0), topk)


# --- geometry of logits and of candidate rows ----------------------------------------------------------------------


def request_tiles(longest: int, topk: int | None) -> int:
    """Tiles of 128 keys a request is scored in, ``longest`` being the largest ``seq_lens`` of its rows.

    With ``topk`` (tensor parallel, compact layout) a request whose rows all fit ``topk`` is not scored at all; with
    ``None`` (decode context parallel, pitched layout, public ``score``) every request is.
    """
    longest = max(longest, 0)
    if topk is not None and longest <= topk:
        return 0
    return -(-longest // TILE)


def pitch_of(max_len: int) -> int:
    """Elements from one row to the next in a pitched logits buffer that holds rows of up to ``max_len`` keys."""
    return max(1, -(-max_len // PITCH_MULTIPLE)) * PITCH_MULTIPLE


def index_planes(max_local_len: int) -> int:
    """Bit planes a candidate row needs so that local indices below ``max_local_len`` can be written: at least 1."""
    return max(1, (max(max_local_len, 1) - 1).bit_length() - 16)


def candidate_words(n: int, planes: int) -> int:
    """int32 words of a candidate row of ``n`` entries with ``planes`` index planes above the low 16 bits."""
    return n + planes * -(-n // 32)


def default_topn(topk: int, world: int) -> int:
    """The default candidates a rank offers: ``topk/W + 6 * sqrt(topk/W)`` rounded up to 32, at most ``topk``.

    With fewer, ranks would be rescued often; see ``docs/dcp.md``.
    """
    if world <= 1:
        return topk
    share = topk / world
    return min(topk, -(-math.ceil(share + 6.0 * math.sqrt(share)) // 32) * 32)


@dataclass(frozen=True)
class IndexerSpec:
    """What a model's lightning indexer is: the part of a problem that does not change between steps.

    Args:
        heads: indexer heads, one of 8, 16, 32, 64.
        topk: keys to select per row, 1..4096.
        key_format: ``"fp8_fp32"``, ``"fp8_ue8m0"`` or ``"mxfp4"``: the index cache's bytes.
        page: tokens per page of the index cache; 64.
        numerics: ``"fp32"``, ``"bf16"``, or None for the backend's own default (fp32 on cpu and sm90, bf16 on sm100).
        head_dim: elements per head; 128.

    Raises:
        KeysieveError: a value is out of range; the text says what is accepted.
    """

    heads: int
    topk: int
    key_format: str = "fp8_fp32"
    page: int = PAGE
    numerics: str | None = None
    head_dim: int = HEAD_DIM

    def __post_init__(self) -> None:
        head_remedy = "Pad query and head weights with zero heads up to one of these; more than 64 do not run."
        whole = {
            "heads": require_int("heads", self.heads, -(1 << 31), 1 << 31, head_remedy),
            "topk": require_int("topk", self.topk, 1, MAX_TOPK, "Select between 1 and 4096 keys per row."),
            "page": require_int("page", self.page, 1, MAX_CONTEXT, "Allocate the index cache with 64 tokens a page."),
            "head_dim": require_int("head_dim", self.head_dim, 1, 1 << 16, "The supported models' indexers have 128."),
        }
        for name, value in whole.items():  # plain ints whatever was given, so that hashes, reprs and operators agree
            object.__setattr__(self, name, value)
        require_choice("heads", self.heads, HEADS, head_remedy)
        require_choice("key_format", self.key_format, tuple(FORMATS), "Name the format the cache is written in.")
        require_choice("page", self.page, (PAGE,), "Allocate the index cache with 64 tokens a page.")
        require_choice("numerics", self.numerics, (None, *NUMERICS), "Use None for the backend's default.")
        require_choice("head_dim", self.head_dim, (HEAD_DIM,), "The supported models' indexers have 128.")

    @property
    def format(self) -> KeyFormat:
        """The bytes of ``key_format``."""
        return FORMATS[self.key_format]

    def numerics_on(self, backend: str) -> str:
        """The numerics that ``backend`` uses for this spec: the spec's own choice, else the backend's default."""
        return self.numerics or ("bf16" if backend == "sm100" else "fp32")


def require_spec(spec: object) -> IndexerSpec:
    """``spec`` if it is an IndexerSpec, or a refusal."""
    if not isinstance(spec, IndexerSpec):
        refuse("spec", got=type(spec).__name__, accepted="an IndexerSpec", remedy="Build ks.IndexerSpec(...).")
    return spec
