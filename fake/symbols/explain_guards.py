"""Explain guards to users: what is checked, why, who asked for it, and what would avoid it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import sympy
import torch

from fake.notebook import as_html
from fake.seam import symbolic_shapes as _t
from fake.symbols.reasons import Location, Reason, record_graph_calls
from fake.symbols.shape_guards import Guard, Guards, guards_of
from fake.wrong_arguments import check_type


@dataclass(frozen=True)
class ExplainedGuard:
    """One guard with its explanation.

    Attributes:
        expression: the condition in the user's terms.
        kind: as in :class:`~fake.symbols.shape_guards.Guard`.
        why: its meaning, in a sentence.
        operator: the operator that asked (the last of several);
            ``None`` if the program itself did, or nothing.
        where: the user's line that led to it.
        avoid: what would remove the guard.
        chain: everything that was asked on the way, earliest first: ``(condition, operator, where)``.
    """

    expression: str
    kind: str
    why: str
    operator: str | None
    where: Location | None
    avoid: str
    chain: tuple[tuple[str, str, Location | None], ...]

    def __str__(self) -> str:
        lines = [self.expression, f"    why:   {self.why}"]
        if len(self.chain) == 1:
            _, operator, where = self.chain[0]
            lines.append(f"    asked: by {operator}{location_text(where)}")
        elif self.chain:
            lines.append("    asked:")
            for number, (condition, operator, where) in enumerate(self.chain, 1):
                lines.append(f"      {number}. {condition}, by {operator}{location_text(where)}")
        lines.append(f"    avoid: {self.avoid}")
        return "\n".join(lines)


def location_text(where: Location | None) -> str:
    """Format a line of the program as the end of a sentence; empty if unknown."""
    if where is None:
        return ""
    return f", {where} in {where.function}" + (f": {where.code}" if where.code else "")


class Explanation(tuple[ExplainedGuard, ...]):
    """The result of :func:`explain`: a sequence of :class:`ExplainedGuard` that prints as a report."""

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return "No guards: the graph is right for all sizes that its inputs may have."
        count = len(self)
        head = f"{count} guard{'s' if count > 1 else ''} decide{'s' if count == 1 else ''} whether the graph may be used again:"
        return "\n".join([head, *(f"{number}. {guard}" for number, guard in enumerate(self, 1))])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(g.expression, g.why, g.operator or "the program", g.where or "", g.avoid) for g in self]
        return as_html(str(self).partition("\n")[0], ("guard", "why", "asked by", "where", "avoid"), rows)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return the explanation as plain data."""
        return [asdict(guard) for guard in self]


def explain(guards: Guards | Any, *, graph: torch.fx.Graph | None = None) -> Explanation:
    """Explain each guard.

    Args:
        guards: the result of :func:`~fake.symbols.shape_guards.guards_of`, or a shape environment,
            torch's or ours.
        graph: the graph that Dynamo made with torch's own environment. Its calls show which operator asked,
            where the environment recorded only a function of torch.

    >>> import torch, fake
    >>> mode = fake.FakeTensorMode(shape_env=fake.ShapeEnv())
    >>> x = mode.from_tensor(torch.zeros(6, 5), name="x", dims={0: "dynamic"})
    >>> y = x.view(-1, 3, 5)
    >>> report = fake.explain(mode.shape_env)
    >>> report[0].expression, report[0].operator
    ('x.size(0) % 3 == 0', 'aten.view.default')
    """
    check_type("explain", "graph", graph, (torch.fx.Graph, type(None)), "a torch.fx.Graph, such as gm.graph")
    if graph is not None:
        guards = guards.shape_env if isinstance(guards, Guards) else guards
        record_graph_calls(guards, graph)
    found = guards if isinstance(guards, Guards) else guards_of(guards)
    return Explanation([_explain(found, guard) for guard in found])


def _explain(guards: Guards, guard: Guard) -> ExplainedGuard:
    last = guard.reasons[-1] if guard.reasons else None
    return ExplainedGuard(
        guard.expression,
        guard.kind,
        _why(guards, guard, last),
        None if last is None else last.operator,
        None if last is None else last.where,
        _avoid(guard, last),
        tuple(dict.fromkeys((guards.text(r.condition), r.asked_by, r.where) for r in guard.reasons)),
    )


def _why(guards: Guards, guard: Guard, last: Reason | None) -> str:
    match guard.kind:
        case "specialized" if last is not None and last.is_read_in_cpp:
            return "a part of torch that is written in C++ read it as a plain number: every other value needs a graph of its own"
        case "specialized":
            return "the value was made a constant of the graph: every other value needs a graph of its own"
        case "duck":
            return "the two sizes were equal in the example inputs, and are taken to be equal always (duck shaping)"
        case "layout":
            return "strides and offsets of inputs are part of the graph: these follow from the sizes"
        case "equality":
            return "what was asked can only hold if the two are equal, and the graph has one symbol for both"
        case "range" if not guard.reasons:
            return "sizes 0 and 1 behave differently (empty loops, broadcasting) and get graphs of their own"
        case "range" if last is not None and last.operator is None and _is_assertion(last):
            return "the program asserts it"
        case "range" if last is not None and last.refuses:
            return _ERROR_OTHERWISE
        case "range":
            return "the answers to these questions are the same for all sizes of the range, and only there"
    if last is not None and last.kind == "declared":
        return "it was declared"
    if last is not None and last.operator is None:
        if _is_assertion(last):
            return "the program asserts it"
        if not last.is_of_program:
            return "a function that is called here looked at the size, and took the path for which this holds"
        return "the program looked at the size, and took the path for which this holds"
    if last is not None and last.refuses:
        return _ERROR_OTHERWISE
    if _is_divisibility(guard.condition):
        return "the sizes of the result are integers only if this division has no remainder"
    return "the operator's result (its sizes, its strides or which kernel runs) depends on it"


def _avoid(guard: Guard, last: Reason | None) -> str:
    match guard.kind:
        case "duck":
            return (
                "nothing to avoid if the program needs them equal; else trace with different sizes, declare them with "
                "different fake.Dim, or use ShapeEnv(duck_shape=False)"
            )
        case "layout":
            return "nothing to avoid unless layouts vary: then call .contiguous() before the compiled part"
        case "range" if not guard.reasons:
            return "nothing needed if sizes 0 and 1 do not occur; else mark the size unbacked"
    if last is None:
        return "nothing known"
    if last.kind == "declared":
        return "change the declaration"
    if guard.kind == "specialized" and last.is_read_in_cpp:
        return (
            "run the program inside torch._dispatch.python.enable_python_dispatcher(), as torch.compile does: such parts are "
            "then decomposed with symbolic sizes"
        )
    if last.operator is None and _is_assertion(last):
        return "nothing to avoid: other sizes are refused by the program itself"
    if last.operator is None and not last.is_of_program:
        return "nothing to avoid if all sizes in use satisfy it; else split the inputs by it before the compiled part"
    if last.operator is None:
        return (
            f"at {last.where or 'the program'}: keep sizes out of int(), if and range(); assert them with torch._check, "
            "choose with torch.where or torch.cond"
        )
    if guard.kind == "specialized" and guard.tied is not None and guard.tied.kind == "number":
        return "nothing to avoid if the number never changes; else let the program take it as a tensor"
    if guard.kind == "specialized":
        return (
            f"nothing to avoid if a weight or a constant that {last.operator} takes fixes the size: declare it static to "
            "say so; else let both sizes come from inputs"
        )
    if last.refuses and guard.kind != "equality":
        return "nothing to avoid: an input that breaks it is an error in eager, too"
    if guard.kind == "equality":
        return "nothing to avoid if the operator needs equal sizes; declare both with the same fake.Dim to say so"
    if _is_divisibility(guard.condition):
        return "pad to a multiple, and declare it: fake.Dim(name, multiple_of=...)"
    return "nothing to avoid if all sizes in use satisfy it; else split the inputs by it before the compiled part"


_ERROR_OTHERWISE = "the operator is an error for all other sizes"


def _is_assertion(reason: Reason) -> bool:
    """Return whether the user's line checks a size instead of branching on it."""
    return reason.where is not None and reason.where.code.startswith(("torch._check", "assert "))


def _is_divisibility(condition: sympy.Basic) -> bool:
    return isinstance(condition, sympy.Eq) and condition.has(_t.Mod, _t.PythonMod)
