"""What reports read of torch's private names."""

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
    """The expression by which Dynamo finds an input of its graph in the user's frame, or ""."""
    source = getattr(placeholder, "_dynamo_source", None)
    name = getattr(source, "name", "")
    return str(name() if callable(name) else name)  # a property in some releases


def end_of_graph(gm: fx.GraphModule) -> dict[str, Any] | None:
    """Why Dynamo's graph ends before the function does: the reason and the user's line; None where it does not."""
    why = getattr(gm, "compile_subgraph_reason", None)
    if why is None or not why.graph_break:
        return None
    stack = [frame for frame in why.user_stack if frame.lineno]
    where = {"file": stack[-1].filename, "line": stack[-1].lineno, "code": stack[-1].line} if stack else None
    return {"reason": str(why.reason), "where": where}


def recompile_reason() -> str:
    """The guard that failed, if Dynamo compiles something again now, or ""; without Dynamo's number of the compilation and the user's stack."""
    told = str(get_metrics_context()._metrics.get("recompile_reason") or "")
    return re.sub(r"^\d+/\d+: ", "", " ".join(told.partition("User stack trace:")[0].split()))


def generated_code(compiled: Callable[..., Any]) -> str:
    """The code that Inductor wrote for a compiled graph, or ""."""
    return str(getattr(compiled, "source_code", None) or "")


def cache_key(compiled: Callable[..., Any]) -> str:
    """By which the profiler names calls of a graph that Inductor compiled."""
    return str(getattr(compiled, "_fx_graph_cache_key", None) or "")


def kernels_of(compiled: Callable[..., Any]) -> dict[str, list[str]]:
    """For each call of a kernel in the compiled graph the names of the nodes that it computes, as far as Inductor tells."""
    text = getattr(compiled, "inductor_provenance_mapping_str", None)
    if not text:
        return {}
    found = {kernel: list(nodes) for kernel, nodes in json.loads(text).get("cppCodeToPost", {}).items()}
    # Inductor keeps one table for all graphs by the names of nodes, which a backward graph shares with its forward: the code names its own calls.
    own = set(re.findall(r"\[Provenance debug handles\] (\S+)", generated_code(compiled)))
    return {kernel: nodes for kernel, nodes in found.items() if kernel in own} if own else found


def compile_options(compiled: Any) -> Mapping[str, Any] | None:
    """The ``options`` that a compiled function or module was made with; None for what ``torch.compile`` did not make."""
    compiled = getattr(compiled, "_compiled_call_impl", None) or compiled  # of module.compile()
    context = getattr(compiled, "dynamo_ctx", None)  # of a module; a function has the same in its closure
    backend = getattr(context, "callback", None)
    while backend is None and isinstance(
        compiled, types.FunctionType
    ):  # one that looks for plans wraps Dynamo's
        backend = inspect.getclosurevars(compiled).nonlocals.get("callback")
        compiled = getattr(compiled, "__wrapped__", None)
    while backend is not None:
        arguments = getattr(backend, "kwargs", None)
        if isinstance(arguments, dict):
            return dict(arguments.get("options") or {})
        backend = getattr(backend, "_torchdynamo_orig_backend", None)
    return None


def symbols_of(shape_env: Any) -> list[dict[str, str]]:
    """The symbols of a shape environment, with their ranges and the sizes that were seen."""
    hints = hints_of(shape_env)
    return [
        {"name": str(symbol), "range": f"{bounds.lower}..{bounds.upper}", "hint": str(hints.get(symbol, ""))}
        for symbol, bounds in shape_env.var_to_range.items()
    ]
