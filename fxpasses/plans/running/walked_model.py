"""A walked model with the plans that hold for it, found by checking only what may have changed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fxpasses.plans import _torch
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.graph_breaks.between import Functions
from fxpasses.plans.inputs.arguments import SameArguments, describe_arguments, without_sizes
from fxpasses.plans.inputs.exchanged import Exchanged, Place, PlaceKey, key_of
from fxpasses.plans.inputs.given_numbers import GivenNumbers, without_given_numbers
from fxpasses.plans.objects.references import reference_to
from fxpasses.plans.running.plan import CheckedWalk, Plan, exchanged_elsewhere
from fxpasses.plans.walks.reusable_walks import ReusableWalks
from fxpasses.plans.walks.walk import Walk


class WalkedModel(CheckedWalk):
    """A walk over the model and the objects among its arguments, with plans that hold until a change."""

    def __init__(
        self,
        model: Any,
        objects: Sequence[Any],
        walk: Walk,
        digest: list[Any],
        functions: Functions,
        given: GivenNumbers,
        exchanged_entries: set[PlaceKey],
        reusable_walks: ReusableWalks,
    ) -> None:
        """Args: what was walked, the walk and its digests, the functions between the model's graphs, the
        numbers of a call, where functions of the model put other tensors, and the walks over what plans
        read."""
        super().__init__(walk, walk.tensors)
        self.model, self.walk, self.digest, self.functions = model, walk, digest, functions
        self.given, self.exchanged_entries, self.reusable_walks = given, exchanged_entries, reusable_walks
        weak_self = weakref.ref(self)

        def on_collected(reference: Any) -> None:
            if (walked_model := weak_self()) is not None:
                walked_model._drop_all()

        self._objects = [reference_to(value, on_collected) for value in objects]
        self._plans: dict[Any, list[Plan]] = {}
        self._general_plans: dict[tuple[bool, bool], dict[Any, list[Plan]]] = {}
        self._exchanged: Exchanged | None = None
        self._quick: list[tuple[_torch.SameState, SameArguments, Plan]] = []
        self._places = {id(tensor): i for i, tensor in enumerate(walk.tensors)}

    def quick_call(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Plan, list[torch.Tensor]] | None:
        """Like :meth:`call`, for arguments that can be compared quickly."""
        is_checked = False
        for state, same, plan in self._quick:
            if state.holds() and (tensors := same.tensors(args, kwargs)) is not None:
                is_checked = is_checked or self.holds()
                if not is_checked:
                    return None
                if plan.holds() and plan.can_run_on(tensors):
                    return plan, tensors
        return None

    def call(
        self, now: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Plan, list[torch.Tensor]] | None:
        """The plan of a call and the tensors among its arguments, if one is known and nothing has changed.

        Args:
            now: the state of torch.
            args: the positional arguments.
            kwargs: the keyword arguments.

        Raises:
            NoPlan: an argument is of a kind that plans do not support.
        """
        tokens, tensors, objects = describe_arguments(args, kwargs, self.place)
        if not self.has_objects(objects):
            return None
        plans = (*self._plans.get((now, tokens), ()), *self._general_plans_for(now, tokens, tensors))
        if not plans or not self.holds():
            return None
        known = next((plan for plan in plans if plan.holds() and plan.can_run_on(tensors)), None)
        if known is None:
            return None
        if (
            len(self._quick) < _MAX_QUICK
            and not known.reads_bases
            and SameArguments.can_compare(args, kwargs, tensors, objects)
            and all(self.place(tensor) is None for tensor in tensors)
        ):
            same = SameArguments(args, kwargs, tensors, objects, self.walk.tensors, known.open)
            self._quick.append((_torch.SameState(), same, known))
        return known, tensors

    def _general_plans_for(self, now: Any, tokens: Any, tensors: Sequence[torch.Tensor]) -> Iterator[Plan]:
        for serves, known in self._general_plans.items():
            plans = known.get((now, _generalized(tokens, *serves)), ())
            yield from (plan for plan in plans if plan.reads_model_numbers or plan.accepts(tensors))

    def exchange(self, places: Mapping[int, Place]) -> None:
        """Let a plan check the tensors in some places. Other plans, which took them for part of the model,
        are dropped.

        Args:
            places: where they are, by the tensors' numbers in the model.
        """
        for known in (self._quick, self._plans, self._general_plans):
            known.clear()
        self.walk.exchanged |= places
        kept = [tensor for i, tensor in enumerate(self.walk.tensors) if i not in self.walk.exchanged]
        self._release(places, kept)
        self._places = {
            id(tensor): number
            for number, tensor in enumerate(self.walk.tensors)
            if number not in self.walk.exchanged
        }
        self._exchanged = Exchanged(self.walk.exchanged, self.walk.tensors)

    def is_current(self) -> bool:
        """Whether a new walk would find the same, including the kind of tensors that plans exchange."""
        return self.holds() and (self._exchanged is None or self._exchanged.hold())

    def know(self, now: Any, tokens: Any, plan: Plan) -> None:
        """Keep a plan for later calls.

        Args:
            now: the surroundings that it was made in.
            tokens: of the arguments that it was made for.
            plan: the plan.
        """
        self.exchanged_entries.update(map(key_of, plan.exchanged_places))
        if plan.exchanges.keys() - self.walk.exchanged.keys():
            self.exchange(plan.exchanges)
        known = self._general_plans.setdefault(plan.serves, {}) if any(plan.serves) else self._plans
        plans = known.setdefault((now, _generalized(tokens, *plan.serves)), [])
        others = [one for one in plans if one.file is None or one.file != plan.file]
        kept = [plan, *others][:_MAX_QUICK]
        gone = [one for one in plans if one not in kept]
        self._quick = [quick for quick in self._quick if quick[2] not in gone]
        plans[:] = kept

    def has_objects(self, objects: Sequence[Any]) -> bool:
        """Whether these are the objects that were walked."""
        return len(objects) == len(self._objects) and all(
            value is known() for value, known in zip(objects, self._objects, strict=True)
        )

    def objects(self) -> list[Any]:
        """The objects; None for each that is gone."""
        return [known() for known in self._objects]

    def _drop_all(self) -> None:
        """Drop everything once an object is gone. Another object may get its ``id``."""
        for known in (self._quick, self._plans, self._general_plans, self._places):
            known.clear()
        self.walk = Walk(leaves_open=True)
        super().__init__(self.walk, ())

    def place(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor in the model, or None."""
        return self._places.get(id(tensor))


def _generalized(tokens: Any, sizes: bool, numbers: bool) -> Any:
    """A description of arguments without what a plan leaves open."""
    tokens = without_sizes(tokens) if sizes else tokens
    return without_given_numbers(tokens) if numbers else tokens


def description_variants(tokens: Any) -> list[Any]:
    """A description of arguments in four variants: full, without sizes, without numbers, and without both."""
    return [_generalized(tokens, sizes, numbers) for numbers in (False, True) for sizes in (False, True)]


_MAX_QUICK = 8
"""The limit on kinds of arguments, and on plans for one kind, that are compared one by one."""


class WalkedModels:
    """A model with the objects among the arguments of its last calls.

    Args:
        model: the model.
        functions: those between its graphs.

    Attributes:
        known: the last ones.
        calls: how often the model was called.
        given: the numbers among the arguments of a call.
        exchanged_entries: where functions of the model put other tensors, shared with the functions between its
            graphs.
    """

    def __init__(self, model: Any, functions: Functions) -> None:
        self.known: list[WalkedModel] = []
        self.calls = 0
        self.given = GivenNumbers()
        self.exchanged_entries = set[PlaceKey]()
        self._reusable_walks = ReusableWalks()
        self._model, self._functions = model, functions
        self._new_objects = 0

    def forget(self, walked_model: WalkedModel) -> None:
        """Drop ``walked_model``, which is about to change."""
        self.known = [one for one in self.known if one is not walked_model]

    def of(self, objects: list[Any], *, is_between: bool) -> WalkedModel:
        """A walk over the model and these objects that holds now.

        Args:
            objects: those among the arguments of a call.
            is_between: whether the model is a function between graphs of another one.

        Returns:
            The walk, which may come from an earlier call.

        Raises:
            NoPlan: they hold something that cannot be walked, or most calls pass new objects.
        """
        known = next((walked_model for walked_model in self.known if walked_model.has_objects(objects)), None)
        if known is not None and known.is_current():
            return known
        is_new = known is None
        self.known = [walked_model for walked_model in self.known if walked_model is not known]
        del known  # it keeps alive what the model may have dropped and refers to weakly
        is_layer = is_between and all(isinstance(value, torch.nn.Module) for value in objects)
        if is_new and objects and not is_layer:
            self._new_objects += 1
            if self._new_objects > _MAX_FREE_WALKS and self.calls < _CALLS_PER_NEW_OBJECT * self._new_objects:
                raise NoPlan("arguments that are other objects in each call")
        walk, digest = self._reusable_walks.walk_call(self._model, objects)
        parts = self._functions, self.given, self.exchanged_entries, self._reusable_walks
        made = WalkedModel(self._model, objects, walk, digest, *parts)
        if places := exchanged_elsewhere(walk, self.exchanged_entries):
            made.exchange(places)
        self.known = [made, *self.known][: _MAX_LAYER_WALKS if is_layer else _MAX_WALKS]
        return made


_MAX_WALKS = 4
"""How many combinations of a model and objects among its arguments are watched at a time."""
_MAX_LAYER_WALKS = 64
"""The same for a function between graphs whose objects are modules: all layers of the model may share it."""
_MAX_FREE_WALKS = 32
"""How many new objects are walked unconditionally."""
_CALLS_PER_NEW_OBJECT = 8
"""How many calls each further new object needs, such as the cache of a request. A walk takes milliseconds,
and so do these calls without a plan."""
