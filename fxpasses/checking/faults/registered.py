"""Write third-party operator registrations into repro files, since another process would lack them."""

from __future__ import annotations

import inspect
import logging
import types
from typing import Any

from torch import fx

from fxpasses._torch import lowering_of
from fxpasses.checking.faults.source import CannotEmbed, PassSource
from fxpasses.graphs.decompositions import decompositions

log = logging.getLogger(__name__)


def add_lowerings(gm: fx.GraphModule, source: PassSource) -> None:
    """Add lines that register the third-party Inductor lowerings of a graph's operators.

    Raises:
        CannotEmbed: one cannot be written.
    """
    for target in dict.fromkeys(n.target for n in gm.graph.nodes if n.op == "call_function"):
        function = lowering_of(target)
        if function is not None and _is_foreign(function):
            name = source.expression_for(inspect.unwrap(function))
            source.imports.append("from torch._inductor.lowering import register_lowering")
            source.definitions.append(
                f"register_lowering(torch.ops.{target}, type_promotion_kind=None)({name})"
            )


def add_decompositions(source: PassSource) -> None:
    """Add lines that register decompositions, as far as they can be written. Any of them may be needed."""
    for target, function in decompositions().items():
        if isinstance(function, types.FunctionType) and _is_foreign(function):
            try:
                name = source.expression_for(function)
            except CannotEmbed as reason:
                log.info("the decomposition of %s is not in the repro file: %s", target, reason)
                continue
            source.imports.append("from torch._inductor.decomposition import decompositions")
            source.definitions.append(f"decompositions[torch.ops.{target}] = {name}")


def _is_foreign(function: Any) -> bool:
    return not str(function.__module__).startswith(("torch.", "fxpasses."))
