"""Private names of torch that reports read."""

from __future__ import annotations

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from fake.seam.dynamo import get_metrics_context
from fake.seam.symbolic_shapes import hints_of


def source_of(placeholder: fx.Node) -> str:
    """Return the expression by which Dynamo finds a graph input in the user's frame, or ""."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)  # a property in some releases, a method in others


def graph_break_of(gm: fx.GraphModule) -> dict[str, Any] | None:
    """Return the reason and the user's line of the graph break that ends a graph; ``None`` without one."""
    subgraph_reason = getattr(gm, "compile_subgraph_reason", None)
    if subgraph_reason is None or not subgraph_reason.graph_break:
        return None
    stack = [frame for frame in subgraph_reason.user_stack if frame.lineno]
    where = {"file": stack[-1].filename, "line": stack[-1].lineno, "code": stack[-1].line} if stack else None
    return {"reason": str(subgraph_reason.reason), "where": where}


def recompile_reason() -> str:
    """Return the guard that failed if Dynamo is recompiling now, or "".

    Dynamo's number of the compilation and the user's stack are removed.
    """
    reason = str(get_metrics_context()._metrics.get("recompile_reason") or "")
    return re.sub(r"^\d+/\d+: ", "", " ".join(reason.partition("User stack trace:")[0].split()))


def generated_code(compiled: Callable[..., Any]) -> str:
    """Return the code that Inductor generated for a compiled graph, or ""."""
    return str(getattr(compiled, "source_code", None) or "")


def cache_key(compiled: Callable[..., Any]) -> str:
    """Return the key by which the profiler names calls of a graph that Inductor compiled."""
    return str(getattr(compiled, "_fx_graph_cache_key", None) or "")


def kernels_of(compiled: Callable[..., Any]) -> dict[str, list[str]]:
    """Map each kernel call in a compiled graph to the names of its nodes, as far as Inductor tells."""
    text = getattr(compiled, "inductor_provenance_mapping_str", None)
    if not text:
        return {}
    found = {kernel: list(nodes) for kernel, nodes in json.loads(text).get("cppCodeToPost", {}).items()}
    # Inductor keeps one table for all graphs, keyed by node names, which a backward graph shares with its
    # forward graph. The code of a graph names its own calls.
    own = set(re.findall(r"\[Provenance debug handles\] (\S+)", generated_code(compiled)))
    return {kernel: nodes for kernel, nodes in found.items() if kernel in own} if own else found


def compile_options(compiled: Any) -> Mapping[str, Any] | None:
    """Return the ``options`` of a compiled function or module; ``None`` if not from ``torch.compile``."""
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled  # of module.compile()
    context = getattr(compiled, "dynamo_ctx", None)  # for a module; a function has it in its closure
    backend = getattr(context, "callback", None)
    while backend is None and isinstance(
        compiled, types.FunctionType
    ):  # a function that looks for plans wraps Dynamo's
        backend = inspect.getclosurevars(compiled).nonlocals.get("callback")
        compiled = getattr(compiled, "__wrapped__", None)
    while backend is not None:
        arguments = getattr(backend, "kwargs", None)
        if isinstance(arguments, dict):
            return dict(arguments.get("options") or {})
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    return None


def symbols_of(shape_env: Any) -> list[dict[str, str]]:
    """Return the symbols of a shape environment, with their ranges and hints."""
    hints = hints_of(shape_env)
    return [
        {"name": str(symbol), "range": f"{bounds.lower}..{bounds.upper}", "hint": str(hints.get(symbol, ""))}
        for symbol, bounds in shape_env.var_to_range.items()
    ]
