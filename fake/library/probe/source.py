"""A rule as the source of an ordinary fake kernel."""

from __future__ import annotations

import enum
import inspect
import re
from typing import TYPE_CHECKING, Any

from fake.library.probe import helpers
from fake.library.probe.parameters import literal, signature_text

if TYPE_CHECKING:
    from fake.library.probe.rule import FakeRule, Property

__all__ = ["write"]


def write(rule: FakeRule) -> str:
    """Python source of a function ``fake_kernel``, with the helpers that it uses.

    Where the evidence does not decide, the function raises NotImplementedError, as the rule does. Alternatives that
    fit the evidence equally well are named in comments.
    """
    if rule.problems:
        return "# No rule: " + "; ".join(rule.problems).replace("\n", "\n# ") + "\n"
    body: list[str] = []
    outputs = []
    for index in range(len(rule.shapes)):
        body += _output(rule, index)
        outputs.append(f"output_{index}")
    body.append(f"return {_returned(rule, outputs)}")
    if rule.signature is not None:
        signature = signature_text(rule.signature)
    else:
        required, optional = _parameters(rule)
        signature = ", ".join([*required, *(f"{name}=None" for name in optional)])
    function = [f"def fake_kernel({signature}):", *(f"    {line}" for line in body)]
    text = "\n".join(function) + "\n"
    used = _used_helpers(text)
    imports = ["import torch"]
    if "math." in text:
        imports.insert(0, "import math")
    if "get_ctx()" in text:
        imports.append("from fake.library import get_ctx")
    imports += _enum_imports(rule)
    parts = ["\n".join(imports)]
    parts += [inspect.getsource(getattr(helpers, name)).rstrip() for name in used]
    parts.append(f"# Derived from the kernel of {rule.op} by fake.library.probe.\n{text}")
    return "\n\n\n".join(parts)


def _enum_imports(rule: FakeRule) -> list[str]:
    """Imports of the enums that defaults and conditions name."""
    values = [p.default for p in rule.signature.parameters.values()] if rule.signature is not None else []
    classes = {type(v) for v in values if isinstance(v, enum.Enum) and literal(v) is not None}
    places = {(c.__module__, c.__qualname__.split(".")[0]) for c in classes}
    return [f"from {module} import {name}" for module, name in sorted(places) if module != "__main__"]


def _parameters(rule: FakeRule) -> tuple[list[str], list[str]]:
    absent = {name for name, kind in rule.seen_kinds if kind == "absent"}
    names = list(rule.names or []) or rule.all_names
    names = [*names, *(n for n in rule.all_names if n not in names)]
    first_optional = next(
        (i for i, n in enumerate(names) if n in absent or n not in rule.all_names), len(names)
    )
    return names[:first_optional], names[first_optional:]


def _returned(rule: FakeRule, outputs: list[str]) -> str:
    if rule.container is None:
        return outputs[0]
    counts = sorted({e for expressions in rule.counts.rules.values() for e in expressions[:1]})
    joined = ", ".join(outputs)
    many = f"[{joined}]" if rule.container is list else f"({joined}{',' if len(outputs) == 1 else ''})"
    return (
        many
        if len(counts) == 1 and counts[0].isdigit()
        else f"{many}  # as many as the call asks for: {counts}"
    )


def _output(rule: FakeRule, index: int) -> list[str]:
    lines = _choose("shape", rule.shapes[index], rule.all_names)
    unknown = {i for dims in rule.dynamic[index].values() for i in dims}
    lines += _choose("dtype", rule.dtypes[index], rule.all_names)
    device = _device(rule)
    if unknown:
        lines.append(
            f"shape = [get_ctx().new_dynamic_size() if i in {sorted(unknown)} else s for i, s in enumerate(shape)]"
        )
        lines.append(f"output_{index} = torch.empty(shape, dtype=dtype, device={device})")
        return lines
    strides = {e for expressions in rule.strides[index].rules.values() for e in expressions[:1]}
    if strides == {"row_major(shape)"}:
        lines.append(f"output_{index} = torch.empty(shape, dtype=dtype, device={device})")
        return lines
    lines += _choose("strides", rule.strides[index], rule.all_names)
    lines.append(f"output_{index} = torch.empty_strided(shape, strides, dtype=dtype, device={device})")
    return lines


def _device(rule: FakeRule) -> str:
    if "device" in rule.all_names:
        return "device"
    ranks = list(rule.seen_ranks)
    return f"{ranks[0]}.device" if ranks else "'cpu'"


def _choose(variable: str, prop: Property, names: list[str]) -> list[str]:
    """Lines that assign ``variable``: at once, or by the class of the call."""
    lines: list[str] = []
    branches = 0
    for level in prop.levels:
        for (rule_level, key), expressions in prop.rules.items():
            if rule_level != level:
                continue
            others = f"  # or: {'; '.join(expressions[1:3])}" if len(expressions) > 1 else ""
            assignment = f"{variable} = {expressions[0]}{others}"
            condition = _condition(level, key, names)
            if condition is None:
                return [assignment]
            lines.append(f"{'el' if branches else ''}if {condition}:")
            lines.append(f"    {assignment}")
            branches += 1
    refusal = f'raise NotImplementedError("no sample decides the {variable} of such calls")'
    return [*lines, "else:", f"    {refusal}"] if branches else [refusal]


def _condition(level: tuple[Any, ...], key: Any, names: list[str]) -> str | None:
    if level[0] == "all":
        return None
    if level[0] == "by":
        return _category(level[1], key)
    if level[0] == "rank":
        return f"{level[1]} is None" if key is None else f"{level[1]}.dim() == {key}"
    structure, categories, *more = key
    present = {name for name, _ in structure}
    tests = [f"{name} is None" for name in names if name not in present]
    tests += [f"len({name}) == {length}" for name, (kind, length) in structure if kind == "tensors"]
    tests += [_category(name, value) for name, value in categories if value != "None"]
    if level[0] == "class":
        if level[1] >= 2:
            tests += [f"{name}.dim() == {rank}" for name, rank in more[0]]
        if level[1] >= 3:
            tests += [_equals(name, value) for name, value in more[1]]
    elif isinstance(more[0], bool):
        tensors = [name for name, (kind, _) in structure if kind == "tensor"]
        tests.append(" and ".join(f"{name}.is_contiguous()" for name in tensors) if more[0] else "True")
    else:
        dtypes, given = more[0]
        tests += [f"{name}.dtype == {dtype}" for name, dtype in dtypes]
        tests += [f"{name} == {dtype}" for name, dtype in given]
    return " and ".join(tests) or "True"


def _equals(name: str, value: Any) -> str:
    # The dispatcher passes lists, Python code passes either.
    return f"tuple({name}) == {literal(value)}" if isinstance(value, tuple) else f"{name} == {literal(value)}"


def _category(name: str, value: str) -> str:
    if value == "absent":
        return f"{name} is None"
    if value in ("tensor", "float", "int", "ints", "dtype", "tensors"):
        types = {"tensor": "torch.Tensor", "float": "float", "int": "int", "dtype": "torch.dtype"}
        return f"isinstance({name}, {types.get(value, '(list, tuple)')})"
    return f"{name} is {value}" if value in ("None", "True", "False") else f"{name} == {value}"


def _used_helpers(text: str) -> list[str]:
    """Helpers that the text calls, and those that they call, in the order in which they must be defined."""
    used: set[str] = set()
    pending = text
    while True:
        found = {n for n in helpers.__all__ if re.search(rf"\b{n}\(", pending)} - used
        if not found:
            return [n for n, f in vars(helpers).items() if n in used and inspect.isfunction(f)]
        used |= found
        pending = "\n".join(inspect.getsource(getattr(helpers, n)) for n in found)
