"""The registry of rules: maps each operator to the rule that answers for it.

A *rule* is a function ``rule(mode, func, args, kwargs)`` that returns what eager would return for ``func``,
as fake tensors of ``mode``. An engine calls :func:`find` after constant folding and the conversion of real
inputs, and before decompositions and meta kernels. ``mode`` itself is off the mode stack then; a rule enters
``with mode:`` to call other operators. If a rule returns ``NotImplemented``, the engine continues as if there
were no rule.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

from fake.seam.dispatch import OpOverload
from fake.seam.fake_tensor import FakeTensorMode

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
"""The positional and keyword arguments of a call."""


class Rule(Protocol):
    """A function that answers for one operator or one family of operators.

    Args:
        mode: the mode whose fake tensors are returned; it is off the mode stack.
        func: the overload that is called.
        args: its positional arguments; tensors are fake tensors of ``mode``.
        kwargs: its keyword arguments.

    Returns:
        The outputs, or ``NotImplemented``.
    """

    __name__: str

    def __call__(self, mode: FakeTensorMode, func: OpOverload, args: Args, kwargs: Kwargs, /) -> Any: ...


class _Registry:
    """Rules by operator name, then rules for families by predicate. Lookups are cached."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_name: dict[str, Rule] = {}
        self._for_sparse: set[str] = set()
        self._families: list[tuple[Callable[[OpOverload], bool], Rule]] = []
        self._found: dict[OpOverload, Rule | None] = {}
        self._listeners: list[Callable[[], None]] = []

    def rule(self, *names: str, sparse: bool = False) -> Callable[[Rule], Rule]:
        """Register a rule for operators by full names, such as ``"aten::cat"`` or ``"aten::sort.stable"``.

        Operators are given by name, not as overload objects, so that a name may be missing from this release
        of torch. With ``sparse``, the rule handles tensors of any layout; other rules see strided tensors
        only.

        Raises:
            ValueError: an operator already has a rule.
        """

        def register(rule: Rule) -> Rule:
            with self._lock:
                for name in names:
                    if name in self._by_name:
                        raise ValueError(
                            f"{name} has two rules: {self._by_name[name].__name__}, {rule.__name__}"
                        )
                    self._by_name[name] = rule
                if sparse:
                    self._for_sparse.update(names)
            return self._changed(rule)

        return register

    def rule_when(self, predicate: Callable[[OpOverload], bool]) -> Callable[[Rule], Rule]:
        """Register a rule for every operator that ``predicate`` accepts and that has no rule by name.

        Predicates are tried in the order of registration. The result must depend only on the operator.
        """

        def register(rule: Rule) -> Rule:
            with self._lock:
                self._families.append((predicate, rule))
            return self._changed(rule)

        return register

    def _changed(self, rule: Rule) -> Rule:
        self._found.clear()
        for listener in self._listeners:
            listener()
        return rule

    def when_rules_change(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` whenever a rule is registered from now on: earlier answers may be out of date."""
        self._listeners.append(listener)

    def find(self, func: OpOverload) -> Rule | None:
        """Return the rule that answers for ``func``, or ``None``.

        >>> import torch, fake.kernels
        >>> fake.kernels.find(torch.ops.aten.copysign.Tensor).__name__
        'structured'
        >>> fake.kernels.find(torch.ops.aten.unsqueeze.default) is None
        True
        """
        try:
            return self._found[func]
        except KeyError:
            pass
        with self._lock:
            found = self._by_name.get(func.name()) if isinstance(func, OpOverload) else None
            if found is None and isinstance(func, OpOverload):
                found = next((rule for matches, rule in self._families if matches(func)), None)
            self._found[func] = found
        return found

    def takes_sparse(self, func: OpOverload) -> bool:
        """Return whether the operator's rule also handles sparse arguments.

        >>> import torch, fake.kernels
        >>> fake.kernels.takes_sparse(torch.ops.aten.mm.default), fake.kernels.takes_sparse(torch.ops.aten.sort.default)
        (True, False)
        """
        return func.name() in self._for_sparse

    def rules(self) -> dict[str, Rule]:
        """Return all rules that are registered by name."""
        with self._lock:
            return dict(self._by_name)


_registry = _Registry()
rule, rule_when, when_rules_change = _registry.rule, _registry.rule_when, _registry.when_rules_change
find, takes_sparse, rules = _registry.find, _registry.takes_sparse, _registry.rules
