"""Plans of the forward pass alone, for calls with gradients on whose backward pass never ran.

If no gradient is requested, nothing is compiled for the backward pass, so there is nothing to write. Such a
plan runs the forward graph and saves its inputs. If a gradient is requested after all, the model is called
again in eager and its result is differentiated, as ``torch.utils.checkpoint`` does. The plan is then deleted:
the next call compiles, and its plan has both passes. Calls that might differ when repeated have no such plan.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fxpasses.plans import _torch
from fxpasses.plans._torch_hooks import without_hooks
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.replaced import are_named_still
from fxpasses.plans.results import builder, places_of_tensors, tensors_in
from fxpasses.plans.runtime import Once, check_backward
from fxpasses.plans.surroundings import STATE, state
from fxpasses.plans.walked_again import WalkedAgain

if TYPE_CHECKING:
    from fxpasses.plans.armed import Armed
    from fxpasses.plans.plan import Plan

_THREADS = "number of threads"
"""The part of torch's state that matters only to compiled code. It may differ where a backward pass runs."""
FORWARD_ALONE = "forward alone"
"""The kind of such a plan."""


class Waiting(Protocol):
    """Writes a plan once there is a backward pass."""

    def write_forward_alone(self) -> None:
        """Write a plan without a backward pass, for as long as there is none."""


_waiting: collections.deque[Waiting] = collections.deque()
"""The waiting writers of this process. They are kept, since a function that returned has dropped its model
and all that was compiled for it."""
_MOST_WAITING = 64


def wait(writer: Waiting) -> None:
    """Write a plan at process exit if no backward pass comes. If many wait, write that of the oldest now."""
    _waiting.append(writer)
    while len(_waiting) > _MOST_WAITING:
        _waiting.popleft().write_forward_alone()


def write_those_that_wait() -> None:
    """Write plans without a backward pass, since none has come so far. Also called at process exit."""
    while _waiting:
        _waiting.popleft().write_forward_alone()


class ForwardAlone:
    """The call of such a plan.

    Args:
        plan: the plan.
        content: the content of its file.
        forward: the compiled graph; takes a list, which it empties.
        armed: the model.
    """

    def __init__(
        self,
        plan: Plan,
        content: Mapping[str, Any],
        forward: Callable[[list[Any]], Sequence[Any]],
        armed: Armed,
    ) -> None:
        self._plan, self._armed, self._content = weakref.ref(plan), weakref.ref(armed), content
        self._state = content["about"]["state"]
        self._places = list(places_of_tensors(content["layout"]))
        self._given = builder(content["given"], ())
        self._apply = _autograd_function(content["facts"], content["inputs"], forward).apply

    def __call__(self, inputs: list[Any], arguments: Sequence[torch.Tensor]) -> Any:
        """Run the graph on ``inputs``. ``arguments`` are the tensors among the arguments of the call."""
        plan, armed = self._plan(), self._armed()
        assert plan is not None  # the plan makes this call
        assert armed is not None
        objects = armed.objects()

        def again(arguments: Sequence[torch.Tensor], inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
            self._ask_for_changes(armed, objects, inputs)
            plan.strike()
            return self._again(armed.model, [*arguments, *objects])

        with torch.enable_grad():
            return self._apply(again, arguments, *inputs)

    def _ask_for_changes(self, armed: Armed, objects: Sequence[Any], inputs: Sequence[Any]) -> None:
        try:
            now = {name: str(value) for name, value in zip(STATE, state(), strict=True)}
            differs = [name for name, value in self._state.items() if now[name] != value and name != _THREADS]
            if not differs and not self._is_as_it_was(armed, objects, inputs):
                differs = ["the model or what its code reads"]
        except NoPlan as error:
            differs = [error.reason]
        if differs:
            raise RuntimeError(
                f"{', '.join(differs)} has changed since a forward pass whose backward pass was not "
                "compiled: it is computed by a second call of the model. Run the backward pass before the change, or compile with cache='off'"
            )

    def _is_as_it_was(self, armed: Armed, objects: Sequence[Any], inputs: Sequence[Any]) -> bool:
        content, again = self._content, WalkedAgain()  # the watched walk fails for a change that was reverted
        walk, digest = again.over(armed.model, objects)
        if digest != armed.digest or not are_named_still(content["functions"]):
            return False
        gone_on = again.read(None, content["reads"], content["read"], walk, digest)
        places = enumerate(content["inputs"])
        return gone_on is not None and all(
            gone_on.tensors[source[1]] is inputs[i] for i, source in places if source[0] == "model"
        )

    def _again(self, model: Any, given: Sequence[Any]) -> dict[int, torch.Tensor]:
        args, kwargs = self._given((), given)  # containers as they were in the call
        with _torch.as_traced(), torch.random.fork_rng(devices=[]):  # for draws that nothing depends on
            found = tensors_in(_torch.call_in_eager(model)(*args, **kwargs))
        if len(found) != len(self._places):
            raise RuntimeError(
                "a second call of the model returned other things than the first: a forward pass whose backward pass was not "
                "compiled is differentiated by a second call; compile with cache='off'"
            )
        return {
            place[1]: tensor
            for place, tensor in zip(self._places, found, strict=True)
            if place[0] == "output"
        }


def _autograd_function(
    facts: Mapping[str, Any], sources: Sequence[Sequence[Any]], forward_: Callable[[list[Any]], Sequence[Any]]
) -> Any:
    returns: int = facts["returns"]
    constant = [i for i, differentiable in enumerate(facts["requires_grad"]) if not differentiable]
    unsafe_views: list[int] = facts["unsafe_views"]
    places = {i: source[1] for i, source in enumerate(sources) if source[0] == "argument"}

    class Forward(torch.autograd.Function):
        """The forward graph of a plan."""

        @staticmethod
        def forward(ctx: Any, again: Any, arguments: Any, *given: Any) -> tuple[Any, ...]:  # type: ignore[override]
            """Run it. Args: a function that calls the model again, the tensors among the call's arguments,
            and the graph's inputs."""
            ctx.again, ctx.arguments = again, len(arguments)
            ctx.save_for_backward(*arguments, *(value for value in given if isinstance(value, torch.Tensor)))
            ctx.are_tensors = [isinstance(value, torch.Tensor) for value in given]
            returned = list(forward_(list(given))[:returns])
            for i in unsafe_views:
                returned[i] = _torch.unsafe_view(returned[i], returned[i].shape)
            ctx.mark_non_differentiable(
                *(returned[i] for i in constant if isinstance(returned[i], torch.Tensor))
            )
            ctx.set_materialize_grads(False)
            return tuple(returned)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:  # type: ignore[override]
            kept = ctx.saved_tensors  # raises if one was mutated
            arguments, saved = list(map(_apart, kept[: ctx.arguments])), iter(kept[ctx.arguments :])
            inputs: list[Any] = [next(saved) if is_tensor else None for is_tensor in ctx.are_tensors]
            for i, place in places.items():
                inputs[i] = arguments[place]
            needed = [i for i, needs in enumerate(ctx.needs_input_grad[2:]) if needs]
            keeps = torch.is_grad_enabled()
            check_backward(None, donates=False)
            with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                outputs = ctx.again(arguments, inputs)
            asked = [(outputs[i], g) for i, g in enumerate(gradients) if g is not None and i in outputs]
            asked = [(output, gradient) for output, gradient in asked if output.requires_grad]
            by = [inputs[i] for i in needed]
            is_last = keeps and any(one is not other for one, other in zip(arguments, kept, strict=False))
            with without_hooks(by):  # hooks see the gradient of the whole call
                found = torch.autograd.grad(
                    [output for output, _ in asked],
                    by,
                    [gradient for _, gradient in asked],
                    create_graph=keeps and not is_last,
                    allow_unused=True,
                )
            result: list[Any] = [None] * (len(inputs) + 2)
            for i, gradient in zip(needed, found, strict=True):
                result[i + 2] = gradient
            if is_last:
                return Once.apply(lambda given: result, False, torch.empty(0, requires_grad=True))  # type: ignore[no-any-return]
            return tuple(result)

    return Forward


def _apart(argument: torch.Tensor) -> torch.Tensor:
    """Detach an argument from its history. Its source may be an input too, and gets its gradient later."""
    return argument if argument.is_leaf else argument.detach().requires_grad_(argument.requires_grad)
