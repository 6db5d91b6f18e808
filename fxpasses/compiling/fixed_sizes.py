"""Compile a graph that Inductor cannot lower with symbolic sizes for the sizes of each call.

The caller of the compiled graph has guards on its symbols. Within them, each new combination of sizes is
compiled when it first occurs, up to a limit. Beyond the limit, the graph runs operator by operator.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fake.seam.fx import size_hint
from fxpasses import _torch
from fxpasses.compiling.inductor_rng import with_inductor_rng
from fxpasses.compiling.saved_code import EagerCode

log = logging.getLogger(__name__)

MOST_SIZES = 8
"""Maximum number of size combinations that one graph is compiled for."""

Run = Callable[[list[Any]], Any]


class FixedSizes:
    """The graph as a callable that takes a list of inputs.

    Args:
        gm: the graph, with symbolic sizes.
        compile: compiles it for inputs like these, whose sizes are integers.
        inputs: the inputs that it is compiled for at once.

    Raises:
        Exception: what Inductor raises with fixed sizes, too.
    """

    def __init__(
        self, gm: fx.GraphModule, compile: Callable[[Sequence[Any]], Run], inputs: Sequence[Any]
    ) -> None:
        self._compile = compile
        self._compiled: dict[Any, Run] = {_key(inputs): compile(inputs)}
        self._eager = EagerCode(with_inductor_rng(gm))
        self._lock = threading.Lock()
        self._has_warned = False
        self._boxed_call = True

    def __call__(self, inputs: list[Any]) -> Any:
        key = _key(inputs)
        run = self._compiled.get(key)
        if run is None:
            with self._lock:
                run = self._compiled.get(key) or self._compile_for(key, inputs)
        return run(inputs)

    def _compile_for(self, key: Any, inputs: Sequence[Any]) -> Run:
        if len(self._compiled) >= MOST_SIZES:
            if not self._has_warned:
                log.warning(
                    "a graph that cannot be lowered with symbolic sizes is compiled for %d sizes; it runs in eager for others",
                    MOST_SIZES,
                )
            self._has_warned = True
            return self._eager
        try:
            run = self._compile(inputs)
        except Exception as error:  # noqa: BLE001  (eager computes the same)
            log.warning("running in eager for these sizes: %s: %s", type(error).__name__, error)
            run = self._eager
        self._compiled[key] = run
        return run


def _key(inputs: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(
        (tuple(v.shape), tuple(v.stride())) if isinstance(v, torch.Tensor) else (type(v), v) for v in inputs
    )


def inputs_from_hints(inputs: Sequence[Any]) -> list[Any] | None:
    """Fake inputs with the traced sizes as integers, or ``None`` if a size depends on data."""
    mode = _torch.FakeTensorMode(allow_non_fake_inputs=True)

    def number(size: Any) -> int:
        if isinstance(size, torch.SymInt) and not size.node.has_hint():
            raise LookupError
        return int(size_hint(size))

    def fixed(value: Any) -> Any:
        if isinstance(value, torch.SymInt):
            return number(value)
        if not isinstance(value, torch.Tensor):
            return value
        shape, stride = ([number(s) for s in sizes] for sizes in (value.shape, value.stride()))
        with mode:
            return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)

    try:
        return [fixed(value) for value in inputs]
    except LookupError:
        return None


def fixed_graph(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """Retrace the graph for inputs of these sizes. Returns it and fake inputs for it."""
    mode = _torch.detect_fake_mode(inputs) or _torch.FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [
        mode.from_tensor(v.detach(), static_shapes=True)
        if isinstance(v, torch.Tensor) and not isinstance(v, _torch.FakeTensor)
        else v
        for v in inputs
    ]
    fixed = _torch.trace_calls(fx.Interpreter(gm).run, fakes, {}, True)
    (output,) = fixed.graph.find_nodes(op="output")
    results = output.args[0]
    if not isinstance(results, (list, tuple)):
        output.args = ((results,),)
    output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
    fixed.recompile()
    return fixed, fakes
