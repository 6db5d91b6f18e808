"""Trace the functions of a pattern to operators, once for any sizes and once for those of a match."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fake.error_text import describe_error
from fake.seam.dispatch import OpOverload, disable_current_modes
from fake.seam.fake_tensor import FakeTensorMode
from fxpasses.errors import PatternError
from fxpasses.graphs.aliasing import AliasInfo, is_mutating
from fxpasses.graphs.rewriting import outputs_of, remove_full_slices
from fxpasses.patterns.matching import Numbers, number_key


@dataclass(frozen=True)
class ExampleTensor:
    """The metadata of an example tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, example: Any) -> Any:
        """Convert a tensor to an ``ExampleTensor``. Other values are returned unchanged."""
        if not isinstance(example, torch.Tensor):
            return example
        return cls(tuple(example.shape), tuple(example.stride()), example.dtype, example.device)


class TracedFunction:
    """The graph of a function, with the nodes of its parameters.

    Attributes:
        graph: calls of operators.
        parameters: the placeholder of each parameter, by name; numbers have one as well, without users.
        numbers: the placeholders of the plain numbers among the parameters, by their value in the calls.

    Args:
        function: the function.
        values: a fake tensor or a number for each parameter.
        decompose: whether to use Inductor's decompositions.
        guards: whether the function's decisions on symbolic sizes become guards. A pattern needs none: its
            trace is compared with the graph.

    Raises:
        PatternError: if the function fails.
    """

    def __init__(
        self, function: Callable[..., Any], values: Mapping[str, Any], decompose: bool, guards: bool = False
    ) -> None:
        self.name = getattr(function, "__name__", type(function).__name__)
        from fxpasses._torch import trace_calls  # lazy: imports Inductor, which only tracing needs
        from fxpasses.graphs.decompositions import decompositions

        traced = {name: value for name, value in values.items() if not _is_plain_number(value)}
        constants = {name: value for name, value in values.items() if name not in traced}

        # Two parameters may be the same value, and then are one input: a tracer identifies tensors by
        # identity.
        inputs = list({id(value): value for value in traced.values()}.values())
        index = {id(value): position for position, value in enumerate(inputs)}

        def call(*arguments: Any) -> tuple[Any, ...]:
            given = {name: arguments[index[id(value)]] for name, value in traced.items()} | constants
            result = function(*(given[name] for name in values))
            return tuple(result) if isinstance(result, (tuple, list)) else (result,)

        table = decompositions() if decompose else {}
        try:
            module = trace_calls(call, inputs, table, guards, as_captured=True)
            if _writes_to_own_tensors(module.graph):  # torch functions may do that, captured graphs do not
                module = trace_calls(call, inputs, table, guards, functional=True, as_captured=True)
        except Exception as error:
            raise PatternError(self.name, f"cannot be traced: {describe_error(error)}") from error
        self.graph = module.graph
        remove_full_slices(self.graph)  # as in captured graphs
        self.graph.eliminate_dead_code()
        if self.graph.find_nodes(op="get_attr"):
            raise PatternError(
                self.name, "makes a tensor of Python numbers; pass it as a parameter, or use full"
            )
        placeholders = self.graph.find_nodes(op="placeholder")
        self.parameters = {name: placeholders[index[id(value)]] for name, value in traced.items()}
        self.numbers: Numbers = {}
        with self.graph.inserting_before(next(iter(self.graph.nodes))):
            for name, value in constants.items():
                self.parameters[name] = self.graph.placeholder(f"{name}_number")
                self.numbers[(type(value), value)] = self.parameters[name]

    @property
    def outputs(self) -> list[fx.Node]:
        """Return the results of the function. Raises PatternError for anything but tensors."""
        found = outputs_of(self.graph)
        for position, node in enumerate(found):
            if not isinstance(node, fx.Node):
                raise PatternError(self.name, f"result {position} is {node!r}, not a tensor")
        return found

    def text(self) -> str:
        """Return the calls as text. Equal traces have equal text."""
        return "\n".join(f"{n.op} {n.target} {n.args} {n.kwargs}" for n in self.graph.nodes)


class TracedPattern:
    """A pattern and its replacement, which can be traced for the sizes of any match.

    Attributes:
        pattern: the function to look for.
        replacement: the function that replaces it.
        variants: traces of the pattern for any sizes, each with whether Inductor's decompositions were used.

    Raises:
        PatternError: see :func:`fxpasses.patterns.pattern_pass.replace_pattern`.
    """

    def __init__(
        self, pattern: Callable[..., Any], replacement: Callable[..., Any], inputs: Sequence[Any]
    ) -> None:
        self.pattern, self.replacement = pattern, replacement
        values = _examples(pattern, inputs)
        self.variants: list[tuple[TracedFunction, bool]] = []
        for decompose in (False, True):
            traced = TracedFunction(pattern, values, decompose)
            if traced.text() not in [other.text() for other, _ in self.variants]:
                _check_pattern(traced)
                self.variants.append((traced, decompose))
        results = len(TracedFunction(replacement, values, False).outputs)
        if results != (wanted := len(self.variants[0][0].outputs)):
            raise PatternError(
                self.variants[0][0].name,
                f"returns {wanted} values and its replacement {results}; they have to be as many",
            )


def _examples(pattern: Callable[..., Any], inputs: Sequence[Any]) -> dict[str, Any]:
    """Return a fake tensor or a recognizable number for each parameter."""
    name = getattr(pattern, "__name__", type(pattern).__name__)
    try:
        parameters = list(inspect.signature(pattern).parameters)
    except ValueError:
        raise PatternError(
            name, f"does not tell its parameters; write it as a function: lambda x: {name}(x)"
        ) from None
    if len(parameters) != len(inputs):
        raise PatternError(
            name, f"has {len(parameters)} parameters, but {len(inputs)} example inputs were given"
        )
    mode = FakeTensorMode()
    values: dict[str, Any] = {}
    for position, (parameter, example) in enumerate(zip(parameters, inputs, strict=True)):
        example = ExampleTensor.of(example)
        if isinstance(example, ExampleTensor):
            with disable_current_modes(), mode:
                values[parameter] = torch.empty_strided(
                    example.shape, example.stride, dtype=example.dtype, device=example.device
                )
        elif isinstance(example, float):
            # Close to the example, but not a number that the pattern itself would contain.
            values[parameter] = example + (abs(example) or 1.0) * 1.234567e-9 * (position + 1)
        elif isinstance(example, int) and not isinstance(example, bool):
            values[parameter] = example
        else:
            raise PatternError(
                name, f"the example for {parameter!r} is {example!r}; give a tensor or a number"
            )
    return values


def _check_pattern(traced: TracedFunction) -> None:
    """Raise PatternError if no search could find the pattern."""
    constants: set[Any] = set()
    for node in traced.graph.nodes:
        if node.op == "call_function" and is_mutating(node):
            raise PatternError(
                traced.name, f"writes to an argument ({node.target}); captured graphs have no such calls"
            )
        if node.op == "call_function":
            fx.node.map_aggregate((node.args, node.kwargs), lambda a: constants.add(number_key(a)))
    for name, node in traced.parameters.items():
        number = next((value for value, other in traced.numbers.items() if other is node), None)
        if number is not None and number not in constants:
            raise PatternError(
                traced.name,
                f"parameter {name!r} does not reach any call as it is; a number that is computed from it cannot be matched",
            )
        if number is None and not node.users:
            raise PatternError(traced.name, f"parameter {name!r} is not used")
    for position, output in enumerate(traced.outputs):
        if output.op != "call_function":
            raise PatternError(traced.name, f"result {position} is a parameter, not a computed value")
    if not any(isinstance(n.target, OpOverload) for n in traced.graph.nodes):
        raise PatternError(traced.name, "calls no operator")


def _writes_to_own_tensors(graph: fx.Graph) -> bool:
    """Whether calls write to tensors, but not to parameters."""
    aliases = AliasInfo(graph)
    writing = [node for node in graph.nodes if node.op == "call_function" and is_mutating(node)]
    written = {root.op for node in writing for root in aliases.written_by(node)}
    return bool(writing) and "placeholder" not in written


def _is_plain_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
