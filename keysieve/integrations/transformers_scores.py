"""Stand-ins that let a model's own indexer code run up to its scoring expression, and keysieve take over there.

Every DSA indexer of transformers computes its query, its key and its head weights in its own way (half-split or
interleaved RoPE, RoPE first or last, other norms, other scales), and then all of them write down the same expression::

    scores = relu(query @ keys.T [* scale]);  logits = weights @ scores;  logits masked;  logits.topk(k)

:class:`DeferredKeys` takes the place of the cached keys in that expression. Nothing is computed with it: the product
gives :class:`DeferredScores`, the head sum gives :class:`DeferredLogits`, and its ``topk`` calls keysieve. So RoPE,
norms and scales are the model's own bits, no ``[rows, heads, keys]`` tensor is ever made, and an indexer that scores
in any other way is refused with the operation named instead of being silently approximated.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch

from keysieve.checks import UnsupportedError, message

EXPRESSION = "weights @ relu(query @ keys.T [* scale]), masked, then topk over the last dimension"


@dataclass(frozen=True)
class Scoring:
    """The operands of one evaluation of the expression, as the model made them.

    Attributes:
        query: float32 ``[batch, tokens, heads, 128]``.
        weights: ``[batch, tokens, heads]``; whatever factors the model multiplies in before the head sum are in.
        scale: the product of the factors the model applies to the dots (its softmax scale, or 1).
        visible: bool ``[batch or 1, tokens, columns]``: which keys each query may see.
        k: columns the model asks for: its ``index_topk``, or the number of columns if that is smaller.
    """

    query: torch.Tensor
    weights: torch.Tensor
    scale: float
    visible: torch.Tensor
    k: int


Select = Callable[[Scoring], torch.Tensor]
"""Takes a :class:`Scoring`; gives the selected columns, int ``[batch, tokens, k]``, valid to scatter with."""


class TopK(NamedTuple):
    """What ``DeferredLogits.topk`` returns. There are no values: the model never reads them."""

    indices: torch.Tensor


class _Deferred:
    """Refuses every operation that its subclass does not define."""

    _layer: str

    def _refuse(self, operation: str) -> NoReturn:
        text = message(
            f"indexer of {self._layer}",
            got=f"{operation} on its {type(self).__name__.removeprefix('Deferred').lower()}",
            accepted=EXPRESSION,
            remedy="This model's indexer is not a lightning indexer of the kind keysieve computes; do not patch it.",
        )
        raise UnsupportedError(text)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse(f".{name}")

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", str(func))
        for operand in args:
            if isinstance(operand, _Deferred):
                return operand._in_torch(name, args, kwargs or {})
        got = f"torch.{name} with the indexer's keys or scores where no operand was expected"
        raise UnsupportedError(
            message("indexer", got=got, accepted=EXPRESSION, remedy="Do not patch this model: its indexer is another.")
        )

    def _in_torch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What ``torch.<name>(*args, **kwargs)`` gives when this object is among the arguments."""
        raise NotImplementedError

    def __mul__(self, other: object) -> Any:
        self._refuse("multiplication")

    __rmul__ = __mul__

    def __add__(self, other: object) -> Any:
        self._refuse("addition")

    __radd__ = __add__

    def __sub__(self, other: object) -> Any:
        self._refuse("subtraction")

    def __truediv__(self, other: object) -> Any:
        self._refuse("division")

    def __matmul__(self, other: object) -> Any:
        self._refuse("a matrix product from the right")

    def __getitem__(self, index: object) -> Any:
        self._refuse("indexing")


class DeferredKeys(_Deferred):
    """The cached keys ``[batch, columns, 128]``: may be transposed, made float32, given a head axis, multiplied."""

    def __init__(self, layer: str, columns: int, select: Select, transposed: bool = False, headed: bool = False):
        self._layer, self._columns, self._select = layer, columns, select
        self._transposed, self._headed = transposed, headed

    def transpose(self, first: int, second: int) -> DeferredKeys:
        if {first, second} not in ({-1, -2}, {1, 2}) or self._headed or self._transposed:
            self._refuse(f"transpose({first}, {second})")
        return DeferredKeys(self._layer, self._columns, self._select, transposed=True)

    def float(self) -> DeferredKeys:
        return self

    def unsqueeze(self, dim: int) -> DeferredKeys:
        if dim != 1 or self._headed:
            self._refuse(f"unsqueeze({dim})")
        return DeferredKeys(self._layer, self._columns, self._select, self._transposed, headed=True)

    def _in_torch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        fits = name == "matmul" and len(args) == 2 and args[1] is self and not kwargs
        if not (fits and self._transposed and self._headed and isinstance(args[0], torch.Tensor)):
            self._refuse(f"torch.{name}")
        query = args[0]
        if query.dim() != 4 or query.dtype != torch.float32:
            self._refuse(f"a product with a {query.dim()}-dimensional {query.dtype} query")
        return DeferredScores(self._layer, self._columns, self._select, query)


class DeferredScores(_Deferred):
    """The dots ``[batch, tokens, heads, columns]``: may be scaled by positive numbers, rectified, summed over heads."""

    def __init__(
        self,
        layer: str,
        columns: int,
        select: Select,
        query: torch.Tensor,
        scale: float = 1.0,
        rectified: bool = False,
    ):
        self._layer, self._columns, self._select = layer, columns, select
        self._query, self._scale, self._rectified = query, scale, rectified

    def __mul__(self, other: object) -> DeferredScores:
        # Only a positive number commutes with the rectifier, so only that may stand on either side of it.
        if not isinstance(other, int | float) or not (0.0 < other < math.inf):
            self._refuse(f"multiplication by {other!r}")
        scale = self._scale * float(other)
        return DeferredScores(self._layer, self._columns, self._select, self._query, scale, self._rectified)

    __rmul__ = __mul__

    def relu(self) -> DeferredScores:
        return DeferredScores(self._layer, self._columns, self._select, self._query, self._scale, rectified=True)

    def _in_torch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "relu" and not kwargs.get("inplace", False):
            return self.relu()
        if name in ("mul", "multiply") and len(args) == 2:
            return self * (args[1] if args[0] is self else args[0])
        fits = name == "matmul" and len(args) == 2 and args[1] is self and isinstance(args[0], torch.Tensor)
        if not (fits and self._rectified):
            self._refuse(f"torch.{name}")
        weights: torch.Tensor = args[0]
        batch, tokens, heads, _ = self._query.shape
        if tuple(weights.shape) != (batch, tokens, 1, heads):
            self._refuse(f"a head sum with weights of shape {tuple(weights.shape)}")
        return DeferredLogits(self, weights.squeeze(-2), self._columns)


class DeferredLogits(_Deferred):
    """The logits ``[batch, tokens, columns]``: may be squeezed, masked once, and asked for their top k."""

    def __init__(
        self, scores: DeferredScores, weights: torch.Tensor, columns: int, visible: torch.Tensor | None = None
    ):
        self._layer, self._scores, self._weights, self._visible = scores._layer, scores, weights, visible
        batch, tokens, _ = weights.shape
        self.shape = torch.Size((batch, tokens, columns))

    def squeeze(self, dim: int) -> DeferredLogits:
        if dim != -2:
            self._refuse(f"squeeze({dim})")
        return self

    def masked_fill(self, mask: torch.Tensor, value: float) -> DeferredLogits:
        if value != -math.inf or self._visible is not None:
            self._refuse(f"masked_fill with {value}")
        return self._masked(~mask)

    def __add__(self, other: object) -> DeferredLogits:
        if not isinstance(other, torch.Tensor) or not other.is_floating_point() or self._visible is not None:
            self._refuse("addition")
        # An additive mask holds 0 where a key is visible and a very large negative number where it is not. Anything
        # in between would be a bias on the ranking, which is not part of the selection's contract.
        visible = other == 0
        if not bool((visible | (other <= torch.finfo(other.dtype).min / 2)).all()):
            self._refuse("addition of a bias that is neither 0 nor a mask's large negative number")
        return self._masked(visible)

    def _masked(self, visible: torch.Tensor) -> DeferredLogits:
        batch, tokens, columns = self.shape
        if visible.dim() != 3 or tuple(visible.shape[1:]) != (tokens, columns) or visible.shape[0] not in (1, batch):
            self._refuse(f"a mask of shape {tuple(visible.shape)} over {columns} columns")
        return DeferredLogits(self._scores, self._weights, columns, visible)

    def topk(self, k: int, dim: int = -1) -> TopK:
        if dim not in (-1, 2) or self._visible is None:
            self._refuse("topk without a causal mask" if self._visible is None else f"topk over dimension {dim}")
        scores = self._scores
        return TopK(scores._select(Scoring(scores._query, self._weights, scores._scale, self._visible, k)))

    def _in_torch(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name != "topk" or args[0] is not self:
            self._refuse(f"torch.{name}")
        return self.topk(*args[1:], **kwargs)
