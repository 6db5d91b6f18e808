"""Pattern rewriting: patterns and replacements are plain Python functions.

::

    def pattern(x, scale):
        return torch.softmax(x * scale, -1)

    def replacement(x, scale):
        return mylib.scaled_softmax(x, scale)

    fuse = pattern_pass(pattern, replacement, (torch.empty(2, 8, 8), 0.5), numerics="tolerance")

Both are traced with fake tensors to the operators of the graph, with and without Inductor's decompositions,
and either variant may match. They take tensors, which match any value, and numbers, which match any constant.
Example sizes do not matter: each candidate is compared again with the pattern traced for its sizes.

A match is left alone if anything else uses an intermediate value, if memory that it reads is written to in
between, if the replacement would alias other values than the pattern and this could be observed, if its
results have other shapes, strides, dtypes or devices, if it mixes forward and backward, or if the guard
``where`` rejects it.
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
    """A pattern that was expected in a graph does not occur.

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
    """Replace every occurrence of ``pattern`` in ``gm`` that may be replaced. Returns how many were.

    Each occurrence is claimed as a match site (:func:`fxpasses.pass_manager.sites.claim`) in graph order.

    Args:
        gm: the graph, rewritten in place.
        pattern: the function to look for. It returns a tensor or a tuple of tensors, and calls no operator
            that writes to its arguments.
        replacement: a function with the same parameters and as many results.
        inputs: an example for each parameter: a tensor of any size (its number of dimensions and dtype may
            matter to the operators that ``pattern`` calls), or a number that does not otherwise occur in
            ``pattern``.
        where: a guard on the metadata of a match. It must not add guards on symbolic sizes.
        expect_match: whether to warn if nothing is found.

    Raises:
        PatternError: if the functions cannot be traced, or do not fit each other.
        ArgumentTypeError: if ``gm`` is not a graph.

    >>> import torch
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> gm = make_fx(lambda x: (x * 3.0).relu().relu(), tracing_mode="fake")(torch.ones(2))
    >>> replace_pattern(gm, lambda x: x.relu().relu(), lambda x: x.relu(), [torch.ones(4)])
    1
    >>> [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]
    ['aten.mul.Tensor', 'aten.relu.default']
    """
    check_type("replace_pattern", "gm", gm, fx.GraphModule, "a torch.fx.GraphModule")
    _check_arguments("replace_pattern", pattern, replacement, inputs, where)
    traced = TracedPattern(pattern, replacement, tuple(inputs))
    return _replace_all(gm, traced, where, f"pattern {_name(pattern)!r}", expect_match)


def _replace_all(
    gm: fx.GraphModule, traced: TracedPattern, where: Guard | None, called: str, expect: bool
) -> int:
    """Replace a pattern. ``called`` is its name in warnings."""
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
    """A pass that :func:`pattern_pass` made from a pattern and its replacement."""

    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    inputs: tuple[Any, ...]
    name: str  # type: ignore[misc]
    contract: Contract = dataclasses.field()  # type: ignore[misc]
    where: Guard | None = None
    expect_match: bool = True

    def __post_init__(self) -> None:
        # The values of example tensors must not be part of the pass's identity.
        object.__setattr__(self, "inputs", tuple(map(ExampleTensor.of, self.inputs)))

    def apply(self, gm: fx.GraphModule) -> bool:
        _check_arguments("replace_pattern", self.pattern, self.replacement, self.inputs, self.where)
        traced = TracedPattern(self.pattern, self.replacement, self.inputs)
        called = f"pattern {_name(self.pattern)!r} of pass {self.name!r}"
        return _replace_all(gm, traced, self.where, called, self.expect_match) > 0

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
    """Make a pass that replaces a pattern. See :func:`replace_pattern` for the first arguments.

    Args:
        pattern: the function to look for.
        replacement: a function with the same parameters, traced to the calls that replace a match.
        inputs: an example for each parameter.
        name: the pass's name; by default the pattern's.
        where: a guard on each match.
        expect_match: whether to issue a :class:`NoMatchWarning` for a graph without a match.
        graphs: see :class:`fxpasses.Contract`, as for all that follow.
        requires: conditions that must hold before.
        provides: conditions that hold afterwards.
        invalidates: conditions that no longer hold afterwards.
        conflicts: what must not be in the same pipeline.
        numerics: what happens to results.
        metadata: what happens to the metadata of the remaining nodes.

    Raises:
        PatternError: if the functions cannot be traced, or do not fit each other.
        ContractError: if the contract is invalid.
    """
    _check_arguments("pattern_pass", pattern, replacement, inputs, where)
    if name is not None and (not isinstance(name, str) or not name):
        raise PatternError("pattern_pass", f"name is {name!r}, not a text that a pass can be asked for by")
    TracedPattern(
        pattern, replacement, tuple(inputs)
    )  # raises now, instead of later, if the pattern cannot be traced
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


def _check_arguments(call: str, pattern: object, replacement: object, inputs: object, where: object) -> None:
    """Raise `PatternError` if one of these has the wrong type."""
    for word, function in (("pattern", pattern), ("replacement", replacement), ("where", where)):
        if not callable(function) and not (function is None and word == "where"):
            raise PatternError(call, f"{word} is {function!r}, not a function")
    if not isinstance(inputs, Sequence) or isinstance(inputs, str | bytes):
        raise PatternError(
            call, f"inputs is {inputs!r}, not a list or tuple of an example for each parameter"
        )


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)
