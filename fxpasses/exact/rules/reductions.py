"""Sums, means, extremes, orders, and what is built from them: softmax, normalization, losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.dual import Dual
from fxpasses.exact.rules.table import RULES, named, register_rules, rule

aten = torch.ops.aten


def _dims(a: Any, dim: Any) -> list[int]:
    listed = [] if dim is None else [dim] if isinstance(dim, int) else list(dim)
    return sorted({d % a.dim() for d in listed}) if listed and a.dim() else list(range(a.dim()))


@rule(aten.sum)
def _sum(m: Arithmetic, op: Any, a: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Dual:
    a = m.dual(a)
    if dtype is not None and not dtype.is_floating_point:
        return a.witness.to(dtype).sum(_dims(a, dim), keepdim)
    result = m.sum(a, _dims(a, dim), keepdim)
    return result.as_type(dtype) if dtype is not None else result


@rule(aten.cumsum)
def _cumsum(m: Arithmetic, op: Any, a: Any, dim: int, dtype: Any = None) -> Any:
    a = m.dual(a)
    if dtype is not None and not dtype.is_floating_point:
        return op(a.witness.to(dtype), dim)
    result = m.linear(lambda t: t.cumsum(dim), a)
    if a.exponential is not None and a.dim():
        result.exponential = lambda: m.cumprod(m.exp(a), dim % a.dim())
    return result if dtype is None else result.as_type(dtype)


@rule(aten.mean)
def _mean(m: Arithmetic, op: Any, a: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Dual:
    a = m.dual(a)
    return m.mean(a, _dims(a, dim), keepdim).as_type(dtype or a.dtype or torch.float32)


def _variance_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, bool]:
    """The ``dim``, ``correction`` and ``keepdim`` of the overloads of ``var`` and its relatives."""
    if args and isinstance(args[0], bool):  # (unbiased)
        return None, int(args[0]), False
    dim = args[0] if args else kwargs.get("dim")
    if len(args) > 1:  # (dim, unbiased, keepdim)
        return dim, int(args[1]), args[2] if len(args) > 2 else kwargs.get("keepdim", False)
    if "unbiased" in kwargs:
        return dim, int(kwargs["unbiased"]), kwargs.get("keepdim", False)
    return dim, kwargs.get("correction", 1), kwargs.get("keepdim", False)


@rule(aten.var)
def _variance(m: Arithmetic, op: Any, a: Dual, *args: Any, **kwargs: Any) -> Dual:
    dim, correction, keepdim = _variance_arguments(args, kwargs)
    return m.variance(a, _dims(a, dim), correction, keepdim)[0]


@rule(aten.var_mean)
def _variance_and_mean(m: Arithmetic, op: Any, a: Dual, *args: Any, **kwargs: Any) -> tuple[Dual, Dual]:
    dim, correction, keepdim = _variance_arguments(args, kwargs)
    return m.variance(a, _dims(a, dim), correction, keepdim)


register_rules(
    {
        aten.std: lambda m, op, *args, **kwargs: m.sqrt(_variance(m, op, *args, **kwargs)),
        aten.amax: lambda m, op, a, dim=(), keepdim=False: m.extreme(a, _dims(a, dim), keepdim, largest=True),
        aten.amin: lambda m, op, a, dim=(), keepdim=False: m.extreme(
            a, _dims(a, dim), keepdim, largest=False
        ),
        aten.cumprod: lambda m, op, a, dim, dtype=None: m.cumprod(a, dim % max(a.dim(), 1)) if a.dim() else a,
    }
)


@rule(aten.prod)
def _product(
    m: Arithmetic, op: Any, a: Dual, dim: Any = None, keepdim: bool = False, dtype: Any = None
) -> Dual:
    if dim is None:
        a, dim = a.map(lambda t: t.reshape(-1)), 0
    dim %= max(a.dim(), 1)
    if not a.dim() or not a.shape[dim]:
        return NotImplemented
    result = m.cumprod(a, dim).map(lambda t: t.select(dim, -1))
    return result.map(lambda t: t.unsqueeze(dim)) if keepdim else result


@rule(aten._softmax, aten._safe_softmax, aten.softmax)
def _softmax(m: Arithmetic, op: Any, a: Dual, dim: int, *args: Any, **kwargs: Any) -> Dual:
    if a.dim() == 0:
        return NotImplemented
    if not a.witness.numel():
        return _cast_softmax(a, args, kwargs)
    powers = m.exp(m.sub(a, m.extreme(a, [dim], True, largest=True)))
    result = m.div(powers, m.sum(powers, [dim % a.dim()], True))
    if op.overloadpacket is aten._safe_softmax:
        masked = (a.witness == -torch.inf).all(dim, keepdim=True)
        result = m.select(masked, 0, result)
    return _cast_softmax(result.as_type(a.dtype or torch.float32), args, kwargs)


def _cast_softmax(result: Dual, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Dual:
    """Cast to the dtype that the overload asks for: a third argument is a dtype or "from half to float"."""
    dtype = kwargs.get("dtype") or next((x for x in args if isinstance(x, torch.dtype)), None)
    if args and args[0] is True:
        dtype = torch.float32
    return result if dtype is None else result.as_type(dtype)


@rule(aten._log_softmax, aten.log_softmax)
def _log_softmax(m: Arithmetic, op: Any, a: Dual, dim: int, *args: Any, **kwargs: Any) -> Dual:
    if a.dim() == 0:
        return NotImplemented
    if not a.witness.numel():
        return _cast_softmax(a, args, kwargs)
    centred = m.sub(a, m.extreme(a, [dim], True, largest=True))
    result = m.sub(centred, m.log(m.sum(m.exp(centred), [dim % a.dim()], True)))
    return _cast_softmax(result, args, kwargs)


@rule(aten._softmax_backward_data)
def _softmax_backward(m: Arithmetic, op: Any, grad: Dual, result: Dual, dim: int, dtype: Any) -> Dual:
    product = m.mul(grad, result)
    return m.sub(product, m.mul(result, m.sum(product, [dim % grad.dim()], True)))


@rule(aten._log_softmax_backward_data)
def _log_softmax_backward(m: Arithmetic, op: Any, grad: Dual, result: Dual, dim: int, dtype: Any) -> Dual:
    return m.sub(grad, m.mul(m.exp(result), m.sum(grad, [dim % grad.dim()], True)))


@rule(aten.logsumexp)
def _logsumexp(m: Arithmetic, op: Any, a: Dual, dim: Any, keepdim: bool = False) -> Dual:
    dims = _dims(a, dim)
    top = m.extreme(a, dims, True, largest=True)
    top = m.select(top.witness.isinf(), m.full(top.shape, 0, top.dtype or torch.float32), top)
    result = m.add(m.log(m.sum(m.exp(m.sub(a, top)), dims, True)), top)
    return result if keepdim else result.map(lambda t: t.squeeze(tuple(dims)))


@rule("prims::prepare_softmax_online")
def _softmax_online(m: Arithmetic, op: Any, a: Dual, dim: int) -> tuple[Dual, Dual]:
    top = m.extreme(a, [dim], True, largest=True)
    return top, m.sum(m.exp(m.sub(a, top)), [dim % a.dim()], True)


@rule(aten.logcumsumexp)
def _logcumsumexp(m: Arithmetic, op: Any, a: Dual, dim: int) -> Any:
    if not a.dim():
        return a
    sums = m.linear(lambda t: t.cumsum(dim), m.exp(a))
    return m.with_witness(m.log(sums), op(a.witness, dim), a)


# Elements that the witness finds


@rule(*named("sort topk kthvalue mode cummax cummin median nanmedian max min"))
def _select_by_witness(m: Arithmetic, op: Any, a: Dual, *args: Any, **kwargs: Any) -> Any:
    if args and isinstance(args[0], (Dual, Tensor)):  # the elementwise overloads
        binary = aten.maximum if op.overloadpacket is aten.max else aten.minimum
        return RULES[binary](m, op, a, args[0])
    found = op(a.witness, *args, **kwargs)
    if isinstance(found, Tensor):  # over all elements
        place = (a.witness == found).flatten().long().argmax()
        chosen = a.map(lambda t: t.flatten()[place])
        return m.assemble(found, chosen.residues, dtype=a.dtype)
    values, indices = found
    dim = _selection_dim(op, args, kwargs)
    dropped = indices.dim() < a.dim()
    at = indices.unsqueeze(dim) if dropped else indices

    def gathered(t: Tensor) -> Tensor:
        if not t.dim():
            return t
        return t.gather(dim, at).squeeze(dim) if dropped else t.gather(dim, at)

    return m.assemble(values, a.map(gathered).residues, dtype=a.dtype), indices


def _selection_dim(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    names = [argument.name for argument in op._schema.arguments][1:]
    given = dict(zip(names, args, strict=False)) | kwargs
    if "dim" in given:
        return int(given["dim"])
    default = next(a.default_value for a in op._schema.arguments if a.name == "dim")
    return -1 if default is None else int(default)


@rule(
    *named(
        "isnan isinf isfinite isneginf isposinf logical_not logical_and logical_or logical_xor argmax argmin argsort "
        "searchsorted bucketize nonzero any all signbit sym_size sym_numel sym_stride is_nonzero count_nonzero equal"
    )
)
def _evaluate_on_witnesses(m: Arithmetic, op: Any, *args: Any, **kwargs: Any) -> Any:
    def witness(value: Any) -> Any:
        return value.witness if isinstance(value, Dual) else value

    listed = [[witness(x) for x in a] if isinstance(a, (list, tuple)) else witness(a) for a in args]
    return op(*listed, **{k: witness(v) for k, v in kwargs.items()})
