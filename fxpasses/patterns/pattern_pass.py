"""Rewriting by pattern: the pattern and its replacement are plain Python functions.

::

    def pattern(x, scale):
        return torch.softmax(x * scale, -1)

    def replacement(x, scale):
        return mylib.scaled_softmax(x, scale)

    fuse = pattern_pass(pattern, replacement, (torch.empty(2, 8, 8), 0.5), numerics="tolerance")

Both are traced with fake tensors to the operators that the graph consists of: with Inductor's decompositions and without
them, whichever is found. They take tensors, which match any value, and numbers, which match any constant. Sizes do
not matter: each subgraph that looks right is compared again with the pattern traced for the sizes there.

A match is left alone when something else uses a value from the middle of it, when memory that it reads is written to meanwhile,
when the replacement would alias other values than the pattern and somebody could tell, when its results have other
shapes, strides, types or devices, when it mixes forward and backward, and when the guard ``where`` says so.
"""

from __future__ import annotations

import dataclasses
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from fake.wrong_arguments import check_type
from fxpasses.errors import PatternError
from fxpasses.pass_manager.pass_base import Contract, Metadata, Numerics, Pass
from fxpasses.patterns.pattern_tracing import ExampleTensor, TracedPattern
from fxpasses.patterns.replacing import Match, Replacer

log = logging.getLogger(__name__)

Guard = Callable[[Match], bool]


class NoMatchWarning(UserWarning):
    """A pattern that was expected to occur in a graph does not.

    Args:
        text: the message.
        left_alone: subgraphs that look like it, each with the reason why it was not replaced.
    """

    def __init__(self, text: str, left_alone: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.left_alone = tuple(left_alone)


def replace_pattern(
    gm: fx.GraphModule,
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    where: Guard | None = None,
    expect_match: bool = False,
) -> int:
    """Replace every occurrence of ``pattern`` in ``gm`` that may be replaced; returns how many.

    Each occurrence is claimed as a match site (:func:`fxpasses.pass_manager.sites.claim`) in the order of the graph.

    Args:
        gm: the graph, rewritten in place.
        pattern: the function to look for. Returns a tensor or a tuple of tensors; calls no operator that writes to
            its arguments.
        replacement: a function of the same parameters, with as many results.
        inputs: an example for each parameter: a tensor of any size (its number of dimensions and its type may
            matter to the operators that ``pattern`` calls), or a number that does not occur in ``pattern`` otherwise.
        where: a guard over the metadata of a match; it must not add guards on symbolic sizes.
        expect_match: whether to warn when nothing is found.

    Raises:
        PatternError: the functions cannot be traced, or do not fit each other.
        ArgumentTypeError: ``gm`` is no graph.

    >>> import torch
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> gm = make_fx(lambda x: (x * 3.0).relu().relu(), tracing_mode="fake")(torch.ones(2))
    >>> replace_pattern(gm, lambda x: x.relu().relu(), lambda x: x.relu(), [torch.ones(4)])
    1
    >>> [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    ['aten.mul.Tensor', 'aten.relu.default']
    """
    check_type("replace_pattern", "gm", gm, fx.GraphModule, "a torch.fx.GraphModule")
    _check("replace_pattern", pattern, replacement, inputs, where)
    traced = TracedPattern(pattern, replacement, tuple(inputs))
    return _replaced(gm, traced, where, f"pattern {_name(pattern)!r}", expect_match)


def _replaced(
    gm: fx.GraphModule, traced: TracedPattern, where: Guard | None, called: str, expect: bool
) -> int:
    """Replace a pattern; ``called`` is what a warning calls it."""
    replacer = Replacer(gm, traced, where)
    count = replacer.run()
    for reason, location in replacer.refused:
        log.debug("%s: match at %s left alone: %s", called, location, reason)
    if expect and not count:
        refused = [f"{location}: {reason}" for reason, location in replacer.refused]
        near = f"; subgraphs that look like it: {'; '.join(refused[:3])}" if refused else ""
        text = f"{called} was expected at least once in the graph and has not been replaced{near}"
        warnings.warn(NoMatchWarning(text, refused), stacklevel=3)
    return count


@dataclass(frozen=True)
class PatternPass(Pass):
    """A pass made of a pattern and its replacement by :func:`pattern_pass`."""

    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    inputs: tuple[Any, ...]
    name: str  # type: ignore[misc]
    contract: Contract = dataclasses.field()  # type: ignore[misc]
    where: Guard | None = None
    expect_match: bool = True

    def __post_init__(self) -> None:
        # The values of example tensors are nobody's business, least of all that of the pass's identity.
        object.__setattr__(self, "inputs", tuple(map(ExampleTensor.of, self.inputs)))

    def apply(self, gm: fx.GraphModule) -> bool:
        _check("replace_pattern", self.pattern, self.replacement, self.inputs, self.where)
        traced = TracedPattern(self.pattern, self.replacement, self.inputs)
        called = f"pattern {_name(self.pattern)!r} of pass {self.name!r}"
        return _replaced(gm, traced, self.where, called, self.expect_match) > 0

    def __str__(self) -> str:
        return self.name


def pattern_pass(
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    inputs: Sequence[Any],
    *,
    name: str | None = None,
    where: Guard | None = None,
    expect_match: bool = True,
    graphs: Sequence[str] | str = ("joint", "inference"),
    requires: Sequence[str] = (),
    provides: Sequence[str] = (),
    invalidates: Sequence[str] = (),
    conflicts: Sequence[str] = (),
    numerics: Numerics = "tolerance",
    metadata: Metadata = "types",
) -> PatternPass:
    """Make a pass that replaces a pattern: see :func:`replace_pattern` for the first arguments.

    Args:
        pattern: the function to look for.
        replacement: a function of the same parameters, traced to the calls that replace a match.
        inputs: an example for each parameter.
        name: the pass's name; the pattern's by default.
        where: a guard over each match.
        expect_match: whether a graph without a match is worth a :class:`NoMatchWarning`.
        graphs: see :class:`fxpasses.Contract`, as for all that follow.
        requires: conditions that have to hold before.
        provides: conditions that hold afterwards.
        invalidates: conditions that no longer hold afterwards.
        conflicts: what may not be in the same pipeline.
        numerics: what happens to results.
        metadata: what happens to the metadata of the nodes that stay.

    Raises:
        PatternError: the functions cannot be traced, or do not fit each other.
        ContractError: the contract is not valid.
    """
    _check("pattern_pass", pattern, replacement, inputs, where)
    if name is not None and (not isinstance(name, str) or not name):
        raise PatternError("pattern_pass", f"name is {name!r}, not a text that a pass can be asked for by")
    TracedPattern(
        pattern, replacement, tuple(inputs)
    )  # a pattern that cannot be traced is an error here, not later
    contract = Contract(graphs, requires, provides, invalidates, conflicts, numerics, metadata)
    return PatternPass(
        name=name or _name(pattern),
        contract=contract,
        pattern=pattern,
        replacement=replacement,
        inputs=tuple(inputs),
        where=where,
        expect_match=expect_match,
    )


def _check(call: str, pattern: object, replacement: object, inputs: object, where: object) -> None:
    """Raise `PatternError` where one of these is of the wrong type."""
    for word, function in (("pattern", pattern), ("replacement", replacement), ("where", where)):
        if not callable(function) and not (function is None and word == "where"):
            raise PatternError(call, f"{word} is {function!r}, not a function")
    if not isinstance(inputs, Sequence) or isinstance(inputs, str | bytes):
        raise PatternError(
            call, f"inputs is {inputs!r}, not a list or tuple of an example for each parameter"
        )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
