"""Capture the functional ATen graphs, forward and backward, of whatever ``torch.compile`` takes.

The stages are the backend's own. The compiler records the graphs instead of compiling them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fake.notebook import as_html
from fake.wrong_arguments import check_dynamic, check_type
from fxpasses import _torch
from fxpasses.compiling.graph_compilers import EagerCompiler
from fxpasses.compiling.observing import Observer
from fxpasses.compiling.options import Options
from fxpasses.errors import CaptureError, OptionsError, StageError
from fxpasses.graphs.provenance import Provenance, provenance
from fxpasses.graphs.rewriting import copy_graph, nbytes_of, outputs_of, value_of
from fxpasses.partitioner import META_KEY, PartitionReport
from fxpasses.pass_manager.pass_base import Pass
from fxpasses.pipeline.compile_graph import compile_graph
from fxpasses.pipeline.stages import Participants
from fxpasses.reports.text import annotated_code


@dataclass(frozen=True)
class SavedValue:
    """A value that the forward graph saves for the backward graph.

    Attributes:
        name: the node's name, the same in both graphs.
        shape: its sizes (symbolic ones stay symbolic), ``()`` for a number.
        dtype: its dtype, or ``None`` for a symbolic number.
        nbytes: its size in bytes, with hints for symbolic sizes; 0 for a number.
        is_input: whether it is an input of the forward graph (such as a parameter), which takes no extra
            memory.
        provenance: where it was computed.
    """

    name: str
    shape: tuple[Any, ...]
    dtype: torch.dtype | None
    nbytes: int
    is_input: bool
    provenance: Provenance


@dataclass(frozen=True)
class Captured:
    """The graphs of one capture.

    Attributes:
        joint: forward and backward in one graph, as traced, before any pass and before the partition.
            ``joint(*inputs, *output_gradients)`` returns outputs, then input gradients (``None`` for inputs
            that need none). ``None`` if no gradient is needed.
        forward: the forward graph after passes and partition. Its outputs are the user's outputs (after
            updated inputs, if any), then the saved values.
        backward: the backward graph. It maps saved values and output gradients to input gradients. ``None``
            if no gradient is needed.
        saved: the values that ``forward`` saves for ``backward``.
        inputs: real inputs for ``forward``, in its order, including parameters and buffers.
        num_outputs: how many of ``forward``'s outputs are not saved values.
        partition: why each value was saved and what is recomputed; ``None`` without a backward graph.
    """

    joint: fx.GraphModule | None
    forward: fx.GraphModule
    backward: fx.GraphModule | None
    saved: tuple[SavedValue, ...]
    inputs: tuple[Any, ...]
    num_outputs: int
    partition: PartitionReport | None

    @property
    def saved_bytes(self) -> int:
        """Bytes kept alive for the backward pass, excluding inputs of the forward graph."""
        return sum(value.nbytes for value in self.saved if not value.is_input)

    def _repr_html_(self) -> str:
        graphs = {"forward": self.forward, "backward": self.backward, "joint": self.joint}
        present = {kind: gm for kind, gm in graphs.items() if gm is not None}
        rows = [(kind, len(gm.graph.nodes)) for kind, gm in present.items()]
        computed = sum(not value.is_input for value in self.saved)
        text = f"{self.saved_bytes} bytes in {computed} values, and {len(self.saved) - computed} inputs, are saved for the backward pass"
        code = "\n".join(f"# {kind}\n{annotated_code(gm)}" for kind, gm in present.items() if kind != "joint")
        return as_html(text, ("graph", "nodes"), rows, code)

    def provenance(self, node: fx.Node) -> Provenance:
        """Source line, module path and, for a backward node, the forward node that it differentiates."""
        check_type("provenance", "node", node, fx.Node, "a node of one of the graphs")
        return provenance(node)


def capture(
    fn_or_module: Callable[..., Any],
    *example_inputs: Any,
    dynamic: bool | None = None,
    passes: Sequence[Pass | str] = (),
    memory_budget: float | None = None,
    decompose: bool = True,
    observers: Sequence[Observer] = (),
    **example_kwargs: Any,
) -> Captured:
    """Capture the forward and backward graphs of a function or module, without running it.

    Accepts whatever ``torch.compile(fullgraph=True)`` accepts. Parameters and buffers become inputs.

    Args:
        fn_or_module: what to capture.
        *example_inputs: its positional arguments.
        dynamic: as for ``torch.compile``: ``True`` makes sizes symbolic, ``False`` never makes them symbolic.
        passes: passes to run on the graphs, as in :class:`~fxpasses.Options`; none by default.
        memory_budget: see :class:`~fxpasses.Options`.
        decompose: whether to decompose operators as for Inductor, which gives the graphs that passes see
            under ``torch.compile``. ``False`` keeps ATen operators (``aten.gelu``) that passes never see
            there.
        observers: notified of the graphs and of what is done to them. For example,
            ``fxpasses.reports.files.GraphFiles(directory)`` writes the files of a report.
        **example_kwargs: its keyword arguments.

    Raises:
        OptionsError: if ``passes`` or ``memory_budget`` is wrong.
        CaptureError: if Dynamo breaks the graph, or AOTAutograd fails.
        PassError: if a pass fails.

    >>> import torch, fxpasses
    >>> x = torch.ones(3, requires_grad=True)
    >>> captured = fxpasses.capture(lambda x: x.sin().sum(), x)
    >>> [n.target for n in captured.backward.graph.nodes if n.op == "call_function"]
    [<OpOverload(op='aten.expand', overload='default')>, <OpOverload(op='aten.cos', overload='default')>, <OpOverload(op='aten.mul', overload='Tensor')>]
    """
    check_type("capture", "fn_or_module", fn_or_module, callable, "a module or function")
    check_dynamic("capture", dynamic, decompose=decompose)
    check_type("capture", "observers", observers, Sequence, "a list of observers")
    for item in observers:
        check_type("capture", "observers", item, Observer, "fxpasses.reports.files.GraphFiles(directory)")
    if isinstance(passes, str) or not isinstance(passes, Sequence):
        raise OptionsError("passes", passes, "a list of passes and pass names")
    options = Options.parse({"passes": list(passes), "memory_budget": memory_budget, "regions": "off"})
    recorder = _Recorder(options, decompose)
    participants = Participants(lambda *_: recorder, [recorder.observer, *observers])

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        for observer in participants.observers:
            observer.dynamo(gm, options)
        return compile_graph(gm, inputs, options, participants)

    # A wrapper of our own keeps Dynamo's cache entries apart from the user's compilations and from other
    # captures.
    @_torch.with_own_code
    def call(*args: Any, **kwargs: Any) -> Any:
        return fn_or_module(*args, **kwargs)

    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=dynamic)
    try:
        compiled(*example_inputs, **example_kwargs)
    except _Captured as done:
        if recorder.backward_graph is not None:
            for observer in participants.observers:  # the backward graph never reached its compiler
                observer.graph("backward", recorder.backward_graph)
        return recorder.result(done.inputs)
    except StageError:
        raise
    except _torch.BackendCompilerFailed as error:
        inner = error.inner_exception
        raise (inner if isinstance(inner, StageError) else CaptureError(str(inner))) from error
    except _torch.DynamoError as error:
        raise CaptureError(f"Dynamo could not trace it as one graph: {error}", graph="Python") from error
    finally:
        _torch.reset_code(call)
    raise CaptureError(
        "it ran without a single tensor operation: there is no graph to capture", graph="Python"
    )


class _Captured(BaseException):
    """Raised instead of running the forward graph; carries its inputs. Not an error."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self.inputs = tuple(inputs)


class _CopyJoint(Observer):
    joint_graph: fx.GraphModule | None = None

    def joint(self, gm: fx.GraphModule) -> None:
        self.joint_graph = copy_graph(gm)


class _Recorder(EagerCompiler):
    """Stores the graphs. Its "compiled" callables report their inputs instead of running."""

    def __init__(self, options: Options, decompose: bool) -> None:
        super().__init__(options, decompose)
        self.observer = _CopyJoint()
        self.forward_graph: fx.GraphModule | None = None
        self.backward_graph: fx.GraphModule | None = None
        self.num_outputs = 0

    def partition(
        self, joint: fx.GraphModule, joint_inputs: Any, **aot: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        self.num_outputs = aot["num_fwd_outputs"]
        forward, self.backward_graph = super().partition(joint, joint_inputs, **aot)
        return forward, self.backward_graph

    def forward(
        self, gm: fx.GraphModule, inputs: Sequence[Any], *, inference: bool, visible: int | None = None
    ) -> Callable[..., Any]:
        """Store the graph; running the result reports its inputs. Args: as for :meth:`.Compiler.forward`."""
        self.forward_graph = gm

        def report(inputs: list[Any]) -> None:
            raise _Captured(inputs)

        return _torch.make_boxed_func(lambda *inputs: report(list(inputs)))

    def backward(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.backward_graph = gm
        return super().backward(gm, inputs)

    def result(self, inputs: tuple[Any, ...]) -> Captured:
        assert self.forward_graph is not None
        outputs = outputs_of(self.forward_graph.graph)
        num_outputs = self.num_outputs if self.backward_graph is not None else len(outputs)
        return Captured(
            joint=self.observer.joint_graph,
            forward=self.forward_graph,
            backward=self.backward_graph,
            saved=tuple(_saved(node) for node in outputs[num_outputs:]),
            inputs=inputs,
            num_outputs=num_outputs,
            partition=self.forward_graph.meta.get(META_KEY),
        )


def _saved(node: fx.Node) -> SavedValue:
    value = value_of(node)
    tensor = isinstance(value, torch.Tensor)
    return SavedValue(
        name=node.name,
        shape=tuple(value.shape) if tensor else (),
        dtype=value.dtype if tensor else None,
        nbytes=nbytes_of(value),
        is_input=node.op == "placeholder",
        provenance=provenance(node),
    )
