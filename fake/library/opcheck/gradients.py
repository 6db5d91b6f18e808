"""A backward formula that is wrong only for gradients or inputs that are not contiguous."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fake.library import _torch
from fake.library.opcheck.inputs import Call, attempt, flat_tensors, named_tensors
from fake.library.opcheck.result import CheckFailure, Evidence, describe_tensor

__all__ = ["NAME", "check"]

NAME = "test_gradients"


def _transposed(grad: torch.Tensor) -> torch.Tensor:
    order = list(range(grad.dim()))[::-1]
    return grad.permute(order).contiguous().permute(order)


def _gapped(grad: torch.Tensor) -> torch.Tensor:
    return grad.repeat_interleave(2, dim=-1)[..., ::2] if grad.dim() else grad


def _offset(grad: torch.Tensor) -> torch.Tensor:
    return torch.cat([grad.new_zeros(3), grad.reshape(-1)])[3:].view(grad.shape)


_LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a transposed gradient": _transposed,
    "a gradient with gaps": _gapped,
    "a gradient with a storage offset": _offset,
}


def check(op: Any, call: Call, tolerances: dict[str, float]) -> str:
    """The same gradient values in other layouts, and the same inputs in other strides, must give the same result.

    Raises:
        CheckFailure: they do not.
    """
    if not any(t.requires_grad for t in flat_tensors((call.args, call.kwargs))):
        return "no input requires a gradient"
    torch.manual_seed(0)
    reference = _gradients(op, call, lambda g: g, ones=False)
    if isinstance(reference, str):
        return reference
    again = _gradients(op, call, lambda g: g, ones=False)
    if isinstance(again, str) or _difference(reference, again, tolerances):
        return "not deterministic"
    for label, change in _LAYOUTS.items():
        _compare(op, call, reference, _gradients(op, call, change, ones=False), label, tolerances)
    constant = _gradients(op, call, lambda g: g, ones=True)
    expanded = _gradients(op, call, lambda g: g.new_ones(()).expand(g.shape), ones=True)
    if not isinstance(constant, str):
        _compare(op, call, constant, expanded, "an expanded gradient (as .sum() makes)", tolerances)
    for label, layout in (("transposed inputs", _transposed), ("inputs with gaps", _gapped)):
        changed = call.map(lambda t, layout=layout: _relayout(t, layout), label)  # type: ignore[misc]
        _compare(op, call, reference, _gradients(op, changed, lambda g: g, ones=False), label, tolerances)
    return ""


def _relayout(tensor: torch.Tensor, layout: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor
    return layout(tensor.detach()).detach().requires_grad_(tensor.requires_grad)


def _gradients(
    op: Any, call: Call, change: Callable[[torch.Tensor], torch.Tensor], *, ones: bool
) -> dict[str, torch.Tensor | None] | str:
    """Gradients of all inputs that require one, for random (or constant) gradients in a given layout."""

    def run(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor | None]:
        inner = Call(args, kwargs)
        named = [(n, t) for n, _, t in named_tensors(op._schema, inner) if t.requires_grad]
        result = op(*args, **kwargs)
        outputs = [o for o in flat_tensors(result) if o.requires_grad]
        generator = torch.Generator().manual_seed(1)
        grads = []
        for output in outputs:
            values = torch.ones(output.shape) if ones else torch.randn(output.shape, generator=generator)
            grads.append(change(values.to(output.device, output.dtype)))
        found = torch.autograd.grad(outputs, [t for _, t in named], grads, allow_unused=True)
        return {n: g for (n, _), g in zip(named, found, strict=True)}

    outcome = attempt(run, call)
    if outcome.error is not None:
        return f"{type(outcome.error).__name__}: {outcome.error}"
    if not outcome.value:
        return "no gradient"
    return outcome.value


def _difference(
    left: dict[str, torch.Tensor | None], right: dict[str, torch.Tensor | None], tolerances: dict[str, float]
) -> tuple[Evidence, ...]:
    wrong = []
    for name, a in left.items():
        b = right[name]
        if a is None or b is None:
            if a is not b:
                wrong.append(Evidence(f"gradient of {name}", str(a), str(b)))
        elif a.shape != b.shape:
            wrong.append(Evidence(f"gradient of {name}", describe_tensor(a), describe_tensor(b)))
        elif not torch.allclose(a, b, equal_nan=True, **(tolerances or {"rtol": 1e-3, "atol": 1e-4})):
            gap = float((a - b).abs().max())
            wrong.append(
                Evidence(f"gradient of {name}", "the same values", f"values that differ by up to {gap:.3g}")
            )
    return tuple(wrong)


def _compare(
    op: Any,
    call: Call,
    reference: dict[str, torch.Tensor | None],
    actual: dict[str, torch.Tensor | None] | str,
    label: str,
    tolerances: dict[str, float],
) -> None:
    if isinstance(actual, str):
        if "inputs" in label:
            return  # a kernel may refuse inputs that are not contiguous
        evidence: tuple[Evidence, ...] = (Evidence("backward", "gradients", actual, call.describe()),)
    else:
        evidence = _difference(reference, actual, tolerances)
    if evidence:
        raise CheckFailure(
            NAME,
            _torch.op_overload_name(op),
            f"the backward formula is wrong with {label}",
            evidence=evidence,
            fix="do not assume that gradients are contiguous: index them by size and stride, or call .contiguous()",
        )
