"""Compiled graphs in the form that torch saves (``caching_precompile``, ``bundled_autograd_cache``).

AOTAutograd then requires every compiled graph to be an ``OutputCode``. Inductor's graphs already are. This
module has the others: a graph that runs operator by operator, parts that a generated function calls in turn,
and code that cannot be saved, with the reason.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fxpasses.compiling import _torch_inductor
from fxpasses.compiling.compiled_segments import fitted, load_stitched

log = logging.getLogger(__name__)


def _no_metadata(key: str) -> bool:
    return False


class EagerCode(_torch_inductor.RegionalOutputCode):
    """A graph that runs operator by operator. Called like a compiled one: it empties a list of inputs."""

    def __init__(self, gm: fx.GraphModule, traced: Sequence[Any] = ()) -> None:
        """``traced`` are its outputs as traced, if a caller relies on their strides."""
        super().__init__(gm, ops_filter=None, node_metadata_key_filter=_no_metadata)  # type: ignore[arg-type]
        self._strides = [_known_strides(value) for value in traced]

    def __call__(self, inputs: list[Any]) -> Any:  # type: ignore[override]
        given = tuple(inputs)
        inputs.clear()
        assert self._graph_module is not None
        with torch.no_grad():
            results = self._graph_module.forward(*given)
            if not any(self._strides):
                return results
            return tuple(
                r if s is None or not r.numel() else fitted(r, s)
                for r, s in zip(results, self._strides, strict=True)
            )


def _known_strides(value: Any) -> tuple[int, ...] | None:
    if isinstance(value, torch.Tensor) and all(type(s) is int for s in (*value.shape, *value.stride())):
        return tuple(value.stride())
    return None


class StitchedCode(_torch_inductor.OutputCode):
    """The parts of a graph, each an ``OutputCode``, and the function that calls them in turn."""

    def __init__(self, source: str, parts: Mapping[str, _torch_inductor.OutputCode]) -> None:
        super().__init__()
        self.source, self.parts = source, dict(parts)
        self._boxed_call = True
        self._call: Callable[[list[Any]], Any] | None = load_stitched(source, self.parts)

    def __call__(self, inputs: Any) -> Any:
        assert self._call is not None
        return self._call(inputs)

    def prepare_for_serialization(self) -> None:
        self.parts = {name: copy.copy(part) for name, part in self.parts.items()}
        for part in self.parts.values():
            part.prepare_for_serialization()
        self._call = None

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Load the parts and the function that calls them. AOTAutograd calls this after a cache hit, too.

        Args:
            example_inputs: not used: each part has its own.
            constants: not used: each part has its own.
            graph_kwargs: torch's arguments for loading a part.
        """
        if self._call is None:
            self.parts = {
                name: _torch_inductor.loaded_code(part, graph_kwargs) for name, part in self.parts.items()
            }
            self._call = load_stitched(self.source, self.parts)

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing to do: the parts have their own bundles."""


class UnsavedCode(_torch_inductor.OutputCode):
    """A compiled graph that can run but cannot be saved."""

    def __init__(self, call: Callable[..., Any], reason: str) -> None:
        super().__init__()
        self._run, self._reason = call, reason
        self._boxed_call = bool(getattr(call, "_boxed_call", False))

    def __call__(self, *inputs: Any) -> Any:
        return self._run(*inputs)

    def prepare_for_serialization(self) -> None:
        log.warning("this graph is not saved for other processes: %s", self._reason)
        raise _torch_inductor.BypassAOTAutogradCache(f"fxpasses: {self._reason}")

    def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
        """Nothing to do: this code was never on disk. Args: those of :meth:`StitchedCode.post_compile`."""

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        """Nothing to do: neither the code nor its kernels are saved."""


def unsaved(compiled: Any, reason: str) -> Any:
    """Keep Inductor's compiled graph out of AOTAutograd's cache; ``reason`` says why."""
    if _torch_inductor.saves_compiled_code():
        return UnsavedCode(compiled, reason)

    # A cache entry refers to code by a key, which Inductor's code has and a function does not have.
    def run(inputs: list[Any]) -> Any:
        return compiled(inputs)

    run._boxed_call = True  # type: ignore[attr-defined]
    run.compiled = compiled  # type: ignore[attr-defined]
    return run


def unwrap_unsaved(compiled: Any) -> Any:
    """Undo :func:`unsaved` if ``compiled`` is its result."""
    return getattr(compiled, "compiled", compiled)


def as_output_code(compiled: Callable[..., Any], reason: str) -> Callable[..., Any]:
    """Make a graph an ``OutputCode`` if AOTAutograd saves graphs; ``reason`` is why this one is not saved."""
    if not _torch_inductor.saves_compiled_code() or isinstance(compiled, _torch_inductor.OutputCode):
        return compiled
    return UnsavedCode(compiled, reason)
