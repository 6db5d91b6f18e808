"""``ShapeEnv``: torch's shape environment, with reasons for its decisions, minimal guards, and contracts.

It derives from torch's class and gives the same answers, so Dynamo, AOTAutograd, Inductor, ``make_fx`` and
export accept it. The additions run where torch records a decision, which is rare, not where it asks
questions.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ContextDecorator
from typing import Any

import torch

from fake.errors import ContractViolationError, ShapeEnvError, UnsupportedTorchVersionError
from fake.seam import symbolic_shapes as _t
from fake.seam.patches import LEDGER, SUPPORTED_VERSIONS, Edit, Patch, When, always, is_known_version
from fake.symbols.contract import (
    Contract,
    Dims,
    check,
    check_example,
    declare,
    mark_of,
    parse_dims,
    set_dynamic_sizes,
)
from fake.symbols.explain_guards import Explanation, explain
from fake.symbols.reasons import reason_now, record
from fake.symbols.shape_guards import CompiledGuards, Guards, guards_of, minimal_guards
from fake.symbols.terms import text_of_source


class GuardList(list[Any]):
    """An environment's guard records (torch appends to them), with methods to report them."""

    def __init__(self, shape_env: Any, records: Iterable[Any] = ()) -> None:
        super().__init__(records)
        self.shape_env = shape_env

    def minimal(self) -> Guards:
        """Return a minimal equivalent set of guards."""
        return guards_of(self.shape_env)

    def explain(self) -> Explanation:
        """Return, for each guard, the condition, why, who asked, and what would avoid it."""
        return explain(self.minimal())

    def compile(self, *, static: bool = True) -> CompiledGuards:
        """Return the minimal guards as one function of the inputs."""
        return self.minimal().compile(static=static)


class ShapeEnv(_t.TorchShapeEnv):
    """A shape environment that explains itself.

    Args:
        contracts: for inputs by name, the promises about their dimensions (see :class:`fake.Dim`).
        **settings: those of torch's class: ``duck_shape``, ``specialize_zero_one``,
            ``assume_static_by_default``, ...

    Attributes:
        guards: the records of decisions; ``guards.explain()``,
            ``guards.minimal()`` and ``guards.compile()`` report them.
        contract: the declarations.

    Raises:
        ContractError: ``contracts`` is invalid.

    >>> import torch, fake
    >>> env = fake.ShapeEnv(duck_shape=False)
    >>> mode = fake.FakeTensorMode(shape_env=env)
    >>> x = mode.from_tensor(torch.zeros(4, 6), name="x")
    >>> bool(x.shape[0] < x.shape[1])
    True
    >>> print(env.guards.minimal()[1])
    x.size(0) < x.size(1)
    """

    guards: GuardList
    contract: Contract

    def __init__(self, *, contracts: Mapping[str, Dims] | None = None, **settings: Any) -> None:
        contract = Contract(contracts)
        super().__init__(**settings)
        self._prepare(contract)

    def _prepare(self, contract: Contract) -> None:
        self.guards = GuardList(self, self.guards)
        self.contract = contract
        self._fake_inputs: list[tuple[Any, Any, Any, Any]] = []
        self._is_declaring = False

    @classmethod
    def adopt(cls, shape_env: Any) -> ShapeEnv:
        """Turn an environment of torch's into one of ours, in place: symbols, guards and ranges stay,
        for both sides.

        Code that holds the environment (Dynamo, which made it and asks it for guards at the end) keeps using
        the same object, so no guard is lost either way.

        Raises:
            ShapeEnvError: its class is not torch's own, or it records its events for replay.
        """
        if isinstance(shape_env, ShapeEnv):
            return shape_env
        if type(shape_env) is not _t.TorchShapeEnv:
            raise ShapeEnvError(f"cannot adopt {type(shape_env).__name__}: it is not torch's own ShapeEnv")
        if shape_env.should_record_events:
            raise ShapeEnvError("cannot adopt an environment that records its events for replay")
        adopted: Any = shape_env
        adopted.__class__ = cls
        adopted._prepare(Contract())
        return adopted

    def _log_guard(self, prefix: str, g: Any, forcing_spec: bool) -> None:
        if "suppressed" not in prefix:
            kind = "declared" if self._is_declaring else "assertion" if "assert" in prefix else "guard"
            record(self, reason_now(g, kind))
        super()._log_guard(prefix, g, forcing_spec)

    def _create_symbolic_sizes_strides_storage_offset(
        self,
        ex_size: Any,
        ex_stride: Any,
        ex_storage_offset: Any,
        is_dim_dynamic: Any,
        source: Any,
        **options: Any,
    ) -> Any:
        dims = parse_dims(self.contract.of(source), source.name, len(ex_size))
        check_example(self.contract, source, ex_size, dims)
        context = options.get("symbolic_context")
        if dims and context is not None:
            set_dynamic_sizes(context, dims)
        made = super()._create_symbolic_sizes_strides_storage_offset(
            ex_size, ex_stride, ex_storage_offset, is_dim_dynamic, source, **options
        )
        self._fake_inputs.append((source, *made))
        if dims:
            self._is_declaring = True
            try:
                declare(self, self.contract, source, ex_size, made[0], dims)
            finally:
                self._is_declaring = False
        return made

    def simplify(self, expr: Any, *args: Any, **options: Any) -> Any:  # type: ignore[override]
        """Fix torch's method, which replaces ``int(a / b)`` by ``a // b``:
        these differ for negative non-integer quotients."""
        functions = _t.sympy_functions
        truncated = (t.args[0] for t in expr.atoms(functions.TruncToInt))
        floats = {
            quotient: functions.FloatTrueDiv(*map(functions.ToFloat, quotient.args))
            for quotient in truncated
            if self._may_be_negative(quotient)
        }
        return super().simplify(expr.xreplace(floats) if floats else expr, *args, **options)

    def _may_be_negative(self, quotient: Any) -> bool:
        """Return whether this is the quotient of two integers that may have different signs."""
        if not isinstance(quotient, _t.sympy_functions.IntTrueDiv):
            return False
        above, below = (self.bound_sympy(self.replace(part)) for part in quotient.args)
        return not (above.lower >= 0 and below.lower > 0)

    def _simplify_floor_div(self, expr: Any) -> Any:  # type: ignore[override]
        """Avoid torch's check whether divisions inside a floor leave a remainder:
        it fails for negative numbers."""
        if any(
            not (
                self.bound_sympy(division.args[0]).lower >= 0 and self.bound_sympy(division.args[1]).lower > 0
            )
            for division in expr.atoms(_t.FloorDiv)
        ):
            return self.simplify(expr)
        return super()._simplify_floor_div(expr)

    def _maybe_evaluate_static(  # type: ignore[override]
        self, expr: Any, *, unbacked_only: bool = False, **options: Any
    ) -> Any:
        """Fix torch's method in two cases. If sympy's recursion ends without an answer, a call that only
        simplifies returns the expression, not None. If sympy cannot compare ranges
        (``TruncToInt(ToFloat(0.0))``, a zero converted to float twice, is no number to it), there is no
        answer."""
        try:
            known = super()._maybe_evaluate_static(expr, unbacked_only=unbacked_only, **options)
        except TypeError as error:
            if "truth value of Relational" not in str(error):
                raise
            known = None
        return expr if known is None and unbacked_only else known

    # torch clears its method's cache when assertions change.
    _maybe_evaluate_static.cache_clear = _t.TorchShapeEnv._maybe_evaluate_static.cache_clear  # type: ignore[attr-defined]

    def declare(self, name: str, dims: Dims) -> None:
        """Declare promises about the dimensions of an input, before it is seen.

        Args:
            name: the input in the user's terms, such as ``"x"``.
            dims: its dimensions.

        Raises:
            ContractError: ``dims`` is invalid.
        """
        self.contract.add(name, dims)

    def check_contracts(self) -> None:
        """Compare what the program has forced with what was declared.

        Raises:
            ContractViolationError: the graph does not support all sizes that a contract allows.
        """
        check(self, self.contract)

    def explain(self) -> Explanation:
        """Return ``guards.explain()``."""
        return self.guards.explain()

    def produce_guards_verbose(self, placeholders: Any, sources: Any, *args: Any, **options: Any) -> Any:
        """Check contracts first, then produce the minimal guards;
        Dynamo calls this for the guards that it checks.

        Raises:
            ContractViolationError: a contract is violated.
        """
        self.check_contracts()
        # torch adds guards along the way if inputs are declared equal (export): then it has to issue its own.
        if (
            options.get("guards") is None
            and options.get("equalities_inputs") is None
            and not self._translation_validation_enabled
        ):
            options["guards"] = minimal_guards(self)
        return super().produce_guards_verbose(placeholders, sources, *args, **options)


class _ContractViolationFilter(logging.Filter):
    """Keeps torch from logging a contract violation, with all its frames, above the error that reports it."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not isinstance(sys.exc_info()[1], ContractViolationError)


class _ShapeEnvSwitch:
    """Promises about inputs for torch's tracers while they create their environments here, innermost last."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._stack: list[tuple[Mapping[str, Dims], list[set[str]]]] = []
        """For each block, the promises, and for each environment created in it, the names of its inputs."""

    def on(self, contracts: Mapping[str, Dims] | None) -> None:
        promised = Contract(contracts).by_input  # raises early
        if not is_known_version():  # torch's own environments would silently ignore contracts
            raise UnsupportedTorchVersionError(
                "fake.using_shape_env()", torch.__version__, SUPPORTED_VERSIONS
            )
        with self._lock:
            LEDGER.enter(*PATCHES)
            self._stack.append((promised, []))

    def off(self) -> None:
        with self._lock:
            if not self._stack:
                return
            promised, inputs = self._stack.pop()
            LEDGER.leave(*PATCHES)
        seen = set().union(*inputs)
        if unseen := [name for name in promised if seen and name not in seen]:
            warnings.warn(
                f"using_shape_env: contracts for {', '.join(unseen)}, and no input had such a name: these were {', '.join(sorted(seen))}",
                stacklevel=3,
            )

    @property
    def is_on(self) -> bool:
        return bool(self._stack)

    def make(self, **settings: Any) -> ShapeEnv:
        """Create an environment, called by Dynamo and export in place of torch's class."""
        contracts, inputs = self._stack[-1] if self._stack else ({}, [])
        made = ShapeEnv(contracts=contracts, **settings)
        inputs.append(made.contract.inputs)
        return made


def _declaring_wrapper(wrap: Callable[..., Any]) -> Callable[..., Any]:
    def wrap_and_declare(e: Any, tx: Any, **options: Any) -> Any:
        marked = mark_of(e)
        shape_env = tx.output.shape_env
        if marked and options.get("source") is not None and isinstance(shape_env, ShapeEnv):
            shape_env.declare(text_of_source(options["source"]), marked)
        return wrap(e, tx, **options)

    return wrap_and_declare


def _add_log_filter() -> Callable[[], None]:
    log_filter = _ContractViolationFilter()
    _t.guards_log.addFilter(log_filter)
    return lambda: _t.guards_log.removeFilter(log_filter)


_SWITCH = _ShapeEnvSwitch()
_LOST = "contracts, minimal guards and their reasons in what torch.compile and torch.export trace"

PATCHES = LEDGER.add(
    Patch(_t.dynamo_output_graph, "ShapeEnv", always(_SWITCH.make), when=When.COMPILATION, lost=_LOST),
    Patch(_t.export_non_strict, "ShapeEnv", always(_SWITCH.make), when=When.COMPILATION, lost=_LOST),
    Patch(
        _t.dynamo_builder,
        "wrap_to_fake_tensor_and_record",
        _declaring_wrapper,
        when=When.COMPILATION,
        lost="contracts that were put on tensors with fake.mark_dynamic",
    ),
    Edit(
        "the logger torch._guards: no line for a broken contract, which is raised",
        _add_log_filter,
        when=When.COMPILATION,
        lost="nothing but quiet",
    ),
)


class using_shape_env(ContextDecorator):
    """Make ``torch.compile`` and ``torch.export`` trace with this package's
    :class:`ShapeEnv` inside the block.

    Their guards are minimal and know who asked for them, and contracts are checked: those given here, by the
    names of inputs, and those put on tensors with :func:`fake.mark_dynamic`. It is process-wide, and can be
    nested. At the end, a warning lists names that no input of the traced programs had.

    Args:
        contracts: for inputs by name, the promises about their dimensions.

    Raises:
        ContractError: ``contracts`` is invalid (on entry).
        UnsupportedTorchVersionError: this release of torch is not supported (on entry).

    >>> import torch, fake
    >>> def f(x):
    ...     return x * 2
    >>> with fake.using_shape_env(contracts={"x": {0: fake.Dim("batch", max=64)}}):
    ...     y = torch.compile(f, backend="eager")(torch.ones(8, 3))
    """

    def __init__(self, contracts: Mapping[str, Dims] | None = None) -> None:
        self.contracts = contracts

    def __enter__(self) -> using_shape_env:
        _SWITCH.on(self.contracts)
        return self

    def __exit__(self, *_: object) -> None:
        _SWITCH.off()

    @staticmethod
    def is_enabled() -> bool:
        """Return whether torch currently uses our environments."""
        return _SWITCH.is_on
