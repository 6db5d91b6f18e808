"""Search for rewrite rules: pairs of small expressions that are exactly equal, one cheaper than the other.

Expressions of matrices with symbolic sizes are built operator by operator. Their hash is their residues in
exact arithmetic (:mod:`fxpasses.exact`). Expressions with the same hash form a class. Only the simplest of a
class is extended, so that no rule follows from a rule about a subexpression. A rule is an expression and a
cheaper one of its class, for some assignment of sizes. Instances of earlier rules are dropped, and each rule
is judged by :func:`fxpasses.exact.equivalent` on graphs of other sizes.

``python -m benchmarks found_rules`` prints the rules; given names of models of transformers, it also counts
how often their joint graphs contain each rule.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

import fxpasses
from benchmarks._transformers import NAMES, build
from fxpasses.compiling.observing import Observer
from fxpasses.exact import Verdict, equivalent
from fxpasses.exact.fields import field as field_of
from fxpasses.exact.machine import Machine
from fxpasses.exact.same_values import digests
from fxpasses.graphs.rewriting import copy_graph, value_of

aten = torch.ops.aten

Shape = tuple[str, str]
"""The letters of a matrix's sizes; ``1`` for a size of one."""

_TRIED = {"1": 1, "n": 3, "k": 4, "m": 5, "p": 2}
_OTHER = {"1": 1, "n": 5, "k": 3, "m": 2, "p": 7}
"""The sizes for the search, and those for certification."""
_DRAWS = 8
"""The number of random inputs on which a certificate is judged: a wrong rule is right in one draw of six or seven."""

SCENES: tuple[Mapping[str, int], ...] = (
    {"1": 1, "n": 4096, "k": 512, "m": 512, "p": 512},
    {"1": 1, "n": 4096, "k": 512, "m": 8, "p": 512},
    {"1": 1, "n": 8, "k": 512, "m": 2048, "p": 512},
    {"1": 1, "n": 4096, "k": 8, "m": 2048, "p": 8},
)
"""Sizes for the cost model: tokens and features, low rank, few rows, alternating wide and narrow layers."""


@dataclass(frozen=True)
class Term:
    """A variable, or an operator applied to terms.

    Attributes:
        name: the variable's or operator's name.
        shape: the shape of its value.
        args: the operator's arguments.
    """

    name: str
    shape: Shape
    args: tuple[Term, ...] = ()

    def __str__(self) -> str:
        if not self.args:
            return self.name
        sign = {"add": "+", "sub": "-", "mul": "*", "div": "/", "mm": "@"}.get(self.name)
        if sign is None:
            return f"{self.name}({', '.join(map(str, self.args))})"
        return f" {sign} ".join(f"({a})" if len(a.args) == 2 else str(a) for a in self.args)

    def parts(self) -> Iterator[Term]:
        """Yield the term and all its subterms, in reading order."""
        yield self
        for arg in self.args:
            yield from arg.parts()

    @property
    def operators(self) -> int:
        """The number of operators."""
        return sum(bool(part.args) for part in self.parts())

    @property
    def variables(self) -> list[Term]:
        """The variables, in reading order."""
        return list(dict.fromkeys(part for part in self.parts() if not part.args))


def _broadcast(*shapes: Shape) -> Shape | None:
    found = []
    for letters in zip(*shapes, strict=True):
        wide = {letter for letter in letters if letter != "1"}
        if len(wide) > 1:
            return None
        found.append(wide.pop() if wide else "1")
    return found[0], found[1]


def _product(a: Shape, b: Shape) -> Shape | None:
    return (a[0], b[1]) if a[1] == b[0] != "1" else None


@dataclass(frozen=True)
class Operator:
    """An operator on matrices.

    Attributes:
        shape: maps the argument shapes to the result shape, or ``None`` for arguments that it does not
            accept.
        call: computes it with ATen operators.
        weight: the cost of each computed element, in additions; ``0`` for a view.
    """

    shape: Callable[..., Shape | None]
    call: Callable[..., Any]
    weight: float = 1.0


def _pointwise(call: Callable[..., Any], weight: float = 1.0) -> Operator:
    return Operator(_broadcast, call, weight)


_MM = Operator(_product, aten.mm.default)
_LINEAR: dict[str, Operator] = {
    "mm": _MM,
    "t": Operator(lambda s: s[::-1] if "1" not in s else None, lambda x: (aten.permute.default, x, [1, 0]), 0),
    "add": _pointwise(aten.add.Tensor),
    "mul": _pointwise(aten.mul.Tensor),
    "rows": Operator(lambda s: ("1", s[1]) if s[0] != "1" else None, lambda x: (aten.sum.dim_IntList, x, [0], True)),
    "columns": Operator(lambda s: (s[0], "1") if s[1] != "1" else None, lambda x: (aten.sum.dim_IntList, x, [1], True)),
}  # fmt: skip
_POINTWISE: dict[str, Operator] = {
    **_LINEAR,
    "sub": _pointwise(aten.sub.Tensor),
    "div": _pointwise(aten.div.Tensor, 4.0),
    "neg": _pointwise(aten.neg.default),
    "exp": _pointwise(aten.exp.default, 10.0),
    "relu": _pointwise(aten.relu.default),
    "sigmoid": _pointwise(aten.sigmoid.default, 15.0),
    "tanh": _pointwise(aten.tanh.default, 15.0),
    "rsqrt": _pointwise(aten.rsqrt.default, 4.0),
}
OPERATORS = _POINTWISE

VARIABLES = tuple(
    Term(name, (shape[0], shape[1]))
    for name, shape in {
        "X": "nk", "Y": "nk", "W": "km", "V": "km", "U": "mp", "a": "1k", "r": "n1", "s": "11"
    }.items()
)  # fmt: skip


def calls(term: Term, call: Callable[..., Any], values: Mapping[str, Any]) -> Any:
    """Return the value of a term.

    Args:
        term: the term.
        call: returns the result of an operator for arguments.
        values: the values of its variables, by name.
    """
    if not term.args:
        return values[term.name]
    operator = OPERATORS[term.name]
    args = [calls(arg, call, values) for arg in term.args]
    if isinstance(operator.call, torch._ops.OpOverload):
        return call(operator.call, *args)
    return call(*operator.call(*args))


def cost(term: Term, sizes: Mapping[str, int]) -> float:
    """Estimate nanoseconds on one core: matmuls by FLOPs, the rest by elements; repeated terms count once."""
    total = 0.0
    for part in set(term.parts()):
        if not part.args:
            continue
        rows, columns = (sizes[letter] for letter in part.shape)
        if part.name == "mm":
            total += 2 * rows * columns * sizes[part.args[0].shape[1]] / 50 + rows * columns * 0.4
        else:
            read = max(sizes[a.shape[0]] * sizes[a.shape[1]] for a in part.args)
            total += OPERATORS[part.name].weight * max(rows * columns, read) * 0.1
    return total


@dataclass(frozen=True)
class Rule:
    """An expression and a cheaper one that is equal.

    Attributes:
        before: the expression.
        after: the cheaper one.
        gain: the best ratio of costs (after over before) according to the cost model.
        scene: the sizes that give this ratio.
        verdict: of exact arithmetic, for other sizes than those of the search.
    """

    before: Term
    after: Term
    gain: float
    scene: Mapping[str, int]
    verdict: Verdict | None = None

    def __str__(self) -> str:
        shapes = ", ".join(f"{v.name}[{', '.join(v.shape)}]" for v in self.before.variables)
        return f"{self.before}  ->  {self.after}    {shapes}"


class Search:
    """Enumerates expressions and finds rules among them.

    Args:
        operators: the operators that expressions consist of.
        most: the maximum number of operators in an expression.
    """

    def __init__(self, operators: Mapping[str, Operator], most: int) -> None:
        self._operators, self._most = operators, most
        self._machine = Machine(field_of(0), 0)
        generator = torch.Generator().manual_seed(1)
        self.terms = 0
        self.rules: list[Rule] = []
        self._classes: dict[Any, list[Term]] = {}
        self._values: dict[Term, Any] = {}
        self._levels: list[list[Term]] = [[]]
        for variable in VARIABLES:
            value = torch.randn([_TRIED[s] for s in variable.shape], generator=generator).double()
            self._values[variable] = self._machine.arithmetic.dual(value, torch.float32)
            self._meet(variable)
            self._levels[0].append(variable)

    def run(self) -> list[Rule]:
        """Return the rules, the simplest first."""
        for count in range(1, self._most + 1):
            new = []
            for term in self._of(count):
                self.terms += 1
                if self._meet(term):
                    new.append(term)
            self._levels.append(new)
        return self.rules

    def _of(self, count: int) -> Iterator[Term]:
        for name, operator in self._operators.items():
            if _arity(operator) == 1:
                choices: Any = ((x,) for x in self._levels[count - 1])
            else:
                pairs = ((i, count - 1 - i) for i in range(count))
                choices = itertools.chain.from_iterable(
                    itertools.product(self._levels[i], self._levels[j]) for i, j in pairs
                )
            for args in choices:
                shape = operator.shape(*(arg.shape for arg in args))
                if shape is not None:
                    yield Term(name, shape, args)

    def _meet(self, term: Term) -> bool:
        """Add a term to its class, with a rule if one is cheaper. Return whether it is the first there."""
        if term not in self._values:
            given = [self._values[arg] for arg in term.args]
            values = dict(zip(map(str, range(len(given))), given, strict=True))
            shallow = Term(
                term.name, term.shape, tuple(Term(n, a.shape) for n, a in zip(values, term.args, strict=True))
            )
            value = calls(shallow, lambda target, *args: self._machine.call(target, args, {}), values)
            if not bool(torch.isfinite(value.witness).all()):
                return False
            self._values[term] = value
        # A single exponential or logarithm leaves the middle level exact, in both directions.
        _, key, _ = digests(self._values[term])
        known = self._classes.setdefault((key, term.shape), [])
        for other in known:
            self._compare(term, other)
        known.append(term)
        if len(known) > 1:
            del self._values[term]
        return len(known) == 1

    def _compare(self, one: Term, other: Term) -> None:
        for before, after in ((one, other), (other, one)):
            found = [(cost(after, s) / (cost(before, s) or 1.0), s) for s in SCENES]
            gain, scene = min(found, key=lambda pair: pair[0])
            if not before.args or gain > 0.95 or not set(after.variables) <= set(before.variables):
                continue
            if _is_canonical(before) and not any(_instance(before, after, rule) for rule in self.rules):
                self.rules.append(Rule(before, after, gain, scene))


def _arity(operator: Operator) -> int:
    binary = (aten.mm.default, aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor)
    return 2 if operator.call in binary else 1


def _is_canonical(term: Term) -> bool:
    """Return whether variables of one shape are in order; other terms only rename them."""
    for shape in {v.shape for v in term.variables}:
        names = [v for v in term.variables if v.shape == shape]
        if names != [v for v in VARIABLES if v.shape == shape][: len(names)]:
            return False
    return True


def _instance(before: Term, after: Term, rule: Rule) -> bool:
    """Return whether a rule turns ``before`` into something that costs at most as much as ``after``."""
    for bound in _matches(rule.before, before, {}):
        instead = _put(rule.after, bound)
        if all(
            cost(instead, s) <= cost(after, s) * 1.01 or cost(instead, s) < 0.99 * cost(before, s)
            for s in SCENES
        ):
            return True
    return False


def _matches(pattern: Term, term: Term, bound: dict[str, Term]) -> Iterator[dict[str, Term]]:
    """Yield the bindings of variables that make a term an instance of a pattern."""
    if not pattern.args:
        known = bound.get(pattern.name)
        fits = [(p == "1") <= (t == "1") for p, t in zip(pattern.shape, term.shape, strict=True)]
        if (known is None and all(fits)) or known == term:
            yield {**bound, pattern.name: term}
        return
    if pattern.name != term.name:
        return
    orders = [term.args, term.args[::-1]] if pattern.name in ("add", "mul") else [term.args]
    for args in orders:
        found: list[dict[str, Term]] = [bound]
        for part, arg in zip(pattern.args, args, strict=True):
            found = [more for one in found for more in _matches(part, arg, one)]
        yield from found


def _put(pattern: Term, bound: Mapping[str, Term]) -> Term:
    if not pattern.args:
        return bound[pattern.name]
    args = tuple(_put(arg, bound) for arg in pattern.args)
    shape = OPERATORS[pattern.name].shape(*(arg.shape for arg in args))
    return Term(pattern.name, shape or pattern.shape, args)


def certified(rule: Rule) -> Verdict:
    """Judge a rule on graphs of other sizes than those of the search, on several inputs.

    Returns the first verdict that is not ``EQUAL``, if there is one.
    """
    names = [v.name for v in rule.before.variables]
    draws = torch.Generator().manual_seed(0)

    def graph(term: Term, inputs: list[torch.Tensor]) -> fx.GraphModule:
        def function(*args: Any) -> Any:
            return calls(term, lambda target, *a: target(*a), dict(zip(names, args, strict=True)))

        return make_fx(function, tracing_mode="fake")(*inputs)

    for _ in range(_DRAWS):
        inputs = [torch.randn([_OTHER[s] for s in v.shape], generator=draws) for v in rule.before.variables]
        verdict = equivalent(graph(rule.before, inputs), graph(rule.after, inputs), inputs)
        if verdict.kind != "EQUAL":
            break
    return verdict


class _Joint(Observer):
    """Records the graph that passes over whole graphs leave."""

    gm: fx.GraphModule | None = None

    def graph(self, kind: str, gm: fx.GraphModule) -> None:
        if kind in ("joint", "inference"):
            self.gm = copy_graph(gm)


def captured(name: str, training: bool) -> fx.GraphModule:
    """Return the graph of a small transformers model after the default passes, joint or for inference.

    Args:
        name: the model's name.
        training: whether to capture a training step.
    """
    torch._dynamo.reset()
    built, seen = build(name, training=training), _Joint()
    with torch.set_grad_enabled(training):
        fxpasses.capture(built.model, *built.inputs, passes=["default"], observers=[seen])
    assert seen.gm is not None
    return seen.gm


_CALLS: dict[str, tuple[Any, ...]] = {
    "mm": (aten.mm.default, aten.bmm.default),
    "t": (aten.permute.default,),
    "add": (aten.add.Tensor,),
    "sub": (aten.sub.Tensor,),
    "mul": (aten.mul.Tensor,),
    "div": (aten.div.Tensor,),
    "rows": (aten.sum.dim_IntList,),
    "columns": (aten.sum.dim_IntList,),
    **{n: (getattr(aten, n).default,) for n in ("neg", "exp", "relu", "sigmoid", "tanh", "rsqrt")},
}
_THROUGH = (
    aten.view.default, aten._unsafe_view.default, aten.clone.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim,
)  # fmt: skip


def sites(gm: fx.GraphModule, rule: Rule) -> int:
    """Return an upper bound on how many calls in a graph are instances of a rule.

    Looks through views. Intermediate values must have no other users.

    Args:
        gm: a joint or inference graph.
        rule: the rule.
    """
    return sum(_site(rule.before, node, {}, root=True) is not None for node in gm.graph.nodes)


def _site(pattern: Term, value: Any, bound: dict[str, Any], *, root: bool = False) -> dict[str, Any] | None:
    if not pattern.args:
        seen = _behind(value) if isinstance(value, fx.Node) else value
        if pattern.name in bound:
            return bound if bound[pattern.name] == seen else None
        return {**bound, pattern.name: seen} if _has_form(value, pattern.shape) else None
    if not isinstance(value, fx.Node):
        return None
    while not root and value.target in _THROUGH and len(value.users) == 1:
        value = value.args[0]
    if value.target not in _CALLS[pattern.name] or (not root and len(value.users) > 1):
        return None
    if pattern.name in ("rows", "columns"):
        last = value_of(value.args[0]).dim() - 1
        summed = sorted(d % (last + 1) for d in value.args[1])
        batched = _behind(value.args[0]).target is aten.bmm.default  # its batches are not rows
        if batched or summed != ([last] if pattern.name == "columns" else list(range(last))):
            return None
    if pattern.name == "t" and sorted(value.args[1][-2:]) == list(value.args[1][-2:]):
        return None
    given = value.args[: len(pattern.args)]
    if len(given) < len(pattern.args):
        return None
    for args in [given, given[::-1]] if pattern.name in ("add", "mul") else [given]:
        found: dict[str, Any] | None = bound
        for part, arg in zip(pattern.args, args, strict=True):
            found = None if found is None else _site(part, arg, found)
        if found is not None:
            return found
    return None


def _behind(node: fx.Node) -> fx.Node:
    while node.target in _THROUGH:
        node = node.args[0]  # type: ignore[assignment]
    return node


def _has_form(value: Any, shape: Shape) -> bool:
    """Return whether a value may stand for a variable of that shape: a number, row, column, or matrix."""
    tensor = value_of(value) if isinstance(value, fx.Node) else None
    if not isinstance(tensor, torch.Tensor):
        return shape == ("1", "1") and isinstance(value, (int, float))
    wide = tensor.dim() > 0 and tensor.shape[-1] > 1
    tall = tensor.numel() > (tensor.shape[-1] if tensor.dim() else 1)
    return (tall, wide) == (shape[0] != "1", shape[1] != "1")


def main(argv: Sequence[str]) -> int:
    """Search, certify and count."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks found_rules", description=__doc__)
    parser.add_argument("models", nargs="*", choices=[[], *NAMES], help="count instances in their graphs")
    parser.add_argument("--operators", type=int, default=2, help="at most in an expression of all operators")
    parser.add_argument("--linear", type=int, default=3, help="at most in one of matmuls, sums and products")
    arguments = parser.parse_args(argv)
    searches = [Search(_LINEAR, arguments.linear), Search(OPERATORS, arguments.operators)]
    rules = {str(rule): rule for search in searches for rule in search.run()}
    verdicts = {text: certified(rule) for text, rule in rules.items()}
    proved = [text for text, verdict in verdicts.items() if verdict.kind == "EQUAL"]
    terms, refused = sum(search.terms for search in searches), len(rules) - len(proved)
    graphs = {
        (name, training): captured(name, training) for name in arguments.models for training in (True, False)
    }
    table = Table(
        title=f"{terms} expressions, {len(proved)} rules; {refused} more that certificates refuse", box=None
    )
    for name in ("cost", "rule", *(["sites", "models"] if graphs else []), "certificate"):
        table.add_column(name, overflow="fold")
    for text in proved:
        counts = {key: count for key, gm in graphs.items() if (count := sites(gm, rules[text]))}
        if graphs and not counts:
            continue
        held = [str(sum(counts.values())), ", ".join(sorted({name for name, _ in counts}))] if graphs else []
        table.add_row(f"{rules[text].gain:.2f}", text, *held, str(verdicts[text]).partition("\n")[0])
    Console(width=200).print(table, markup=False)
    return 0
