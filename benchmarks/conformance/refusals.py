"""Test what eager refuses: torch's samples with one thing made wrong, and torch's own error samples.

Each call runs in eager and in the engine under test, and must be refused by both or neither. If only eager
refuses, the call is repeated with other tensor values. If some values make it valid, an engine without data
cannot refuse it, and it counts as data-dependent.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.conformance.compare import Outcome, Verdict, of_error
from benchmarks.conformance.engines import active, make_mode, to_fake
from benchmarks.conformance.isolate import isolated
from benchmarks.conformance.report import Case, Tally
from benchmarks.conformance.subjects import entry_name, pick, seed
from benchmarks.conformance.sweep import Options

__all__ = ["copied", "dense_results", "perturbations", "sweep_refusals"]

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]

_OTHER_DTYPES = (
    torch.int64, torch.bool, torch.complex64, torch.float64, torch.bfloat16, torch.uint8, torch.float32,
)  # fmt: skip


@dataclass(frozen=True)
class _Attempt:
    """One call to compare: the function, its arguments, and its place in the table."""

    label: str
    table: str
    function: Callable[..., Any]
    call: Call


def perturbations(call: Call) -> Iterator[tuple[str, Call]]:
    """Yield copies of ``call`` with one argument made wrong (or merely odd), with a description.

    Tensors get another dtype, another size, one dimension more or less, or no elements. Numbers go far out of
    range, or from int to float. Tensors and numbers replace each other.
    """
    leaves, spec = pytree.tree_flatten(call)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            changed = list(_other_tensors(leaf))
        elif isinstance(leaf, torch.dtype | torch.nn.Module) or callable(leaf):
            continue
        else:
            changed = list(_other_values(leaf))
        for what, value in changed:
            if tensors[:1] == [place] or not isinstance(leaf, torch.Tensor) or len(tensors) < 4:
                yield (
                    f"leaf {place}: {what}",
                    pytree.tree_unflatten([*leaves[:place], value, *leaves[place + 1 :]], spec),
                )


def _other_tensors(tensor: torch.Tensor) -> Iterator[tuple[str, Any]]:
    tensor = tensor.detach()
    for dtype in _OTHER_DTYPES:
        if dtype is not tensor.dtype:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield f"dtype {str(dtype).removeprefix('torch.')}", tensor.to(dtype)
    if tensor.layout is not torch.strided or tensor.is_nested:
        return
    for dim in sorted({0, tensor.dim() - 1} & set(range(tensor.dim()))):
        yield f"dim {dim} larger", torch.cat([tensor, tensor.narrow(dim, 0, min(1, tensor.shape[dim]))], dim)
        if tensor.shape[dim]:
            yield f"dim {dim} empty", tensor.narrow(dim, 0, 0).clone()
            yield f"rank less by dim {dim}", tensor.select(dim, 0).clone()
    yield "rank more", tensor.unsqueeze(0).clone()
    yield "None", None


def _other_values(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, bool):
        return
    if isinstance(value, int):
        yield from (("+ 100", value + 100), ("- 100", value - 100), ("half", value + 0.5))
    elif isinstance(value, float):
        yield from (("negative", -value - 1.0), ("complex", complex(value, 1.0)))
    elif isinstance(value, str):
        yield "nonsense", value + "?"
    elif value is None:
        yield "1000", 1000


def sweep_refusals(options: Options, progress: Callable[[str], None] = lambda name: None) -> Tally:
    """Compare refusals over the selected entries (``tables`` and ``layouts`` have no effect)."""
    tally = Tally()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for database, entry in options.entries():
            if database == "module":
                continue
            progress(entry_name(entry))
            cases = isolated(lambda d=database, e=entry: list(_cases(d, e, options)), seconds=300)  # type: ignore[misc]
            if cases is None:
                progress(f"{entry_name(entry)}: eager crashed, not counted")
            for case in cases or ():
                tally.add(case)
    return tally


def _cases(database: str, entry: Any, options: Options) -> Iterator[Case]:
    for attempt in _attempts(database, entry, options):
        yield Case(attempt.label, attempt.table, "given", options.symbolic, _judge(attempt, options))


def _attempts(database: str, entry: Any, options: Options) -> Iterator[_Attempt]:
    name = f"{database}:{entry_name(entry)}"
    supported = entry.supported_dtypes("cpu")
    for dtype in [d for d in options.dtypes if d in supported] or sorted(supported, key=str)[:1]:
        seed()
        found = list(entry.sample_inputs("cpu", dtype, requires_grad=False))
        for place, sample in pick(found, options.samples):
            label = f"{name} {str(dtype).removeprefix('torch.')} sample {place}"
            call = (sample.input, sample.args, sample.kwargs)
            yield _Attempt(label, "unchanged", entry.op, call)
            for what, changed in perturbations(call):
                yield _Attempt(f"{label}, {what}", f"forward: {_kind(what)}", entry.op, changed)
                if entry.inplace_variant is not None:
                    yield _Attempt(f"{label}, {what}", "in-place", entry.inplace_variant, changed)
            if entry.supports_out:
                yield from _with_out(label, entry.op, call)
    if entry.error_inputs_func is not None:
        seed()
        for number, error in enumerate(entry.error_inputs("cpu")):
            sample = error.sample_input
            call = (sample.input, sample.args, sample.kwargs)
            yield _Attempt(f"{name} error {number}", "torch's error inputs", entry.op, call)


def _kind(what: str) -> str:
    change = what.split(": ", 1)[1]
    if change.startswith("dtype"):
        return "dtype"
    return "sizes" if change.startswith(("dim", "rank")) else "values"


def _with_out(label: str, op: Any, call: Call) -> Iterator[_Attempt]:
    """Yield calls with an ``out=`` of every other dtype."""
    shapes = dense_results(op, call)
    for dtype in _OTHER_DTYPES if shapes is not None else ():
        first, args, kwargs = copied(call)
        outs = pytree.tree_map(lambda t, dtype=dtype: torch.zeros(t.shape, dtype=dtype), shapes)  # type: ignore[misc]
        what = f"{label}, out {str(dtype).removeprefix('torch.')}"
        yield _Attempt(what, "out", op, (first, args, {**kwargs, "out": outs}))


def dense_results(op: Any, call: Call) -> Any:
    """Return the strided tensor or tuple of tensors that a call returns, or ``None`` otherwise."""
    first, args, kwargs = copied(call)
    try:
        result = op(first, *args, **kwargs)
    except Exception:  # noqa: BLE001 - without a result there is nothing to write
        return None
    results = tuple(result) if isinstance(result, tuple | list) else (result,)
    if not all(isinstance(t, torch.Tensor) and t.layout is torch.strided for t in results):
        return None
    return results if isinstance(result, tuple | list) else result


def copied(call: Call, fill: float | None = None) -> Call:
    """Copy a call with fresh tensors of the same metadata, filled with ``fill`` if given."""

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return copy.deepcopy(leaf) if isinstance(leaf, torch.nn.Module) else leaf
        made = leaf.detach().clone() if leaf.layout is not torch.strided or leaf.is_nested else _clone(leaf)
        return made if fill is None or leaf.layout is not torch.strided else made.fill_(fill)

    return pytree.tree_map(one, call)


def _clone(leaf: torch.Tensor) -> torch.Tensor:
    made = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
    if any(step == 0 and size > 1 for step, size in zip(leaf.stride(), leaf.shape, strict=True)):
        return made.set_(leaf.untyped_storage().clone(), leaf.storage_offset(), leaf.shape, leaf.stride())
    return leaf.detach().clone()


def _error_of(function: Callable[..., Any], call: Call) -> BaseException | None:
    seed()
    first, args, kwargs = call
    try:
        function(first, *args, **kwargs)
    except Exception as error:  # noqa: BLE001 - refusals are what is looked for
        return error
    return None


def _depends_on_values(attempt: _Attempt) -> bool:
    fills: Sequence[float] = (0.0, 1.0)
    return any(_error_of(attempt.function, copied(attempt.call, fill)) is None for fill in fills)


def _judge(attempt: _Attempt, options: Options) -> Outcome:
    refused = _error_of(attempt.function, copied(attempt.call))
    mode = make_mode(options.engine, symbolic=options.symbolic)
    try:
        inputs = to_fake(mode, copied(attempt.call))
    except Exception as failure:  # noqa: BLE001 - any failure of the engine is a finding
        return of_error(failure)
    with active(mode):
        actual = _error_of(attempt.function, inputs)
    if refused is None:
        return Outcome(Verdict.OK) if actual is None else of_error(actual)
    said = f"eager: {type(refused).__name__}: {(str(refused).strip().splitlines() or [''])[0][:200]}"
    if actual is None:
        verdict = Verdict.DATA_DEPENDENT if _depends_on_values(attempt) else Verdict.ACCEPTED
        return Outcome(verdict, said)
    if isinstance(actual, type(refused)):
        return Outcome(Verdict.OK)
    other = of_error(actual)
    if other.verdict in (Verdict.DATA_DEPENDENT, Verdict.UNSUPPORTED):
        return other
    return replace(other, verdict=Verdict.OTHER_TYPE, detail=f"{said}; {other.detail}")
