"""The provenance of the nodes of a captured graph.

AOTAutograd stores, on every node, the stack trace of the user's line, the stack of ``nn.Module`` calls, and
autograd's sequence number. A backward node has the sequence number of the forward operator whose gradient it
computes, which is how the two are matched here.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from fake.error_text import error_text
from fake.seam.autograd_engine import run_backward
from fxpasses.errors import Location

_KEY = "fxpasses"
_OWN_FILES = os.path.dirname(os.path.dirname(__file__)) + os.sep
_TORCH_FILES = os.path.dirname(torch.__file__) + os.sep
_GRADIENT_SUM = "Gradient addition node"
"""The text that AOTAutograd writes into the stack trace of a gradient accumulation."""
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+)(?:, in (?P<function>.+))?\n?(?P<code>.*)')

_MODULE_SOURCE = re.compile(r"\._(?:parameters|buffers)\[")
_LONGEST_LINE = 300
"""How many characters of a line are kept. The line is repeated for each of its operators."""


@dataclass(frozen=True)
class Provenance:
    """Where a node comes from.

    Attributes:
        file: the user's source file, or "".
        line: the line number in it, 0 if unknown.
        function: the enclosing function, or "".
        code: the text of the line, or "".
        module: path of the ``nn.Module`` (``blocks.0.attn``), "" for the root or outside of any module.
        module_type: the class of that module, or "".
        backward: whether the node computes gradients.
        forward_node: for a backward node, the name of the forward node that it differentiates, or "".
    """

    file: str = ""
    line: int = 0
    function: str = ""
    code: str = ""
    module: str = ""
    module_type: str = ""
    backward: bool = False
    forward_node: str = ""

    @property
    def source(self) -> str:
        """``file:line in function: code``, or ""."""
        if not self.file:
            return ""
        inside = f" in {self.function}" if self.function else ""
        return f"{self.file}:{self.line}{inside}" + (f": {self.code}" if self.code else "")


def user_input_names(gm: fx.GraphModule) -> list[str]:
    """The names of a Dynamo graph's inputs in the user's program (``layers.0.weight``), "" where unknown."""
    from fake.symbols.terms import text_of_source  # imports Dynamo

    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node.meta.get("grapharg"), "source", None)
        text = "" if source is None else text_of_source(source)
        is_held = source is not None and _MODULE_SOURCE.search(source.name)
        found.append(text.partition(".")[2] if is_held else text)
    return found


def annotate(joint: fx.GraphModule, inputs: Sequence[str] = ()) -> None:
    """Compute the provenance of every node of a joint graph, and store it in ``meta["fxpasses"]``.

    Partitioning and rewriting copy it along with the other metadata.

    Args:
        joint: the graph as traced by AOTAutograd.
        inputs: the names of the original graph's inputs: see :func:`user_input_names`. Stored in
            ``meta["input"]`` for messages.
    """
    for node in joint.graph.find_nodes(op="placeholder") if inputs else ():
        at = getattr(node.meta.get("desc"), "idx", None)
        if isinstance(at, int) and at < len(inputs) and inputs[at]:
            node.meta["input"] = inputs[at]
    first_of: dict[int, fx.Node] = {}
    for node in joint.graph.nodes:
        sequence = node.meta.get("seq_nr")
        if node.op == "call_function" and sequence is not None and not is_backward(node):
            # An operator without a gradient of its own has the sequence number of the operator before it.
            first_of.setdefault(sequence, node)
    last_forward: fx.Node | None = None
    for node in joint.graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        forward: fx.Node | None = None
        backward = is_backward(node)
        if backward:
            forward = first_of.get(node.meta.get("seq_nr", -1))
            if _GRADIENT_SUM in (node.meta.get("stack_trace") or ""):
                forward = _accumulated_value(node, last_forward) or forward
            else:
                last_forward = forward
        found = _node_provenance(node, backward, forward)
        if not found.file and not found.module:
            # AOTAutograd's own calls, such as the final copy into an updated buffer, get the provenance of
            # their inputs. (Calls of a ``Sequential`` that is compiled directly have a module but no line.)
            sources = [n.meta[_KEY] for n in node.all_input_nodes if _KEY in n.meta]
            found = (
                dataclasses.replace(sources[-1], backward=backward, forward_node=found.forward_node)
                if sources
                else found
            )
        node.meta[_KEY] = found


def _accumulated_value(addition: fx.Node, consumer: fx.Node | None) -> fx.Node | None:
    """The value whose gradient ``addition`` accumulates: one that ``consumer`` and some other node use.

    Autograd adds the gradients of a value that is used more than once as soon as they arrive. The addition
    has the sequence number of whatever ran before, so the value is found through the graph: ``consumer`` is
    the forward node of the gradient that arrived last.
    """
    if consumer is None:
        return None
    shape = _shape(addition)
    inputs = [n for n in consumer.all_input_nodes if _shape(n) == shape]
    inputs.sort(key=lambda n: len(n.users) > 1, reverse=True)
    return inputs[0] if inputs else consumer


def _shape(node: fx.Node) -> list[str]:
    """The sizes of a value as text, because comparing symbols would add a guard to the compilation."""
    return [str(size) for size in getattr(node.meta.get("val"), "shape", ())]


def is_backward(node: fx.Node) -> bool:
    """Whether AOTAutograd traced the node during autograd's backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward" or bool(
        node.meta.get("autograd_backward", False)
    )


def provenance(node: fx.Node) -> Provenance:
    """The provenance of a node: its annotation, or what the node's own metadata says."""
    return node.meta.get(_KEY) or _node_provenance(node, is_backward(node), None)


def locate(node: fx.Node) -> Location:
    """The node's line in the user's program, for error messages."""
    found = provenance(node)
    return Location(node.name, str(node.target), found.source, found.module)


def failing_node(error: BaseException, gm: fx.GraphModule) -> Location:
    """Find the node that was being processed when ``error`` was raised.

    Searches the frames of the traceback, innermost first, for a local variable that holds a node of this
    graph (or of a copy of it: the name then decides). Works for ``fx.Interpreter``, AOTAutograd, Inductor's
    lowering and passes alike. If a gradient was being traced, the frames that called the engine do not know
    the node, so the operator that the error names is searched for instead.
    """
    names = {node.name: node for node in gm.graph.nodes}
    pending: list[BaseException | None] = [error]
    while pending:
        current = pending.pop()
        if current is None:
            continue
        for frame, _ in reversed(list(traceback.walk_tb(current.__traceback__))):
            if frame.f_code is run_backward.__code__:
                return _named_node(error_text(current), gm)
            for value in [frame.f_locals.get(key) for key in ("n", "node", "origin", "fx_node")]:
                if isinstance(value, fx.Node) and value.op not in ("placeholder", "output"):
                    return locate(names.get(value.name, value))
        pending += [current.__context__, current.__cause__]
    return Location()


def _named_node(text: str, gm: fx.GraphModule) -> Location:
    """The first call of an ATen operator that the text names."""
    named = set(re.findall(r"aten::(\w+)", text))
    for node in gm.graph.nodes:
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op in ("call_function", "call_method") and target in named:
            return locate(node)
    return Location()


def _node_provenance(node: fx.Node, backward: bool, forward: fx.Node | None) -> Provenance:
    meta = node.meta
    trace = (
        meta.get("stack_trace") or (forward.meta.get("stack_trace") if forward is not None else None) or ""
    )
    frame = _user_frame(trace)
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if not stack and forward is not None:
        stack = forward.meta.get("nn_module_stack")
    module, module_type = _module_path(stack)
    return Provenance(
        file=frame["file"] if frame else "",
        line=int(frame["line"]) if frame else 0,
        function=(frame["function"] or "") if frame else "",
        code=_shortened((frame["code"] or "").strip()) if frame else "",
        module=module,
        module_type=module_type,
        backward=backward,
        forward_node=forward.name if forward is not None else "",
    )


def _shortened(line: str) -> str:
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]} ..."


@functools.lru_cache(maxsize=256)  # all results of one call have the same trace
def _user_frame(trace: str) -> dict[str, str] | None:
    frames = [match.groupdict() for match in _FRAME.finditer(trace)]
    frames = [frame for frame in frames if not frame["file"].startswith(_OWN_FILES)]
    # A line in torch's Sequential is less informative than the user's line that called it.
    users = [frame for frame in frames if not frame["file"].startswith(_TORCH_FILES)]
    return (users or frames)[-1] if frames else None


def _module_path(stack: object) -> tuple[str, str]:
    if not isinstance(stack, dict) or not stack:
        return "", ""
    path, kind = list(stack.values())[-1]
    # Dynamo writes L['self'].blocks.0.attn, where L['self'] is the root; in some releases with _modules['0'].
    path = re.sub(r"^[LG]\['[^']*'\]", "", str(path))
    path = re.sub(r"_modules\['([^']*)'\]", r"\1", path)
    path = re.sub(r"\['?([^'\]]+)'?\]", r".\1", path)
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
    return path.strip("."), name.rsplit(".", 1)[-1]
