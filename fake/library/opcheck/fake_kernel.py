"""The fake kernel against the real one, on the sample."""

from __future__ import annotations

from typing import Any

import torch

from fake.library import _torch
from fake.library.opcheck.inputs import Call, attempt, flat_tensors
from fake.library.opcheck.result import CheckFailure, Evidence, describe_tensor

__all__ = ["NAME", "check", "compare", "run_fake"]

NAME = "test_faketensor"


def run_fake(op: Any, call: Call) -> Any:
    """What the fake kernel answers. Sizes that it takes from data are unbacked symbols."""
    shape_env = _torch.ShapeEnv()
    with _torch.FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=False) as mode:
        faked = call.map(lambda t: mode.from_tensor(t, static_shapes=True))
        with torch.no_grad():
            return op(*faked.args, **faked.kwargs)


def _symbolic(value: Any) -> bool:
    return isinstance(value, torch.SymInt)


def _strides_matter(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0


def compare(real: Any, fake: Any, inputs: str) -> list[Evidence]:
    """Every difference between real outputs and what the fake kernel said about them."""
    found: list[Evidence] = []
    real_leaves = [leaf for leaf in _torch.pytree.tree_leaves(real) if leaf is not None]
    fake_leaves = [leaf for leaf in _torch.pytree.tree_leaves(fake) if leaf is not None]
    if len(real_leaves) != len(fake_leaves):
        return [Evidence("outputs", f"{len(real_leaves)} of them", f"{len(fake_leaves)} of them", inputs)]
    for index, (mine, theirs) in enumerate(zip(real_leaves, fake_leaves, strict=True)):
        where = f"output {index}"
        if not isinstance(mine, torch.Tensor) or not isinstance(theirs, torch.Tensor):
            if isinstance(mine, torch.Tensor) != isinstance(theirs, torch.Tensor):
                found.append(Evidence(where, type(mine).__name__, type(theirs).__name__, inputs))
            continue
        same_size = mine.dim() == theirs.dim() and all(
            _symbolic(b) or a == b for a, b in zip(mine.shape, theirs.shape, strict=True)
        )
        unknown = any(_symbolic(s) for s in theirs.shape)
        if mine.dtype != theirs.dtype or mine.device != theirs.device or not same_size:
            found.append(Evidence(where, describe_tensor(mine), _describe(theirs), inputs))
        elif mine.layout != theirs.layout:
            found.append(Evidence(where, str(mine.layout), str(theirs.layout), inputs))
        elif _strides_matter(mine) and not unknown:
            differ = any(
                size > 1 and a != b
                for size, a, b in zip(mine.shape, mine.stride(), theirs.stride(), strict=True)
            )
            if differ:
                found.append(Evidence(where, describe_tensor(mine), _describe(theirs), inputs))
    return found


def _describe(tensor: torch.Tensor) -> str:
    if any(_symbolic(s) for s in (*tensor.shape, *tensor.stride())):
        sizes = ", ".join("?" if _symbolic(s) else str(s) for s in tensor.shape)
        return f"{str(tensor.dtype).removeprefix('torch.')}[{sizes}] {tensor.device}"
    return describe_tensor(tensor)


def check(op: Any, call: Call, tolerances: dict[str, float]) -> str:
    """Compare sizes, strides, dtypes, devices and the number of outputs; then torch's cross-reference mode.

    Raises:
        CheckFailure: there is no fake kernel, it fails, or it says something else than the real one does.
    """
    name = _torch.op_overload_name(op)
    evidence: tuple[Evidence, ...] = ()
    real = attempt(lambda *a, **k: op(*a, **k), call.detached())
    if real.error is None:
        fake = attempt(lambda *a, **k: run_fake(op, Call(a, k)), call.detached())
        if fake.error is None:
            evidence = tuple(compare(real.value, fake.value, call.describe()))
    try:
        _torch.torch_fake_check(op, call.copy().args, call.copy().kwargs)
    except Exception as error:
        missing = not evidence
        fix = "make the fake kernel return what the real one returns for these inputs"
        if missing:
            fix = "register a fake kernel with register_fake, or correct the one there is; probe() can derive it"
        raise CheckFailure(NAME, name, str(error), evidence=evidence, fix=fix) from error
    if evidence:
        raise CheckFailure(
            NAME,
            name,
            f"the fake kernel is wrong about {evidence[0].where}",
            evidence=evidence,
            fix="make the fake kernel return what the real one returns for these inputs",
        )
    return "" if flat_tensors(real.value) else "no tensor outputs"
