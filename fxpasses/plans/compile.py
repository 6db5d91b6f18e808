"""``fxpasses.compile``: compile a model, or load what an earlier process compiled."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import json
import logging
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

import torch

from fake.wrong_arguments import check_dynamic
from fxpasses.counters import counters
from fxpasses.errors import FxPassesError, OptionsError
from fxpasses.plans import _torch
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.files.plan_files import OnlyResults, cache_directory
from fxpasses.plans.graph_breaks.between import Functions
from fxpasses.plans.graph_breaks.frames import forget_compiled
from fxpasses.plans.inputs.arguments import describe_arguments, describe_options, without_numbers
from fxpasses.plans.inputs.surroundings import STATE, state, surroundings
from fxpasses.plans.recording.reported import Reported
from fxpasses.plans.running.loaded import Directory, InMemoryPlan, Misses, PlanStore
from fxpasses.plans.running.plan import Plan
from fxpasses.plans.running.walked_model import WalkedModels, description_variants
from fxpasses.plans.walks.written_again import ChangedNumbers, collect_runs

if TYPE_CHECKING:
    from fxpasses.pass_manager.pass_base import Pass

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Callable[..., Any])


def compile(
    model: M | None = None,
    *,
    passes: Sequence[Pass | str] | Literal["tuned"] | None = None,
    regions: Literal["auto", "off", "always"] | Sequence[str] | None = None,
    memory_budget: float | None = None,
    partition: Literal["fxpasses", "torch"] | None = None,
    compiler: Literal["inductor", "eager"] | None = None,
    inductor: Mapping[str, Any] | None = None,
    mode: str | None = None,
    on_failure: Literal["raise", "eager", "isolate"] | None = None,
    check: Literal["structure", "values", "off"] | None = None,
    report: str | os.PathLike[str] | None = None,
    accelerate: bool | None = None,
    compiled_autograd: bool | None = None,
    ranks: Literal["check", "agree", "off"] | None = None,
    cache: str | os.PathLike[str] = "auto",
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> Compiled[M]:
    """Compile a model or function.

    The results are those of ``torch.compile(model, backend="fxpasses", options=...)``. The first call looks
    for a plan that an earlier process wrote. If nothing that the plan depends on has changed, the call runs
    it and imports neither Dynamo nor Inductor. Otherwise the call compiles the model and, if possible, writes
    a plan. :func:`fxpasses.stats` counts both, and why plans were not written.

    Args:
        model: a module or function. If omitted, the return value is a decorator.
        passes: an option of :class:`fxpasses.Options`, like all that follow up to ``ranks``. ``None`` selects
            its default.
        regions: which repeated layers are compiled once.
        memory_budget: how much may be saved for the backward pass.
        partition: what decides which values are saved.
        compiler: what compiles the graphs.
        inductor: Inductor's own options.
        mode: a mode of ``torch.compile``.
        on_failure: what happens when a stage fails.
        check: what is checked after each pass.
        report: a directory for the captured graphs.
        accelerate: whether tracing is accelerated.
        compiled_autograd: whether backward passes are captured whole.
        ranks: what the processes of a job compare before a graph with collectives runs.
        cache: where plans are stored: a directory, ``"off"`` or ``"auto"``. ``"auto"`` is the directory in
            ``FXPASSES_CACHE_DIR`` (``off`` there disables plans), else none if
            ``TORCHINDUCTOR_FORCE_DISABLE_CACHES=1``, else the folder ``fxpasses`` in
            ``TORCHINDUCTOR_CACHE_DIR``, else one in the directory for temporary files.
        dynamic: as in ``torch.compile``.
        fullgraph: as in ``torch.compile``.

    Raises:
        OptionsError: ``model`` is not callable, or ``report`` or ``cache`` is of the wrong type. Other wrong
            options raise in the first call that compiles.
        ArgumentTypeError: ``dynamic`` or ``fullgraph`` is of the wrong type.
    """
    if model is None:
        given = {name: value for name, value in locals().items() if name != "model"}
        return functools.partial(compile, **given)  # type: ignore[return-value] # called with the model next
    if not callable(model):
        raise OptionsError("model", model, "a module or function")
    if report is not None and not isinstance(report, (str, os.PathLike)):
        raise OptionsError("report", report, "a directory name")
    if not isinstance(cache, (str, os.PathLike)):
        raise OptionsError("cache", cache, "'auto', 'off' or a directory")
    check_dynamic("compile", dynamic, fullgraph=fullgraph)
    given = {
        "passes": None if passes is None else list(passes) if isinstance(passes, (list, tuple)) else passes,
        "regions": regions, "memory_budget": memory_budget, "partition": partition, "compiler": compiler, "inductor": inductor, "mode": mode,
        "on_failure": on_failure, "check": check, "report": None if report is None else os.fspath(report),
        "accelerate": accelerate, "compiled_autograd": compiled_autograd, "ranks": ranks, "cache": os.fspath(cache),
    }  # fmt: skip
    options = {name: value for name, value in given.items() if value is not None}
    directory = cache_directory(os.fspath(cache))
    store = None if directory is None else Directory(directory)
    return _wrapper_class(model)(model, options, store, dynamic=dynamic, fullgraph=fullgraph)


_MAX_MISSES = 32
"""Stop looking for plans after this many calls without any: a model's kinds of inputs rarely change."""
_MAX_CONTENTS = 8
"""The limit on contents of the model, or numbers among the arguments, for which a plan is looked for after a
miss, and written. It is as high as Dynamo's limit for a frame."""
_MAX_KINDS = 4096
"""The most kinds of arguments for which a miss is remembered."""
_MAX_IN_MEMORY = 4
"""The most plans kept for this process alone."""
_STEP_METHODS = frozenset({"training_step", "validation_step", "test_step", "predict_step"})
"""The methods of a module that Lightning calls instead of the module itself."""
_SHARED = "an argument that shares memory with a model whose tensors are changed"
_TOO_MANY = "a model, or numbers among its arguments, that are others in each call"


class Compiled(Reported, Generic[M]):
    """What :func:`compile` returns: called like the model, and with its attributes except those named here.

    If the model is a module, this passes for one. As a child of another module, it contributes the model's
    own parameters, under their own names.

    Attributes:
        model: the model.
        plan_files: the files of the plans that it has written or used.
        why_no_plan: why the last call that was compiled has no plan, or "".
        reasons_for_none: why calls had no plan so far.
        functions_between: what runs in Python between its graphs, and is compiled on its own.
        has_no_graph: whether there was nothing in it to compile.
    """

    def __init__(
        self,
        model: M,
        options: Mapping[str, Any],
        store: PlanStore | None,
        *,
        dynamic: bool | None,
        fullgraph: bool,
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        """Args: those of :func:`compile`, where plans are stored, and what ``torch.compile`` returned for the
        model, if it was called."""
        self.model = model
        self.plan_files: dict[Path, None] = {}
        self.why_no_plan = ""
        self.reasons_for_none: dict[str, None] = {}
        self.has_no_graph = self._has_graph = self._is_between = False
        self.functions_between = Functions(self._compile_function)
        self._options, self._plan_store, self._dynamic, self._fullgraph = options, store, dynamic, fullgraph
        self._from_torch, self._reasons, self._calls_without = compiled, set[str](), 0
        self._lock = threading.RLock()
        self._walked_models = WalkedModels(model, self.functions_between)
        self._last = 0
        self._in_memory_plans: list[InMemoryPlan] = []
        self._steps: dict[str, Compiled[Any]] = {}
        self._known: dict[Any, Misses] = {}
        self._had_plans: dict[Any, Path | None] = {}
        self._written = collections.Counter[Any]()
        self._turn = 0
        functools.update_wrapper(self, model, updated=())
        self._own = frozenset(vars(self))  # from here on, other attributes belong to the model

    def __setattr__(self, name: str, value: Any) -> None:
        own = vars(self).get("_own")
        if own is None or name in own:
            super().__setattr__(name, value)
        else:
            setattr(self.model, name, value)

    def __delattr__(self, name: str) -> None:
        if name in vars(self)["_own"]:
            super().__delattr__(name)
        else:
            delattr(self.model, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        model = vars(self).get("model")
        return type(model) if isinstance(model, torch.nn.Module) else Compiled

    def __getattr__(self, name: str) -> Any:
        if name == "model":
            raise AttributeError(name)
        if name not in _STEP_METHODS or not callable(getattr(self.model, name)):
            return getattr(self.model, name)
        if name not in self._steps:
            self._steps[name] = self._compile_function(getattr(self.model, name))
        return self._steps[name]

    def __reduce__(self) -> Any:
        how = {"dynamic": self._dynamic, "fullgraph": self._fullgraph}
        return _compiled_again, (self.model, self._options, self._plan_store, how)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled[M]:
        again, (model, *how) = self.__reduce__()
        return again(copy.deepcopy(model, memo), *how)  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        return f"fxpasses.compile({self.model!r})"

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        if self._from_torch is not None:
            return self._from_torch
        cache = OnlyResults(self._options.get("cache", "off"))
        cache.turn = self._turn
        # Lightning wraps torch.compile to set an attribute of the model, which no plan would survive.
        compiled = inspect.unwrap(torch.compile)(
            _torch.eager_callable(self.model),
            backend="fxpasses",
            options={**self._options, "cache": cache},
            dynamic=self._dynamic,
            fullgraph=self._fullgraph,
        )
        # torch.compile wraps a module in another module, for which global module hooks would run as well.
        return compiled.forward if isinstance(compiled, torch.nn.Module) else compiled

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the model, compiled."""
        if torch.compiler.is_compiling():  # a compiled function inlines it
            return self.model(*args, **kwargs)
        if self._plan_store is None:
            return self._compiled(*args, **kwargs)
        self._walked_models.calls += 1
        self._walked_models.given.update_from(args, kwargs)
        try:
            known = self._walked_models.known
            last = min(self._last, len(known) - 1)
            for i in range(last, last - len(known), -1):  # layers come in turn, newest first
                if (found := known[i].quick_call(args, kwargs)) is not None:
                    self._last = i % len(known)
                    return self._call_plan(*found, args, kwargs)
            known = []  # drop references to what was seen
            now = state()
            found = next(
                filter(
                    None, (walked_model.call(now, args, kwargs) for walked_model in self._walked_models.known)
                ),
                None,
            )
        except NoPlan as error:
            why = error.with_traceback(None)  # the traceback holds the inputs
        else:
            if found is not None:
                return self._call_plan(*found, args, kwargs)
            return self._find_or_compile(now, self._plan_store, args, kwargs)
        # Outside the handler, so that an error of the model has no ``__context__``.
        return self._refuse_and_call(why, self._plan_store, args, kwargs)

    def _call_plan(
        self, plan: Plan, tensors: Sequence[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if not plan.is_tuned:
            return plan(tensors, args, kwargs)
        try:
            return plan(tensors, args, kwargs)
        except Exception as error:
            log.warning("a plan is not used any more: %s", error)
            self._walked_models.known.clear()
            if plan.changes:  # it may have mutated them already: do not repeat it, compile in the next call
                if isinstance(self._plan_store, Directory) and plan.file is not None:
                    plan.file.unlink(missing_ok=True)
                raise
        return self._call_by_dynamo(args, kwargs)  # strikes the tuned choice if that is at fault

    def _refuse_and_call(
        self, error: NoPlan, store: PlanStore, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        self.why_no_plan = error.reason
        self.reasons_for_none[error.reason] = None
        if error.reason not in self._reasons:
            store.refuse(error)
            self._reasons.add(error.reason)
        return self._call_by_dynamo(args, kwargs)

    def by_dynamo(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled model without looking for a plan."""
        return self._compiled(*args, **kwargs)

    def _call_by_dynamo(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a call that has no plan, by Dynamo. After many such calls, stop looking for plans."""
        self._calls_without += 1
        if self._calls_without > _MAX_MISSES and not self.plan_files and not self._in_memory_plans:
            self._plan_store = None
        with self.functions_between.run() if self.functions_between else contextlib.nullcontext():
            return self._compiled(*args, **kwargs)

    def _find_or_compile(
        self, now: Any, store: PlanStore, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Make a call with no plan at hand: look for one, or compile."""
        with self._lock:
            signature, content, failed = None, None, None
            try:
                tokens, _, objects = describe_arguments(args, kwargs, lambda tensor: None)
                kind = now, without_numbers(tokens), *map(id, objects)
                signature = kind, tokens
                if len(self._known) > _MAX_KINDS:
                    self._known.clear()  # they will be looked for again
                misses = self._known.setdefault(kind, Misses())
                known = len(misses.contents) >= _MAX_CONTENTS or misses.calls >= _MAX_MISSES
                if not known:
                    misses.calls += 1
                    walked_model = self._walked_models.of(objects, is_between=self._is_between)
                    content = walked_model.digest, tokens
                    known = content in misses.contents
                if not known:
                    tokens, tensors, _ = describe_arguments(args, kwargs, walked_model.place)
                    abouts = self._abouts(walked_model.digest, now, tokens)
                    in_memory = (one.plan(abouts, walked_model) for one in self._in_memory_plans)
                    plan = next(filter(None, in_memory), None) or store.find(abouts, walked_model, tensors)
            except NoPlan as error:
                failed = error.with_traceback(None)
            except FxPassesError:
                raise
            except Exception as error:  # looking reads what the model holds, which may be anything
                log.warning("no plan: looking for one failed", exc_info=error)
                failed = NoPlan(f"an error while looking for a plan: {type(error).__name__}")
            if failed is not None:
                if signature is not None:
                    misses.contents.append(content)
                    self._compile_afresh(signature)
                return self._refuse_and_call(failed, store, args, kwargs)
            if known:
                return self._call_by_dynamo(args, kwargs)  # errors raised here are the model's
            if plan is not None and plan.can_run_on(tensors):
                misses.calls = 0
                walked_model.know(now, tokens, plan)
                if plan.file is not None:
                    self.plan_files[plan.file] = None
                self._has_graph = True
                self._had_plans[signature] = plan.file
                counters.count("plans_used")
                return self._call_plan(plan, tensors, args, kwargs)
            if _torch.stance_forbids_compiling():
                return self._refuse_and_call(NoPlan(_torch.STANCE_REASON), store, args, kwargs)
            misses.contents.append(content)
            refused = _SHARED if plan is not None or store.target(abouts[0]) is None else ""
            if refused or self._written[kind] >= _MAX_CONTENTS:
                return self._refuse_and_call(NoPlan(refused or _TOO_MANY), store, args, kwargs)
            self._walked_models.forget(walked_model)
            changed = ChangedNumbers.find(self._had_plans.get(signature), abouts, self.model, objects)
            if changed is None:
                self._compile_afresh(signature)
            return self._record(signature, tensors, objects, store, abouts, args, kwargs, changed)

    def _compile_afresh(self, signature: Any) -> None:
        """Force a retrace of this call, whatever Dynamo has cached, if it had a plan.

        The plan saw a change that Dynamo may not guard on, such as a replaced function of torch.
        """
        if signature in self._had_plans:
            del self._had_plans[signature]
            self._turn, self._from_torch = self._turn + 1, None
            vars(self).pop("_compiled", None)
            if not self._is_between:  # older cache entries would count against Dynamo's limit
                forget_compiled(self.model)

    def _compile_function(self, resumed: Callable[..., Any]) -> Compiled[Any]:
        """Compile a function with which a frame of the model resumes."""
        made = Compiled(
            resumed, self._options, self._plan_store, dynamic=self._dynamic, fullgraph=self._fullgraph
        )
        made.plan_files, made._is_between = self.plan_files, True
        made._walked_models.exchanged_entries = self._walked_models.exchanged_entries
        return made

    def _abouts(self, digest: list[Any], now: Any, tokens: Any) -> list[dict[str, Any]]:
        """All factors of the key, as JSON: for plans that fix sizes and numbers among the arguments, then for
        plans that leave them open."""
        about = {
            "surroundings": surroundings(), "options": describe_options(self._options), "dynamic": str(self._dynamic),
            "fullgraph": self._fullgraph, "model": digest[0], "objects": digest[1],
            "state": {name: str(value) for name, value in zip(STATE, now, strict=True)},
        }  # fmt: skip
        common, *given = json.loads(json.dumps([about, *description_variants(tokens)]))
        return [{**common, "arguments": one} for one in given]

    def _record(
        self,
        signature: Any,
        tensors: list[torch.Tensor],
        objects: list[Any],
        store: PlanStore,
        abouts: list[dict[str, Any]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        changed: ChangedNumbers | None,
    ) -> Any:
        # It imports Dynamo and Inductor, needed only now.
        from fxpasses.plans.recording.recording import Recording

        folder = cast("Callable[[dict[str, Any]], Path]", store.target)  # not None, as checked above
        known = weakref.ref(self)  # Dynamo's compiled code keeps the recording alive

        def done(path: Path | None, reason: str) -> None:
            if reason:
                counters.count_refused_plan(reason)
                log.info("no plan: %s", reason)
            elif path is not None:
                counters.count("plans_written")
                log.info("wrote plan %s", path)
            if (owner := known()) is not None:
                owner._note_outcome(path, reason, signature)

        def keep_in_memory(*held: Any) -> None:
            if (owner := known()) is not None:
                owner._in_memory_plans = [InMemoryPlan(*held), *owner._in_memory_plans][:_MAX_IN_MEMORY]

        recording = Recording(
            self.model,
            tensors,
            objects,
            folder,
            abouts,
            (args, kwargs),
            done,
            keep_in_memory,
            self.functions_between,
        )
        with recording.watching(), collect_runs() as runs:
            result = self._compiled(*args, **kwargs)
        again = None if changed is None or recording.has_graph else changed.write(runs, folder)
        if again is not None:
            recording.end(again, "")
            return result
        self._has_graph = self._has_graph or recording.has_graph
        self.has_no_graph = not self._has_graph
        recording.finish(result)
        return result

    def _note_outcome(self, path: Path | None, reason: str, signature: Any) -> None:
        self.why_no_plan = reason
        if reason:
            self.reasons_for_none[reason] = None
        if path is not None:
            self.plan_files[path] = None
            self._had_plans[signature] = path
            self._written[signature[0]] += 1
        if not reason:
            # Later calls are cheap too, even of other objects, for which Dynamo had nothing to compile.
            self._known.clear()


class CompiledContainer(Compiled[M]):
    """What :func:`compile` returns for a module with parts, such as ``nn.Sequential``. Its length and parts
    are the model's. A part is not compiled."""

    def __len__(self) -> int:
        return len(self.model)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.model)  # type: ignore[call-overload, no-any-return]

    def __getitem__(self, index: Any) -> Any:
        return self.model[index]  # type: ignore[index]


class CompiledFunction(Compiled[M]):
    """What a function is compiled to. As a class attribute it binds like a method."""

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def _wrapper_class(model: Any) -> type[Compiled[Any]]:
    if isinstance(model, types.FunctionType):
        return CompiledFunction
    container = isinstance(model, torch.nn.Module) and hasattr(type(model), "__getitem__")
    return CompiledContainer if container else Compiled


def _compiled_again(
    model: M, options: Mapping[str, Any], store: PlanStore | None, how: dict[str, Any]
) -> Compiled[M]:
    """Compile anew for a copy or a pickle, which copies the model."""
    return _wrapper_class(model)(model, options, store, **how)
