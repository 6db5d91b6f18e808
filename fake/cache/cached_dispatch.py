"""Dispatch of one operator through the cache: one handler per operator, generated from its schema.

``Engine.handler(func)`` returns ``handler(mode, func, types, args, kwargs)``, made from the template
``fake.cache.key.HANDLER``. A cache hit costs building a key, a dictionary lookup and a call of the function
that a recipe was built into. A miss goes to :meth:`Engine.miss`, which dispatches the call (for our own modes
by ``fake.dispatch.steps``) and records the result.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from fake.cache.calls import (
    PURE_OPS,
    compare,
    drop_stale_metadata,
    handle_directly,
    is_mutable,
    tensors_of,
    uncacheable_reason,
)
from fake.cache.disk import DiskCache, symbolic_name
from fake.cache.key import FORMULA_BYPASS, HANDLER, compile_key, compile_make, plain_key
from fake.cache.links import AmbiguousNode, merge_links, with_links
from fake.cache.recipe import Apart, Unbuilt, build, mark_of
from fake.cache.record_recipe import describe, verify
from fake.cache.replacements import REPLACEMENTS
from fake.cache.store import Bypass, Store
from fake.cache.subgraphs import call_when_collected, may_be_cached, subgraph_key
from fake.cache.symbolic import current_metadata, is_symbolic_key, metadata_of, symbols_of_key, table_key
from fake.cache.symbolic_recipe import Stale, symbols_of_recipe
from fake.cache.symbolic_tables import SymbolicCall, SymbolicTables
from fake.errors import CacheCrossCheckError
from fake.kernels.gradients import FORMULAS, STRIDE_DECIDING_OPS
from fake.kernels.overlaps import pairs_without_overlap
from fake.seam.aot_autograd import preferred_device_type
from fake.seam.autograd_engine import current_autograd_node
from fake.seam.dispatch import (
    OpOverload,
    active_fake_mode,
    fake_kernel_identity,
    has_composite_kernel,
    library_utils,
)
from fake.seam.dynamo import skip_code
from fake.seam.fake_tensor import DISPATCH_HANDLE_DIRECTLY, DISPATCH_META_HANDLERS
from fake.tensors.tensor import Unkeyable, forget

Handler = Callable[[Any, Any, Sequence[type], Any, Any], Any]
Dispatch = Callable[[Any, Any, Sequence[type], Any, Any], Any]

_NO_ENTRY = object()
"""Sentinel: no entry serves a call."""


class Engine:
    """Handlers and tables for fake tensors of one class.

    Args:
        tensor_class: the exact class of the tensors that the engine makes and recognizes.
        dispatch: ``dispatch(mode, func, types, args, kwargs)``, which works the result out, called on a miss.
        limit: the number of entries at which the older half is dropped.
        is_own: whether ``dispatch`` is this package's. It leaves caching of operators that take graphs to the
            engine, and refuses arguments that overlap.
    """

    def __init__(
        self, tensor_class: type, dispatch: Dispatch, limit: int = 100_000, *, is_own: bool = False
    ) -> None:
        self.is_own = is_own
        self.tensor_class = tensor_class
        self.dispatch = dispatch
        self.store = Store(limit)
        self.handlers: dict[int, Handler] = {}
        self._funcs: list[Any] = []  # keeps the operators alive, so that an id is never reused
        self._lock = threading.Lock()
        self._checks = _Checks()
        self._disk: DiskCache | None = None
        self._disk_name = ""
        self.symbolic = SymbolicTables(tensor_class)
        REPLACEMENTS.subscribe(self)

    def handler(self, func: Any) -> Handler:
        """Return the handler of an operator, generated at its first use."""
        handler = self.handlers.get(id(func))
        if handler is None:
            handler = self._make_handler(func)
            with self._lock:
                self._funcs.append(func)
                self.handlers[id(func)] = handler
        return handler

    def _make_handler(self, func: Any) -> Handler:
        if func in DISPATCH_META_HANDLERS:
            answer = DISPATCH_META_HANDLERS[func]
            return lambda mode, func, types, args, kwargs: answer(args)
        if func in DISPATCH_HANDLE_DIRECTLY:
            return handle_directly
        if self.is_own and may_be_cached(func):
            return self._make_subgraph_handler(func)
        reason = uncacheable_reason(func)
        if reason is not None:
            miss = self.miss
            return lambda mode, func, types, args, kwargs: miss(mode, func, types, args, kwargs, None, reason)
        if not library_utils.is_builtin(func):
            return self._make_custom_handler(func)
        return self._compile(func)

    def _compile(self, func: Any) -> Handler:
        source, names = compile_key(func, self.tensor_class)
        names["Bypass"] = Bypass
        table = self.store.table(func)
        self._fill_from_disk(func)
        before = ""
        if self.is_own and func in STRIDE_DECIDING_OPS:
            before = FORMULA_BYPASS
            names |= {"FORMULAS": FORMULAS, "autograd_node": current_autograd_node}
        code = HANDLER.format(names=", ".join(names), before=before, key=source)
        make = compile_make(code, f"<fake handler of {func}>")
        symbolic_lookup = self._make_symbolic_lookup(table_key(func, self.tensor_class))
        handler: Handler = make(func, table.get, self.store.hit, self.miss, symbolic_lookup, **names)
        skip_code(handler.__code__)
        return handler

    def _make_symbolic_lookup(self, operator_key: tuple[int, int]) -> Callable[..., Any]:
        """Return the function for keys that are not in the operator's table:
        the environment may have an entry."""
        miss, hit, no_entries = self.miss, self.store.hit, {}  # type: ignore[var-annotated]

        def symbolic_lookup(mode: Any, func: Any, types: Any, args: Any, kwargs: Any, key: Any) -> Any:
            """Return the fake outputs of a call. Args: those of :meth:`uncached`, and the key of the call."""
            env = mode.shape_env
            state = None if env is None else env.__dict__.get("_fake_dispatch")
            if state is None:
                return miss(mode, func, types, args, kwargs, key)
            entry = state.tables.get(operator_key, no_entries).get(key)
            if entry is None or entry.facts is not None or env._fake_lean.log is not None:
                return miss(mode, func, types, args, kwargs, key)
            rebuild = entry.rebuild
            try:
                outputs = rebuild(mode, args, kwargs)
            except (Stale, AmbiguousNode):
                return miss(mode, func, types, args, kwargs, key)
            if rebuild.__class__ is not Bypass:
                hit()
            return outputs

        skip_code(symbolic_lookup.__code__)
        return symbolic_lookup

    def attach_disk(self, disk: DiskCache | None, name: str) -> None:
        """Serve entries from a disk cache, where this engine is stored under ``name``."""
        self._disk, self._disk_name = disk, name
        for func in list(self.store.tables):
            self._fill_from_disk(func)

    def _fill_from_disk(self, func: Any) -> None:
        if self._disk is None or REPLACEMENTS.any_builtin:
            return
        if not isinstance(func, OpOverload) or not library_utils.is_builtin(func):
            return
        table = self.store.table(func)
        for key, recipe in self._disk.entries(self._disk_name, func.name()):
            if key not in table:
                self.store.insert(func, table, key, Unbuilt(recipe, self.tensor_class, table, key), None)
        for key, normalized_entries in self._disk.entries(symbolic_name(self._disk_name), func.name()):
            for entry in normalized_entries:
                self.symbolic.normalized.add(func, key, entry, is_new=False)

    def take_new_entries(self, name: str) -> dict[tuple[str, str], dict[Any, Any]]:
        """Return what was recorded since the last call, by the engine and operator names used on disk."""
        entries: dict[tuple[str, str], dict[Any, Any]] = {}
        for func, recipes in self.store.take_new_recipes().items():
            entries[name, func.name()] = recipes
        for func, key, entry in self.symbolic.normalized.take_new():
            table = entries.setdefault((symbolic_name(name), func.name()), {})
            table[key] = (*table.get(key, ()), entry)
        return entries

    def _make_custom_handler(self, func: Any) -> Handler:
        """Make the handler of a custom operator: if the mode trusts its fake kernel to be pure,
        keyed by the kernel."""

        def key_of(mode: Any, args: Any, kwargs: Any) -> Any:
            """Return the key of a call. Args: the mode, and the operator's arguments. Raises ``Unkeyable`` if
            the mode does not trust the kernel."""
            if func not in PURE_OPS and not getattr(mode, "cache_custom_ops", False):
                raise Unkeyable("non-builtin")
            return (fake_kernel_identity(func), *plain_key(func, mode, args, kwargs, self.tensor_class))

        return self._handler_by_key(func, key_of)

    def _make_subgraph_handler(self, func: Any) -> Handler:
        """Make the handler of an operator that takes graphs: keyed by their identity."""
        table = self.store.table(func)

        def key_of(mode: Any, args: Any, kwargs: Any) -> Any:
            """Return the key of a call. Args: the mode, and the operator's arguments. Raises ``Unkeyable``
            for a graph that cannot be cached."""
            key, graphs = subgraph_key(func, mode, args, kwargs, self.tensor_class)
            if key not in table:
                call_when_collected(graphs, self.store.remove, table, key)
            return key

        return self._handler_by_key(func, key_of)

    def _handler_by_key(self, func: Any, key_of: Callable[[Any, Any, Any], Any]) -> Handler:
        """Return a handler that uses ``key_of``, which raises ``Unkeyable`` for calls without a key."""
        table = self.store.table(func)

        def handler(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            """Return the fake outputs of a call. Args: those of :meth:`uncached`."""
            try:
                key = key_of(mode, args, kwargs)
                rebuild = table.get(key)
            except Unkeyable as refused:
                return self.miss(mode, func, types, args, kwargs, None, refused.reason)
            except TypeError:
                return self.miss(mode, func, types, args, kwargs, None, "unhashable argument")
            if rebuild is None:
                return self.miss(mode, func, types, args, kwargs, key)
            if type(rebuild) is not Bypass:
                self.store.hit()
            return rebuild(mode, args, kwargs)

        return handler

    def miss(
        self,
        mode: Any,
        func: Any,
        types: Any,
        args: Any,
        kwargs: Any,
        key: Any = None,
        reason: str | None = None,
    ) -> Any:
        """Serve a call without a static entry: from a symbolic entry, or by real dispatch, which is recorded.

        Args:
            mode: the mode of the call.
            func: the operator.
            types: the tensor classes involved, as ``__torch_dispatch__`` gets them.
            args: positional arguments.
            kwargs: keyword arguments.
            key: the key to record the recipe under, or None for a call that cannot be cached.
            reason: why it cannot be cached, for the counters.
        """
        kwargs = kwargs or {}
        if not mode.enter_stack and active_fake_mode() is None:
            # Reached through a tensor outside the mode: run the operator again inside it.
            self._checks.has_dispatched = True
            with mode:
                return func(*args, **kwargs)
        call = None
        if key is None:
            self.store.count_bypass(reason or "unknown")
        elif mode.shape_env is not None:
            outputs, key, call = self._find_symbolic(mode, func, types, args, kwargs, key)
            if outputs is not _NO_ENTRY:
                return outputs
        watched = tensors_of(args, kwargs) if is_mutable(func) else ()
        before = [
            (tensor, self._metadata_or_none(tensor))
            for tensor in watched
            if type(tensor) is self.tensor_class
        ]
        REPLACEMENTS.watch()
        generation = REPLACEMENTS.generation
        self._checks.has_dispatched = True
        evaluations = None
        try:
            with nullcontext() if call is None else call.record() as evaluations:
                outputs = self.dispatch(mode, func, types, args, kwargs)
        finally:
            changed = self._metadata_changed(before)
        if key is not None and outputs is not NotImplemented and generation == REPLACEMENTS.generation:
            if changed:
                self._record_bypass(func, key, "metadata of an argument changes", call, evaluations)
            else:
                self._record(mode, func, args, kwargs, key, outputs, call, evaluations)
        return outputs

    def _find_symbolic(
        self, mode: Any, func: Any, types: Any, args: Any, kwargs: Any, key: Any
    ) -> tuple[Any, Any, SymbolicCall | None]:
        """Look up symbolic entries. Returns the outputs (``_NO_ENTRY`` if there is no entry), the key under
        which to record the dispatch, and the call on symbols."""
        rebuild, call = self.symbolic.find(mode.shape_env, func, key), None
        if rebuild is None and is_symbolic_key(key):
            call = self._symbolic_call(mode, func, key)
            if call is None:
                return _NO_ENTRY, None, None
            if call.is_outdated and drop_stale_metadata(args, kwargs):
                return self.handler(func)(mode, func, types, args, kwargs), key, call
            rebuild = call.find_normalized(mark_of(mode))
        if rebuild is None:
            return _NO_ENTRY, key, call
        try:
            outputs = rebuild(mode, args, kwargs)
        except Stale:
            self.symbolic.forget(mode.shape_env, func, key)
            return self._find_symbolic(mode, func, types, args, kwargs, key)
        except AmbiguousNode:  # dispatched, and recorded more precisely
            return _NO_ENTRY, key, call or self._symbolic_call(mode, func, key)
        if type(rebuild) is not Bypass:
            self.store.hit()
        return outputs, key, call

    def _symbolic_call(self, mode: Any, func: Any, key: Any) -> SymbolicCall | None:
        try:
            return SymbolicCall(self.symbolic, mode.shape_env, func, key)
        except Unkeyable as refused:
            self.store.count_bypass(refused.reason)
            return None

    @staticmethod
    def _metadata_or_none(tensor: Any) -> Any:
        try:
            return tensor._interned or metadata_of(tensor)
        except Unkeyable:
            return None

    def _metadata_changed(self, before: list[tuple[Any, Any]]) -> bool:
        changed = False
        for tensor, interned in before:
            tensor._interned = None
            if interned is None or self._metadata_or_none(tensor) is not current_metadata(interned):
                forget(tensor)
                changed = True
        return changed

    def _record(
        self,
        mode: Any,
        func: Any,
        args: Any,
        kwargs: Any,
        key: Any,
        outputs: Any,
        call: Any,
        evaluations: Any,
    ) -> None:
        """Store what a miss returned as a recipe, or store the reason why calls with this key bypass the cache."""
        try:
            if preferred_device_type() is not None:
                raise Unkeyable("preferred device type")
            recipe = describe(func, args, kwargs, outputs, self.tensor_class)
            if not symbols_of_recipe(recipe) <= (set() if call is None else symbols_of_key(key)):
                raise Unkeyable("unrepresented symbol in output")
            mark = mark_of(mode)
            verify(recipe, mark, mode, args, kwargs, outputs)
            if call is not None:
                recipe = merge_links(call.known_recipe(), with_links(recipe, args, kwargs, outputs))
            rebuild = build(recipe, self.tensor_class, mark)
        except Unkeyable as refused:
            self._record_bypass(func, key, refused.reason, call, evaluations)
            return
        except Stale:
            return
        if call is None:
            if self.is_own and is_mutable(func):
                pairs = pairs_without_overlap(func, args, kwargs)
                if pairs:
                    recipe = Apart(recipe, pairs)
                    rebuild = build(recipe, self.tensor_class, mark)
            # The identity of a graph is only valid in this process.
            saved_recipe = recipe if isinstance(func, OpOverload) else None
            self.store.insert(func, self.store.table(func), key, rebuild, saved_recipe)
        else:
            try:
                call.record_outcome(rebuild, recipe, evaluations)
            except Unkeyable as refused:
                self.store.count_bypass(refused.reason)
                return
        if isinstance(func, OpOverload) and has_composite_kernel(func):
            self.store.count_bypass("CompositeImplicitAutograd")  # its parts count as the misses
        else:
            self.store.count_miss()

    def _record_bypass(self, func: Any, key: Any, reason: str, call: Any, evaluations: Any) -> None:
        self.store.count_bypass(reason)
        negative = Bypass(reason, func, self._dispatch_bypass)
        if call is None:
            self.store.insert(func, self.store.table(func), key, negative, None)
            return
        try:
            call.record_outcome(negative, None, evaluations)
        except Unkeyable:
            return  # the reason is counted; the next call will determine it again

    def clear(self) -> None:
        """Drop all entries, including those on shape environments, and reset the counters."""
        self.store.clear()
        self.symbolic.clear()

    def invalidate(self) -> None:
        """Drop all entries because a kernel of torch was replaced; keep the counters."""
        self.store.drop_entries()
        self.symbolic.clear()

    def _dispatch_bypass(self, mode: Any, func: Any, types: Any, args: Any, kwargs: Any, reason: str) -> Any:
        return self.miss(mode, func, types, args, kwargs, None, reason)

    def uncached(self, mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Dispatch without reading or writing the cache.

        Args:
            mode: the mode of the call.
            func: the operator.
            types: the tensor classes involved, as ``__torch_dispatch__`` gets them.
            args: positional arguments.
            kwargs: keyword arguments.

        Returns:
            The fake outputs.
        """
        if func in DISPATCH_META_HANDLERS or func in DISPATCH_HANDLE_DIRECTLY:
            return self.handler(func)(mode, func, types, args, kwargs)
        return self.miss(mode, func, types, args, kwargs, None, "cache disabled")

    def crosscheck(self, mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        """Serve a call, and compare a cached result with a fresh dispatch.

        Args:
            mode: the mode of the call.
            func: the operator.
            types: the tensor classes involved, as ``__torch_dispatch__`` gets them.
            args: positional arguments.
            kwargs: keyword arguments, or None.

        Returns:
            The fake outputs.

        Raises:
            CacheCrossCheckError: they differ.
        """
        kwargs = kwargs or {}
        if func in DISPATCH_META_HANDLERS or func in DISPATCH_HANDLE_DIRECTLY:
            return self.handler(func)(mode, func, types, args, kwargs)
        if (
            self._checks.is_running
        ):  # this is the fresh dispatch, or called by it: nothing is looked up or counted
            return self.dispatch(mode, func, types, args, kwargs)
        outer, self._checks.has_dispatched = self._checks.has_dispatched, False
        try:
            outputs = self.handler(func)(mode, func, types, args, kwargs)
            was_hit = not self._checks.has_dispatched
        finally:
            self._checks.has_dispatched = outer
        if was_hit and not is_mutable(func):
            compare(func, outputs, self._dispatch_fresh(mode, func, args, kwargs))
        return outputs

    def _dispatch_fresh(self, mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
        self._checks.is_running = True
        try:
            if mode.enter_stack or active_fake_mode() is not None:
                return self.dispatch(mode, func, (), args, kwargs)
            with mode:
                return func(*args, **kwargs)
        except Exception as error:
            raise CacheCrossCheckError(func, f"it was served, a fresh dispatch raises {error!r}") from error
        finally:
            self._checks.is_running = False


class _Checks(threading.local):
    """Per-thread state of cross-checks.

    Attributes:
        has_dispatched: whether the call being served was dispatched.
        is_running: whether a fresh dispatch, to compare a hit with, is in progress.
    """

    has_dispatched = False
    is_running = False
