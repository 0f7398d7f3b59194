"""What a tensor is, apart from where it lies: type, dtype, device, shape and strides, compared for many at once."""

from __future__ import annotations

from collections.abc import Callable

import torch


def same_form(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """A function of as many objects: do they have these tensors' types, dtypes, devices, shapes and strides?

    It may say no where the answer is yes, never the other way round.
    """
    plain = all(type(t) in (torch.Tensor, torch.nn.Parameter) for t in tensors)
    compared = _compared_by_torch(tensors) if plain else None
    return compared if compared is not None else _compared_here(tensors)


def _compared_here(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    wanted = [_form(t) for t in tensors]

    def same(*given: object) -> bool:
        return [_form(t) for t in given] == wanted

    return same


def _form(tensor: object) -> object:
    if not isinstance(tensor, torch.Tensor):
        return None
    return type(tensor), tensor.dtype, tensor.device, tensor.shape, tensor.stride()


def _guards_of(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """torch's own comparison of tensor forms, as torch.compile uses it: all tensors in one call, in C++.

    Not a public interface: :func:`_torch_compares` tries it before it is relied on.
    """
    from torch._C._dynamo.guards import TensorGuards

    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
    return check


def _compared_by_torch(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool] | None:
    """torch's comparison, or None where it cannot be used: it also wants the objects to be different ones."""
    if not _torch_compares():
        return None
    check = _guards_of(tensors)
    return check if check(*tensors) else None


_works: bool | None = None


def _torch_compares() -> bool:
    """Does this torch's comparison see every difference that matters? Tried once, on small tensors of the CPU."""
    global _works
    if _works is None:
        try:
            _works = _tried()
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError):
            _works = False
    return _works


def _tried() -> bool:
    with torch.inference_mode(False):
        base = torch.zeros(8, 8, dtype=torch.int32)
    check = _guards_of((base[:4, :4], base[0]))
    others: list[object] = [
        base[:4, :5],
        base[:3, :4],
        base.t()[:4, :4],
        base.view(4, 16)[:, :4],
        base.view(torch.float32)[:4, :4],
        base.view(torch.uint32)[:4, :4],
        base[:4, :4].to("meta").as_strided((4, 4), (8, 1)),
        base[0],
        base[:4, :4].tolist(),
        None,
    ]
    return (
        bool(check(base[:4, :4], base[0]))
        and bool(check(base[4:, 4:], base[1]))
        and not any(check(other, base[0]) for other in others)
        and not check(base[:4, :4], base[:, 0])
    )
