"""``FakeTensorProp``: write what every node of an FX graph would be into ``node.meta["val"]``."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.fx import GraphModule

from fake import _torch as _t
from fake.mode import FakeTensorMode
from fake.propagate.tape import NotOnTape, Tape
from fake.tensors.tensor import FakeTensor


class FakeTensorProp(_t.TorchFakeTensorProp):
    """Propagates fake tensors through a graph, and on later runs only through what changed.

    Args:
        module: the graph to propagate through.
        mode: the mode that the values belong to; a new one by default.

    A subclass that overrides ``run_node`` or ``call_function`` is run node by node, as torch's is; so are graphs with
    operators that write to their inputs, with symbolic sizes, or with inputs that require gradients.

    >>> import torch
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> from fake import FakeTensorMode, FakeTensorProp
    >>> graph = make_fx(lambda x, w: (x @ w).relu())(torch.ones(2, 3), torch.ones(3, 4))
    >>> FakeTensorProp(graph, FakeTensorMode()).propagate(torch.ones(8, 3), torch.ones(3, 4))
    FakeTensor(..., size=(8, 4))
    >>> [tuple(n.meta["val"].shape) for n in graph.graph.nodes if n.op == "call_function"]
    [(8, 4), (8, 4)]
    """

    def __init__(self, module: GraphModule, mode: Any = None) -> None:
        super().__init__(module, FakeTensorMode() if mode is None else mode)

    def propagate_dont_convert_inputs(self, *args: object) -> Any:
        """Propagate from inputs that are fake already; returns what the graph would return."""
        if not self._may_use_tape(args):
            return super().propagate_dont_convert_inputs(*args)
        graph: Any = self.module.graph
        tapes = self._mode.__dict__.get("_tapes")
        if tapes is None:
            tapes = self._mode.__dict__["_tapes"] = weakref.WeakKeyDictionary()
        tape = tapes.get(graph)
        if tape is None:
            tape = tapes[graph] = Tape()
        try:
            return tape.run(graph, self._mode, args)
        except NotOnTape:
            tape.unusable = True
            return super().propagate_dont_convert_inputs(*args)

    def _may_use_tape(self, args: tuple[object, ...]) -> bool:
        mode = self._mode
        if type(self) is not FakeTensorProp or type(mode) is not FakeTensorMode or not mode.cache_enabled:
            return False
        if mode.propagate_real_tensors or mode.cache_crosscheck_enabled or _t.dispatch_modes_active():
            return False
        if not torch.is_grad_enabled():
            return not any(_is_special(a, mode) for a in args)
        return not any(
            _is_special(a, mode) or (isinstance(a, torch.Tensor) and a.requires_grad) for a in args
        )


def _is_special(value: object, mode: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return (
            type(value) is not FakeTensor or value.fake_mode is not mode or value._has_symbolic_sizes_strides
        )
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
