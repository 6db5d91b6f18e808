"""Contracts: what the user promises about a size, and wants the graph to support.

``Dim("batch", min=1, max=64, multiple_of=8)`` on a dimension says two things: inputs will satisfy it, and one
graph has to serve all of it. The first becomes a fact (what follows from it needs no guard). The second is
checked when guards are made: a program that forces a smaller set raises an error that says what forced it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from fake.errors import ContractError, ContractInputError, ContractViolationError, Violation
from fake.seam import symbolic_shapes as _t
from fake.symbols.enumeration import holds_for_all
from fake.symbols.explain_guards import location_text
from fake.symbols.implications import Facts
from fake.symbols.reasons import Reason, reason_now, reasons_of, record
from fake.symbols.shape_guards import forcing_reasons, minimal_relations
from fake.symbols.terms import Terms, text_of_source
from fake.wrong_arguments import check_type

_POLICIES = {
    "static": _t.DimDynamic.STATIC,
    "auto": _t.DimDynamic.DUCK,
    "dynamic": _t.DimDynamic.DYNAMIC,
    "unbacked": _t.DimDynamic.UNBACKED,
}
_MARK = "_fake_contract"


@dataclass(frozen=True)
class Dim:
    """A size with a name and a promised range.

    Dimensions whose ``Dim`` has the same name have the same size. As in torch, sizes 0 and 1 get graphs of
    their own: a contract with ``min=1`` is about the graph for sizes of at least 2.

    Attributes:
        name: the size's name in messages.
        min: the least size.
        max: the greatest size; ``None`` for no limit.
        multiple_of: a number that divides every size.

    Raises:
        ContractError: no size of at least 2 satisfies the contract.

    >>> Dim("batch", min=1, max=64)
    Dim(name='batch', min=1, max=64, multiple_of=1)
    """

    name: str
    min: int = 0
    max: int | None = None
    multiple_of: int = 1

    def __str__(self) -> str:
        """Return the contract as it was written, without the defaults."""
        least = f", min={self.min}" if self.min else ""
        most = "" if self.max is None else f", max={self.max}"
        step = "" if self.multiple_of == 1 else f", multiple_of={self.multiple_of}"
        return f"Dim({self.name!r}{least}{most}{step})"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ContractError("Dim", "name", f"must be a string that is not empty, not {self.name!r}")
        for field in ("min", "multiple_of"):
            value = getattr(self, field)
            if type(value) is not int or value < (field == "multiple_of"):
                raise ContractError(
                    f"Dim({self.name!r})", field, f"must be a positive integer, not {value!r}"
                )
        if self.max is not None and (type(self.max) is not int or self.max < 0):
            raise ContractError(f"Dim({self.name!r})", "max", f"must be an integer or None, not {self.max!r}")
        least = -(-max(self.min, 2) // self.multiple_of) * self.multiple_of
        if self.max is not None and self.max < least:
            raise ContractError(
                f"Dim({self.name!r})", "max",
                f"must be at least {least}, the least size from 2 on that fits the other fields; it is {self.max}",
            )  # fmt: skip

    def allows(self, size: int) -> bool:
        """Return whether a size satisfies the contract."""
        return size >= self.min and (self.max is None or size <= self.max) and size % self.multiple_of == 0


Dims = Mapping[int, "Dim | str"]
"""A :class:`Dim`, or ``"static"``, ``"auto"``, ``"dynamic"`` or ``"unbacked"``,
for each dimension of a tensor."""


@dataclass(frozen=True)
class Declared:
    """A dimension under contract, with its original symbol."""

    dim: Dim
    text: str
    symbol: sympy.Symbol


class Contract:
    """The contracts of one environment.

    Attributes:
        by_input: declarations for inputs by their names in the user's terms,
            made before the inputs were seen.
        declared: the dimensions under contract that have become symbols.
        examples: for each name, the ``Dim``, the first dimension that has it,
            and that dimension's example size.
        inputs: the names of the inputs that were seen.
    """

    def __init__(self, by_input: Mapping[str, Dims] | None = None) -> None:
        if not isinstance(by_input, Mapping | None):
            raise ContractError(
                "contracts", "contracts", f"must map names of inputs to their dims, it is {by_input!r}"
            )
        self.by_input: dict[str, dict[int, Dim | str]] = {}
        for name, dims in (by_input or {}).items():
            self.add(name, dims)
        self.declared: list[Declared] = []
        self.examples: dict[str, tuple[Dim, str, int]] = {}
        self.inputs: set[str] = set()

    def add(self, name: str, dims: Dims) -> None:
        """Add declarations for an input.

        Raises:
            ContractError: ``dims`` is invalid, or the name is not a string.
        """
        if not isinstance(name, str):
            raise ContractError("contracts", "name", f"must be that of an input, such as 'x', not {name!r}")
        self.by_input[name] = {**self.by_input.get(name, {}), **parse_dims(dims, name)}

    def of(self, source: Any) -> dict[int, Dim | str]:
        """Return the declarations for an input."""
        name = text_of_source(source)
        self.inputs.add(name)
        return self.by_input.get(name, {})


def parse_dims(dims: Dims, owner: str, rank: int | None = None) -> Dims:
    """Check the declarations for a tensor.

    Args:
        dims: a ``Dim`` or a policy by dimension; negative dimensions count from the end.
        owner: the owner of the dimensions, for the error.
        rank: the tensor's number of dimensions; None if unknown.

    Returns:
        The declarations, with dimensions counted from the front if ``rank`` is known.

    Raises:
        ContractError: the tensor lacks a dimension, or a value is neither a ``Dim`` nor a policy.
    """
    parsed: dict[int, Dim | str] = {}
    if not isinstance(dims, Mapping):
        raise ContractError(owner, "dims", f"must map dimensions to Dims, it is {dims!r}")
    for axis, wanted in dims.items():
        if type(axis) is not int or (rank is not None and not -rank <= axis < rank):
            raise ContractError(owner, f"dims[{axis!r}]", f"is no dimension of it (it has {rank})")
        if not isinstance(wanted, Dim) and wanted not in _POLICIES:
            raise ContractError(
                owner, f"dims[{axis}]", f"must be a fake.Dim or one of {', '.join(_POLICIES)}, not {wanted!r}"
            )
        parsed[axis % rank if rank is not None else axis] = wanted
    return parsed


def symbolic_context(tensor: torch.Tensor, dims: Dims) -> Any:
    """Return torch's form of a policy for each dimension; dimensions not listed are static."""
    policies = [_t.DimDynamic.STATIC] * tensor.dim()
    for axis, wanted in dims.items():
        policies[axis] = _t.DimDynamic.DYNAMIC if isinstance(wanted, Dim) else _POLICIES[wanted]
    return _t.StatelessSymbolicContext(dynamic_sizes=policies)


def mark_dynamic(tensor: torch.Tensor, dims: Dims) -> None:
    """Put a contract on a tensor that will be an input of a compiled function.

    torch's own marks are set too, so that the sizes stay symbolic in any case. The contract itself is checked
    by environments of this package (:class:`fake.using_shape_env`).

    Raises:
        ContractError: ``dims`` is invalid.
        ContractInputError: the tensor itself violates the contract.
        ArgumentTypeError: ``tensor`` is not a tensor.

    >>> import fake
    >>> fake.mark_dynamic(torch.zeros(8, 4), {0: fake.Dim("batch", max=64)})
    """
    check_type("mark_dynamic", "tensor", tensor, torch.Tensor, "a tensor")
    parsed = parse_dims(dims, "mark_dynamic", tensor.dim())
    _check_sizes(tensor.shape, parsed, "the tensor")
    setattr(tensor, _MARK, dict(parsed))
    for axis, wanted in parsed.items():
        if isinstance(wanted, Dim) or wanted == "dynamic":
            _t.mark_dynamic(tensor, axis)


def mark_of(tensor: Any) -> dict[int, Dim | str]:
    """Return the contract that :func:`mark_dynamic` put on a tensor."""
    return getattr(tensor, _MARK, {})


def _check_sizes(sizes: Any, dims: Dims, name: str) -> None:
    for axis, wanted in dims.items():
        if isinstance(wanted, Dim) and axis < len(sizes) and type(sizes[axis]) is int:
            size = sizes[axis]
            if not wanted.allows(size):
                raise ContractInputError(wanted, f"{name}.size({axis})", size)


def set_dynamic_sizes(context: Any, dims: Dims) -> None:
    """Make the dimensions that have a declaration dynamic in a symbolic context,
    or give them their policy."""
    for axis, wanted in dims.items():
        if axis < len(context.dynamic_sizes):
            kind = _t.DimDynamic.DYNAMIC if isinstance(wanted, Dim) else _POLICIES[wanted]
            context.dynamic_sizes[axis] = kind


def check_example(contract: Contract, source: Any, example: Any, dims: Dims) -> None:
    """Refuse an example input that violates its declarations, before anything is created for it.

    Args:
        contract: the declarations so far.
        source: where Dynamo finds the tensor.
        example: the sizes of the example input.
        dims: the declarations for it.

    Raises:
        ContractInputError: a size is not allowed, or differs from another one of the same ``Dim``.
        ContractError: another ``Dim`` has the same name.
    """
    name = text_of_source(source)
    _check_sizes(example, dims, name)
    for axis, dim in dims.items():
        if not isinstance(dim, Dim):
            continue
        text, size = f"{name}.size({axis})", example[axis]
        known, other, other_size = contract.examples.get(dim.name, (dim, text, size))
        if known != dim:
            raise ContractError(f"Dim({dim.name!r})", text, f"was declared as {known} for {other}")
        if other_size != size:
            raise ContractInputError(dim, text, size, other, other_size)


def declare(shape_env: Any, contract: Contract, source: Any, example: Any, sizes: Any, dims: Dims) -> None:
    """Turn the promises in ``dims`` into facts of an environment.

    Args:
        example: the sizes of the example input.
        sizes: what they became: symbols, or numbers where 0 or 1 got its own graph.
    """
    name = text_of_source(source)
    for axis, dim in dims.items():
        if not isinstance(dim, Dim):
            continue
        text = f"{name}.size({axis})"
        contract.examples.setdefault(dim.name, (dim, text, example[axis]))
        symbol = sizes[axis].node.expr if _t.is_symbolic(sizes[axis]) else None
        if isinstance(symbol, sympy.Symbol):
            _add_promised_facts(shape_env, contract, Declared(dim, text, symbol))


def _add_promised_facts(shape_env: Any, contract: Contract, declared: Declared) -> None:
    dim, symbol = declared.dim, declared.symbol
    step = dim.multiple_of
    lower = -(-max(dim.min, 2 if shape_env.specialize_zero_one else 0) // step) * step
    upper = _t.int_oo if dim.max is None else dim.max // step * step
    shape_env.constrain_symbol_range(symbol, compiler_min=lower, compiler_max=upper)
    promise = sympy.Le(lower, symbol, evaluate=False)
    if dim.max is not None:
        promise = sympy.And(promise, sympy.Le(symbol, upper, evaluate=False), evaluate=False)
    record(shape_env, reason_now(promise, "declared"))
    if step > 1:
        shape_env.evaluate_expr(sympy.Eq(_t.Mod(symbol, step), 0))
        for divisor in sympy.divisors(step)[1:-1]:
            _t.assume_divisible(shape_env, symbol, divisor)
    earlier = next((d for d in contract.declared if d.dim.name == dim.name), None)
    if earlier is not None and earlier.symbol != symbol:
        shape_env.evaluate_expr(sympy.Eq(symbol, earlier.symbol))
    contract.declared.append(declared)


def declare_on(shape_env: Any, source: Any, dims: Dims, example: Any) -> None:
    """Add declarations for an input that is about to be converted.

    Args:
        shape_env: the environment.
        source: where Dynamo finds the tensor.
        dims: a ``Dim`` or a policy by dimension.
        example: the sizes of the input: one that violates the contract is refused before anything is stored.

    Raises:
        ContractError: the environment does not support contracts, or has another ``Dim`` with the same name.
        ContractInputError: the input itself violates the contract.
    """
    contract = getattr(shape_env, "contract", None)
    name = text_of_source(source)
    if not isinstance(contract, Contract):
        raise ContractError(
            name, "dims", "declares a fake.Dim, which only an environment fake.ShapeEnv() keeps"
        )
    check_example(contract, source, example, dims)
    contract.add(name, dims)


def check(shape_env: Any, contract: Contract) -> None:
    """Compare what a program has forced with what was promised.

    Raises:
        ContractViolationError: some size that a contract allows is not served;
            it lists all violations, with reasons.
    """
    if not contract.declared:
        return
    reasons = reasons_of(shape_env)
    names = _representatives(shape_env, contract)
    terms = Terms({**{s: d.text for s, d in names.items()}, **_other_texts(shape_env, names)})
    promised = _promised_facts(contract, names)
    found: list[Violation] = []
    for condition, symbols, guard_condition in _forced_conditions(shape_env, contract, names):
        if promised.implies(condition) or _holds_for_all(condition, names):
            continue
        promised.add(condition)  # what follows from it is not reported again
        causes = tuple(r for r in reasons if r.condition == guard_condition) or forcing_reasons(
            shape_env, condition, [r for r in reasons if r.kind != "assertion"]
        )
        owners = [d for d in contract.declared if d.symbol in symbols]
        for owner in owners[:1]:
            chain = tuple(r for r in causes if r.kind != "declared")
            found.append(
                Violation(
                    owner.dim,
                    owner.text,
                    terms.doprint(condition),
                    tuple(_reason_text(r, terms) for r in chain),
                )
            )
    if found:
        raise ContractViolationError(tuple(found))


def _holds_for_all(condition: sympy.Basic, names: Mapping[sympy.Basic, Declared]) -> bool:
    """Return whether a condition on one size holds for every promised size, by enumeration."""
    if len(condition.free_symbols) != 1 or not condition.free_symbols <= names.keys():
        return False
    (symbol,) = condition.free_symbols
    dim = names[symbol].dim
    return holds_for_all(condition, max(dim.min, 2), dim.max, dim.multiple_of)


def _reason_text(reason: Reason, terms: Terms) -> str:
    return f"{terms.doprint(reason.condition)}, asked by {reason.asked_by}{location_text(reason.where)}"


def _representatives(shape_env: Any, contract: Contract) -> dict[sympy.Basic, Declared]:
    """Map symbols under contract, and the symbols that now replace them, to their declarations."""
    names: dict[sympy.Basic, Declared] = {}
    for declared in contract.declared:
        names.setdefault(declared.symbol, declared)
    for declared in contract.declared:
        final = shape_env.replace(declared.symbol)
        if isinstance(final, sympy.Symbol):
            names.setdefault(final, declared)
    return names


def _other_texts(shape_env: Any, names: Any) -> dict[sympy.Basic, str]:
    return {
        symbol: text_of_source(sources[0])
        for symbol, sources in shape_env.var_to_sources.items()
        if sources and symbol not in names
    }


def _promised_facts(contract: Contract, names: Mapping[sympy.Basic, Declared]) -> Facts:
    facts = Facts()
    first_of: dict[str, sympy.Symbol] = {}
    for symbol, declared in names.items():
        dim = declared.dim
        facts.bound(symbol, max(dim.min, 2), dim.max)
        if dim.multiple_of > 1:
            facts.add(sympy.Eq(_t.Mod(symbol, dim.multiple_of), 0))
        first = first_of.setdefault(dim.name, symbol)
        if first != symbol:
            facts.add(sympy.Eq(first, symbol))
    return facts


def _forced_conditions(
    shape_env: Any, contract: Contract, names: Mapping[sympy.Basic, Declared]
) -> list[tuple[sympy.Basic, set[sympy.Basic], sympy.Basic | None]]:
    """Return conditions that the program forces on symbols under contract,
    with those symbols and what was asked."""
    forced: list[tuple[sympy.Basic, set[sympy.Basic], sympy.Basic | None]] = []
    for declared in contract.declared:
        final = shape_env.replace(declared.symbol)
        if final != declared.symbol and final.free_symbols <= names.keys():
            forced.append((sympy.Eq(declared.symbol, final, evaluate=False), {declared.symbol}, None))
        from_replacement = _conditions_of_replacement(declared.symbol, final)
        tie = sympy.Eq(declared.symbol, final, evaluate=False)
        ours = {declared.symbol} | (final.free_symbols & names.keys())
        if (
            not from_replacement
            and final.free_symbols - names.keys()
            and _excludes_promised_size(shape_env, tie, ours, names)
        ):
            from_replacement = [tie]
        forced += [(condition, {declared.symbol}, None) for condition in from_replacement]
    seen: set[sympy.Basic] = set()
    for symbol, declared in names.items():
        if shape_env.replace(symbol) != symbol or symbol in seen:
            continue
        seen.add(symbol)
        lower, upper = _t.concrete_bounds(shape_env, symbol)
        if lower is not None:
            forced.append((sympy.Ge(symbol, lower, evaluate=False), {declared.symbol}, None))
        if upper is not None:
            forced.append((sympy.Le(symbol, upper, evaluate=False), {declared.symbol}, None))
    for condition, guard in minimal_relations(shape_env).items():
        ours = condition.free_symbols & names.keys()
        if ours == condition.free_symbols or _excludes_promised_size(shape_env, condition, ours, names):
            forced.append((condition, {names[s].symbol for s in ours}, guard.expr))
    return forced


def _excludes_promised_size(
    shape_env: Any, condition: Any, ours: Any, names: Mapping[sympy.Basic, Declared]
) -> bool:
    """Return whether a condition that ties sizes under contract to free ones excludes some promised size.

    ``s0 == s1`` excludes nothing; ``s0*s1 == 48`` excludes every size that does not divide 48. The search
    covers a few hundred sizes.
    """
    free = condition.free_symbols - ours
    facts = Facts()
    for symbol in free:
        lower, upper = _t.concrete_bounds(shape_env, symbol)
        facts.bound(symbol, lower or 0, upper)
    symbols = sorted(ours, key=str)
    choices = itertools.product(*[_sample_sizes(names[symbol].dim) for symbol in symbols])
    for sizes in itertools.islice(choices, _MAX_SIZES):
        instance = condition.xreplace(dict(zip(symbols, map(sympy.Integer, sizes), strict=True)))
        if instance == sympy.false or (instance != sympy.true and facts.implies(sympy.Not(instance))):
            return True
    return False


_MAX_SIZES = 512


def _sample_sizes(dim: Dim) -> list[int]:
    """Return some promised sizes: the first ones, and the greatest,
    or one with few divisors if there is no limit."""
    step = dim.multiple_of
    first = -(-max(dim.min, 2) // step) * step
    last = 1_000_003 * step if dim.max is None else dim.max // step * step
    return [*range(first, min(last, first + 64 * step), step), last]


def _conditions_of_replacement(symbol: sympy.Symbol, final: sympy.Basic) -> list[sympy.Basic]:
    """Return the demand behind a replacement: ``symbol == 2*u + 1`` for a free ``u``
    demands an odd symbol."""
    if len(final.free_symbols) != 1 or isinstance(final, sympy.Symbol):
        return []
    (other,) = final.free_symbols
    factor = final.coeff(other)
    rest = final - factor * other
    if not (factor.is_Integer and rest.is_Integer and abs(factor) > 1):
        return []
    return [sympy.Eq(_t.PythonMod(symbol - rest, abs(factor)), 0)]
