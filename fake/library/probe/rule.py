"""`FakeRule`: a derived rule, callable as a fake kernel and printable as the source of one."""

from __future__ import annotations

import enum
import inspect
import math
import re
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fake.library.errors import ProbeError
from fake.library.probe import helpers
from fake.library.probe.call_facts import Facts, bind, facts_of
from fake.library.probe.operator_parameters import fill_defaults, literal, signature_text
from fake.library.register import get_ctx, register_fake
from fake.seam import library as _torch

_HELPERS = {name: getattr(helpers, name) for name in helpers.__all__}


class UndecidedError(ProbeError):
    """The evidence does not determine what the operator returns for this call.

    Attributes:
        what: what is unknown.
        call: the call that would decide it.
    """

    def __init__(self, op: str, what: str, call: str) -> None:
        super().__init__(f"{op}: {what}. Give probe() this call as a sample: {call}", op=op)
        self.what = what
        self.call = call


#: How calls are divided into classes: ("all",), ("by", argument), ("rank", tensor), ("class", detail).
Level = tuple[Any, ...]


def key_of(facts: Facts, level: Level) -> Any:
    """Return the class of a call.

    ``("class", 1)`` separates calls by the kinds of arguments and by flags, 2 also by ranks,
    3 also by numbers.
    """
    kind = level[0]
    if kind == "all":
        return ()
    if kind == "by":
        return facts.category_of(level[1])
    if kind == "rank":
        return dict(facts.ranks()).get(level[1])
    key: tuple[Any, ...] = (facts.structure(), facts.categories())
    if level[1] >= 2:
        key += (facts.ranks(),)
    if level[1] >= 3:
        key += (facts.numbers(),)
    return key


@dataclass
class Property:
    """A solved quantity: for each class of calls, all expressions that fit the evidence, simplest first.

    Attributes:
        levels: the ways of dividing calls into classes that have rules, coarsest first.
        rules: level and class → expressions.
        extra: computes a further part of the class key (the dtypes, or whether inputs
            are contiguous), or None.
        refuses_empty: whether the rules do not hold for inputs without elements.
    """

    name: str
    levels: list[Level] = field(default_factory=list)
    rules: dict[tuple[Level, Any], list[str]] = field(default_factory=dict)
    extra: Callable[[Facts], Any] | None = None
    refuses_empty: bool = False

    def add(self, level: Level, key: Any, expressions: list[str]) -> None:
        """Record what holds for a class.

        Args:
            level: how calls are divided into classes.
            key: the class.
            expressions: all that fit the evidence, simplest first.
        """
        if level not in self.levels:
            self.levels.append(level)
        self.rules[level, key] = expressions

    def key(self, facts: Facts, level: Level) -> Any:
        """Return the class of a call at a level."""
        if level[0] == "extra":
            return (*key_of(facts, ("class", 1)), self.extra(facts) if self.extra else None)
        return key_of(facts, level)

    def find(self, facts: Facts) -> tuple[tuple[Level, Any], list[str]] | None:
        """Return the expressions for a call at the coarsest level that has any, or None."""
        if self.refuses_empty and facts.has_empty():
            return None
        for level in self.levels:
            key = level, self.key(facts, level)
            if key in self.rules:
                return key, self.rules[key]
        return None


_compiled: dict[str, Any] = {}


def evaluate(expression: str, environment: Mapping[str, Any]) -> Any:
    """Evaluate a rule's expression; None if it does not apply."""
    code = _compiled.get(expression)
    if code is None:
        code = _compiled[expression] = compile(expression, "<rule>", "eval")
    try:
        return eval(code, {"torch": torch, "math": math, **_HELPERS, **environment})
    except (LookupError, ValueError, TypeError, AttributeError, ArithmeticError, RuntimeError, NameError):
        return None


@dataclass
class FakeRule:
    """A derived fake kernel.

    Call it with the operator's arguments (fake or meta tensors) to get the outputs, `register` it,
    or print it.

    Attributes:
        op: the operator's name.
        names: its parameters, if known.
        problems: why there is no rule at all; empty if there is one.
        open_questions: what the samples leave open, each with the call that would decide it.
        crashes: calls on which the kernel ended its process.
        signature: its parameters with their defaults, if known.
    """

    op: str
    names: list[str] | None
    freshness: Property
    counts: Property
    shapes: list[Property]
    dtypes: list[Property]
    strides: list[Property]
    dynamic: list[dict[Any, set[int]]]
    container: type | None
    seen_kinds: set[tuple[str, str]] = field(default_factory=set)
    seen_categories: set[tuple[str, str]] = field(default_factory=set)
    all_names: list[str] = field(default_factory=list)
    seen_ranks: dict[str, set[int]] = field(default_factory=dict)
    seen_noncontiguous: set[str] = field(default_factory=set)
    category_ranks: dict[tuple[str, str], dict[str, int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    open_questions: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    signature: inspect.Signature | None = None

    @property
    def decided(self) -> bool:
        """Whether there is a rule; it may still not cover every call."""
        return not self.problems

    # --- answering ---------------------------------------------------------------------------------
    def _check_covered(self, facts: Facts) -> None:
        if self.problems:
            raise UndecidedError(self.op, self.problems[0], call_text(facts))
        kinds = {*facts.kinds(), *((n, "absent") for n in self.all_names if n not in facts.values)}
        for name, kind in sorted(kinds - self.seen_kinds):
            raise UndecidedError(self.op, f"no sample has {name} {kind}", call_text(facts))
        for category in facts.categories():
            if category not in self.seen_categories:
                raise UndecidedError(self.op, f"no sample has {category[0]}={category[1]}", call_text(facts))
            highest = self.category_ranks[category]
            for name, tensor in facts.tensors:
                if tensor.dim() > highest.get(name, 0):
                    what = (
                        f"no sample has {category[0]}={category[1]} and {tensor.dim()} dimensions in {name}"
                    )
                    raise UndecidedError(self.op, what, call_text(facts))
        for name, tensor in facts.tensors:
            seen = self.seen_ranks.get(name, set())
            if not tensor.is_contiguous() and name not in self.seen_noncontiguous:
                raise UndecidedError(self.op, f"no sample has a non-contiguous {name}", call_text(facts))
            if seen and tensor.dim() > max(seen) + 2:
                raise UndecidedError(
                    self.op, f"no sample has {tensor.dim()} dimensions in {name}", call_text(facts)
                )

    def _evaluate_property(
        self, prop: Property, facts: Facts, environment: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        found = prop.find(facts)
        if found is None:
            raise UndecidedError(
                self.op, f"the evidence does not decide the {prop.name} of such calls", call_text(facts)
            )
        key, expressions = found
        differ: list[tuple[Any, Any]] = []  # the simplest expression for each answer
        for expression in expressions:
            answer = evaluate(expression, environment)
            if answer is not None and not any(answer == other for _, other in differ):
                differ.append((expression, answer))
        if len(differ) != 1:
            fit = [expression for expression, _ in differ[:3]]
            raise UndecidedError(self.op, f"several rules fit for the {prop.name}: {fit}", call_text(facts))
        return key, differ[0][1]

    def describe(
        self, *args: Any, **kwargs: Any
    ) -> list[tuple[tuple[Any, ...], tuple[int, ...] | None, torch.dtype]]:
        """Return ``(shape, strides, dtype)`` of each output; if a size depends on data,
        it and the strides are None.

        Raises:
            UndecidedError: the evidence does not cover this call.
        """
        args, kwargs = fill_defaults(self.signature, args, kwargs)
        return self.describe_facts(facts_of(bind(self.names, args, kwargs)))

    def describe_facts(
        self, facts: Facts
    ) -> list[tuple[tuple[Any, ...], tuple[int, ...] | None, torch.dtype]]:
        """Do the same as `describe` for a call given by its facts alone."""
        self._check_covered(facts)
        environment = facts.environment(self.all_names)
        shared = self._evaluate_property(self.freshness, facts, environment)[1]
        if shared:
            raise UndecidedError(self.op, f"such calls return or write {shared}'s memory", call_text(facts))
        count = self._evaluate_property(self.counts, facts, environment)[1]
        outputs = []
        for index in range(count):
            key, shape = self._evaluate_property(self.shapes[index], facts, environment)
            unknown = self.dynamic[index].get(key, set())
            shape = tuple(None if i in unknown else s for i, s in enumerate(shape))
            dtype = self._evaluate_property(self.dtypes[index], facts, environment)[1]
            strides = None
            if not unknown:
                environment_with_shape = {**environment, "shape": shape}
                strides = self._evaluate_property(self.strides[index], facts, environment_with_shape)[1]
            outputs.append((shape, strides, dtype))
        return outputs

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs as tensors without data on the inputs' device.

        Raises:
            UndecidedError: the evidence does not cover this call.
        """
        described = self.describe(*args, **kwargs)
        tensors = [t for t in _torch.pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        device = kwargs.get("device") or (tensors[0].device if tensors else torch.device("cpu"))
        outputs = []
        for shape, strides, dtype in described:
            if strides is None:
                sizes = [get_ctx().new_dynamic_size() if s is None else s for s in shape]
                outputs.append(torch.empty(sizes, dtype=dtype, device=device))
            else:
                outputs.append(torch.empty_strided(shape, strides, dtype=dtype, device=device))
        if self.container is None:
            return outputs[0]
        return outputs if self.container is list else tuple(outputs)

    def register(self, op: Any = None, **options: Any) -> Any:
        """Register the rule as the fake kernel of ``op`` (default: the probed operator)."""

        def fake_kernel(*args: Any, **kwargs: Any) -> Any:
            return self(*args, **kwargs)

        return register_fake(self.op if op is None else op, fake_kernel, **options)

    # --- printing ----------------------------------------------------------------------------------
    @property
    def source(self) -> str:
        """The source of an ordinary fake kernel."""
        return _kernel_source(self)

    def __str__(self) -> str:
        return self.source


def call_text(facts: Facts) -> str:
    """Format a call as text: ``x=float32[2, 3], dim=1``."""

    def one(value: Any) -> str:
        if isinstance(value, list):
            return "[" + ", ".join(map(one, value)) + "]"
        if hasattr(value, "shape"):
            return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        return repr(value)

    return textwrap.shorten(", ".join(f"{n}={one(v)}" for n, v in facts.values.items()), 300)


# --- a rule as the source of an ordinary fake kernel --------------------------------------------------
def _kernel_source(rule: FakeRule) -> str:
    """Return the Python source of a function ``fake_kernel``, with the helpers that it uses.

    Where the evidence does not decide, the function raises NotImplementedError, as the rule raises its error.
    Comments name alternatives that fit the evidence equally well.
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
    """Return imports of the enums that defaults and conditions name."""
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
    lines = _assignment("shape", rule.shapes[index], rule.all_names)
    unknown = {i for dims in rule.dynamic[index].values() for i in dims}
    lines += _assignment("dtype", rule.dtypes[index], rule.all_names)
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
    lines += _assignment("strides", rule.strides[index], rule.all_names)
    lines.append(f"output_{index} = torch.empty_strided(shape, strides, dtype=dtype, device={device})")
    return lines


def _device(rule: FakeRule) -> str:
    if "device" in rule.all_names:
        return "device"
    ranks = list(rule.seen_ranks)
    return f"{ranks[0]}.device" if ranks else "'cpu'"


def _assignment(variable: str, prop: Property, names: list[str]) -> list[str]:
    """Return lines that assign ``variable``, unconditionally or by the class of the call."""
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
    # The dispatcher passes lists, Python code may pass either.
    return f"tuple({name}) == {literal(value)}" if isinstance(value, tuple) else f"{name} == {literal(value)}"


def _category(name: str, value: str) -> str:
    if value == "absent":
        return f"{name} is None"
    if value in ("tensor", "float", "int", "ints", "dtype", "tensors"):
        types = {"tensor": "torch.Tensor", "float": "float", "int": "int", "dtype": "torch.dtype"}
        return f"isinstance({name}, {types.get(value, '(list, tuple)')})"
    return f"{name} is {value}" if value in ("None", "True", "False") else f"{name} == {value}"


def _used_helpers(text: str) -> list[str]:
    """Return the helpers that the text calls, directly or not, in the order in which they must be defined."""
    used: set[str] = set()
    pending = text
    while True:
        found = {n for n in helpers.__all__ if re.search(rf"\b{n}\(", pending)} - used
        if not found:
            return [n for n, f in vars(helpers).items() if n in used and inspect.isfunction(f)]
        used |= found
        pending = "\n".join(inspect.getsource(getattr(helpers, n)) for n in found)
