"""Measures which dtypes eager's kernels refuse: the table of ``fake.kernels.dtypes``.

Every sample of ``op_db`` is called in eager as it is, with one tensor in another dtype, and with all of them in
another. A dispatch mode notes which ATen operators were reached with which dtypes, and which of them raised. What
was refused each time it was seen, with an error that speaks of types, goes into the table.
"""

from __future__ import annotations

import itertools
import json
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.conformance._torch import TorchDispatchMode
from benchmarks.conformance.isolate import isolated
from benchmarks.conformance.refusals import copied, dense_results
from benchmarks.conformance.subjects import entry_name, pick, seed
from benchmarks.conformance.sweep import Options
from fake.kernels.dtypes import CODES, EMPTY, Refused, signature, written

__all__ = ["Observations", "explain", "measure_dtypes", "write_table"]

_DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
    torch.int64, torch.int32, torch.uint8, torch.bool,
)  # fmt: skip
_SPEAKS_OF_TYPES = re.compile(
    r"not implemented for|dtype|scalar ?type|data ?type|types?\b|tensors? as indices|complex|bool|floating|integ|"
    r"long|half|float|double|can't be cast|not supported",
    re.IGNORECASE,
)

_SPEAKS_OF_VALUES = re.compile(
    "overflow|negative integer|out of range|out of bounds|singular|size", re.IGNORECASE
)


def _is_about_types(func: Any, message: str) -> bool:
    """Whether dtypes alone are to blame. Elementwise operators' casts to an ``out`` have a rule of their own."""
    if _SPEAKS_OF_VALUES.search(message) or not _SPEAKS_OF_TYPES.search(message):
        return False
    return torch.Tag.pointwise not in func.tags or "can't be cast" not in message


#: Operator name to signature to what happened: "" for a result, the error's type, or "?" for an error about something else.
Observations = dict[str, dict[str, list[str]]]


class _Watch(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Observations = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = signature(func, args, kwargs) if func.namespace == "aten" else None
        happened = ""
        try:
            return func(*args, **kwargs)
        except Exception as error:
            happened = type(error).__name__ if _is_about_types(func, str(error)) else "?"
            raise
        finally:
            if found is not None:
                noted = self.seen.setdefault(func.name(), {}).setdefault(written(found), [])
                if happened not in noted:
                    noted.append(happened)


def measure_dtypes(options: Options, progress: Callable[[str], None] = lambda name: None) -> Observations:
    """What every operator that the selected entries reach does with which dtypes, each entry in a process of its own."""
    everything: Observations = {}
    for database, entry in options.entries():
        if database != "op":
            continue
        progress(entry_name(entry))
        # Apart, because some kernels write beyond an ``out`` of a wrong dtype.
        for measure in (_measure_inputs, _measure_outs):
            seen = isolated(lambda e=entry, m=measure: m(e, options.samples), seconds=300)  # type: ignore[misc]
            if seen is None:
                progress(f"{entry_name(entry)}: eager crashed, not counted ({measure.__name__})")
            for name, signatures in (seen or {}).items():
                for found, happened in signatures.items():
                    noted = everything.setdefault(name, {}).setdefault(found, [])
                    noted.extend(h for h in happened if h not in noted)
    return everything


def _measure_inputs(entry: Any, samples: int) -> Observations:
    watch = _Watch()
    for call in _calls(entry, samples):
        for changed in (*_in_other_dtypes(call), *_in_other_dtypes(_emptied(call))):
            for function in (entry.op, entry.inplace_variant):
                if function is not None:
                    _try(watch, function, changed)
    return watch.seen


def _measure_outs(entry: Any, samples: int) -> Observations:
    watch = _Watch()
    if entry.supports_out:
        for call in _calls(entry, samples):
            for changed in _with_out(entry.op, call):
                _try(watch, entry.op, changed)
    return watch.seen


def _calls(entry: Any, samples: int) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        supported = entry.supported_dtypes("cpu")
        for dtype in [d for d in (torch.float32, torch.int64, torch.bool) if d in supported]:
            seed()
            for _, sample in pick(list(entry.sample_inputs("cpu", dtype)), samples):
                yield sample.input, sample.args, sample.kwargs


def _in_other_dtypes(call: Any) -> Iterator[Any]:
    leaves, spec = pytree.tree_flatten(call)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    yield call
    floating = [i for i in tensors if leaves[i].is_floating_point() or leaves[i].is_complex()]
    groups = [floating, tensors, *[[i] for i in tensors[:5]]]
    for group in [g for i, g in enumerate(groups) if g and g not in groups[:i]]:
        for dtype in _DTYPES:
            changed = [leaf.to(dtype) if i in group else leaf for i, leaf in enumerate(leaves)]
            yield pytree.tree_unflatten(changed, spec)


def _emptied(call: Any) -> Any:
    """The call with the first dimension of all tensors empty, if they all have the same shape; else as it is."""
    leaves = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    if not leaves or leaves[0].dim() == 0 or any(leaf.shape != leaves[0].shape for leaf in leaves):
        return call
    return pytree.tree_map(
        lambda leaf: leaf.narrow(0, 0, 0) if isinstance(leaf, torch.Tensor) else leaf, call
    )


def _with_out(op: Any, call: Any) -> Iterator[Any]:
    """The call with ``out=`` of the right dtypes, of one wrong dtype, and with inputs of other dtypes."""
    right = dense_results(op, call)
    if right is None:
        return
    for place in range(len(pytree.tree_leaves(right))):
        for dtype in _DTYPES:
            leaves, spec = pytree.tree_flatten(right)
            leaves[place] = leaves[place].to(dtype)
            yield _adding(call, pytree.tree_unflatten(leaves, spec))
    for changed in _in_other_dtypes(call):
        own = dense_results(op, changed)
        yield _adding(changed, right if own is None else own)


def _adding(call: Any, outs: Any) -> Any:
    """The call with new tensors like ``outs`` to write to."""
    first, args, kwargs = call
    return first, args, {**kwargs, "out": pytree.tree_map(torch.zeros_like, outs)}


def _try(watch: _Watch, function: Any, call: Any) -> None:
    seed()
    first, args, kwargs = copied(call)
    try:
        with watch:
            function(first, *args, **kwargs)
    except Exception:  # noqa: BLE001 - the watch has noted it
        return


def write_table(observations: Observations, overlaps: dict[str, list[str]], path: Path) -> int:
    """Write the table, and the kinds of overlap that operators refuse; returns the number of operators that refuse dtypes."""
    operators = {name: explain(signatures) for name, signatures in sorted(observations.items())}
    lines = []
    for name, refused in operators.items():
        row = {key: value for key, value in vars(refused).items() if value}
        if row:
            lines.append(f" {json.dumps(name)}: {json.dumps(row)}")
    head = f'{{"torch": {json.dumps(torch.__version__.split("+")[0])}, "operators": {{\n'
    more = ",\n".join(f" {json.dumps(name)}: {json.dumps(kinds)}" for name, kinds in sorted(overlaps.items()))
    path.write_text(head + ",\n".join(lines) + '\n}, "overlaps": {\n' + more + "\n}}\n")
    return len(lines)


def explain(signatures: dict[str, list[str]]) -> Refused:
    """The shortest account of what one operator refused: pairs that must agree, dtypes that are never taken, the rest.

    >>> seen = {"a=f32 b=f32": [""], "a=f32 b=i64": ["RuntimeError"], "a=i64 b=f32": ["RuntimeError"]}
    >>> seen |= {"a=f64 b=f64": [""], "a=b b=b": ["NotImplementedError"]}
    >>> found = explain(seen)
    >>> found.same, found.never, found.together
    ((('a', 'b', 'RuntimeError'),), {'a': {'b': 'NotImplementedError'}}, {})
    """
    parsed = {text: dict(part.split("=", 1) for part in text.split()) for text in signatures}
    empty = {text: happened for text, happened in signatures.items() if EMPTY in parsed[text]}
    signatures = {text: happened for text, happened in signatures.items() if text not in empty}
    same = _pairs(signatures, parsed)
    never, left = _never(signatures, parsed, same)
    same_if_empty = _pairs(empty, parsed)
    left |= _with_another_error(signatures, parsed, same)
    return Refused(same, same_if_empty, never, _never(empty, parsed, same_if_empty)[0], left)


def _never(
    signatures: dict[str, list[str]],
    parsed: dict[str, dict[str, str]],
    same: tuple[tuple[str, str, str], ...],
) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Dtypes that an argument never had without a refusal, where the pairs agree; and the refusals that this leaves open."""

    def agrees(text: str) -> bool:
        return not any(_differ(parsed[text], a, b) for a, b, _ in same)

    left = {text: error for text, error in _refused(signatures).items() if agrees(text)}
    never: dict[str, dict[str, str]] = {}
    for name in _names(parsed):
        for code in sorted({parsed[t].get(name, "").rstrip(".") for t in left} & CODES):
            having = [t for t in signatures if parsed[t].get(name, "").rstrip(".") == code and agrees(t)]
            if all(t in left for t in having):
                never.setdefault(name, {})[code] = _most_common(left[t] for t in having)
                left = {t: e for t, e in left.items() if t not in having}
    return never, left


def _refused(signatures: dict[str, list[str]]) -> dict[str, str]:
    """Signatures that were refused each time, with the error."""
    return {
        t: happened[0]
        for t, happened in signatures.items()
        if len(happened) == 1 and happened[0] not in ("", "?")
    }


def _pairs(
    signatures: dict[str, list[str]], parsed: dict[str, dict[str, str]]
) -> tuple[tuple[str, str, str], ...]:
    """Pairs of arguments whose dtypes always had to agree: seen in at least two ways to differ, and once to agree."""
    refused = _refused(signatures)
    taken = [parsed[t] for t, happened in signatures.items() if "" in happened]
    pairs = []
    for first, second in itertools.combinations(_names(parsed), 2):
        differing = [t for t in signatures if _differ(parsed[t], first, second)]
        ways = {(parsed[t][first], parsed[t][second]) for t in differing}
        if (
            len(ways) >= 2
            and all(t in refused for t in differing)
            and any(first in t and second in t for t in taken)
        ):
            pairs.append((first, second, _most_common(refused[t] for t in differing)))
    return tuple(pairs)


def _with_another_error(
    signatures: dict[str, list[str]],
    parsed: dict[str, dict[str, str]],
    same: tuple[tuple[str, str, str], ...],
) -> dict[str, str]:
    """Refusals of signatures in which a pair disagrees, with another error than the pair's: a kernel may look at one first."""
    others = {}
    for text, error in _refused(signatures).items():
        broken = [kind for first, second, kind in same if _differ(parsed[text], first, second)]
        if broken and broken[0] != error:
            others[text] = error
    return others


def _names(parsed: dict[str, dict[str, str]]) -> list[str]:
    places: dict[str, int] = {}
    for found in parsed.values():
        for place, name in enumerate(found):
            if name != EMPTY:
                places[name] = max(place, places.get(name, 0))
    return sorted(places, key=places.__getitem__)


def _differ(found: dict[str, str], first: str, second: str) -> bool:
    a, b = found.get(first, "").rstrip("."), found.get(second, "").rstrip(".")
    return a in CODES and b in CODES and a != b


def _most_common(errors: Iterable[str]) -> str:
    return Counter(errors).most_common(1)[0][0]
