"""Plans of calls with gradients on whose backward pass never ran: of the forward pass alone.

Where nobody asks for a gradient nothing is compiled for the backward pass, and there is nothing of it to write. Such a plan runs the forward graph and keeps
its inputs. Is a gradient asked for after all, the model is called once more, in eager, and what it returns is differentiated, as ``torch.utils.checkpoint`` does
it; the plan is gone then, so that the next call is compiled, and its plan has both passes. Calls that would not be the same a second time have no such plan.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fxpasses.plans import _torch
from fxpasses.plans.results import places_of_tensors, tensors_in
from fxpasses.plans.surroundings import STATE, state

if TYPE_CHECKING:
    from fxpasses.plans.armed import Armed
    from fxpasses.plans.plan import Plan

FORWARD_ALONE = "forward alone"
"""The kind of such a plan."""


class Waiting(Protocol):
    """What will write a plan once there is a backward pass."""

    def write_forward_alone(self) -> None:
        """Write one without, for as long as there is none."""


waiting = weakref.WeakValueDictionary[int, Waiting]()
"""Those of this process, by ``id``."""


def write_those_that_wait() -> None:
    """No backward pass has come so far: write plans without. Called at the end of the process, too."""
    for one in list(waiting.values()):
        one.write_forward_alone()


class ForwardAlone:
    """The call of such a plan.

    Args:
        plan: the plan.
        content: what its file says.
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
        self._plan, self._armed = weakref.ref(plan), weakref.ref(armed)
        self._state = content["about"]["state"]
        self._places = list(places_of_tensors(content["layout"]))
        self._apply = _autograd_function(content["facts"], forward).apply

    def __call__(self, inputs: list[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The outputs of the graph. Args: its inputs, and the arguments of the call."""
        plan, armed = self._plan(), self._armed()
        assert plan is not None  # whose call this is
        assert armed is not None

        def again() -> dict[int, torch.Tensor]:
            return self._again(plan, armed, args, kwargs)

        with torch.enable_grad():
            return self._apply(again, *inputs)

    def _again(
        self, plan: Plan, armed: Armed, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> dict[int, torch.Tensor]:
        now = {name: str(value) for name, value in zip(STATE, state(), strict=True)}
        if now != self._state or not armed.holds() or not plan.is_as_it_was():
            differs = ", ".join(name for name, value in self._state.items() if now[name] != value)
            raise RuntimeError(
                f"{differs or 'the model or what its code reads'} has changed since a forward pass whose backward pass was not compiled: "
                "it is computed by a second call of the model. Run the backward pass before the change, or compile with cache='off'"
            )
        plan.strike()
        found = tensors_in(armed.model(*args, **kwargs))
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


def _autograd_function(facts: Mapping[str, Any], forward_: Callable[[list[Any]], Sequence[Any]]) -> Any:
    returns: int = facts["returns"]
    constant = [i for i, differentiable in enumerate(facts["requires_grad"]) if not differentiable]
    unsafe_views: list[int] = facts["unsafe_views"]

    class Forward(torch.autograd.Function):
        """The forward graph of a plan."""

        @staticmethod
        def forward(ctx: Any, again: Any, *given: Any) -> tuple[Any, ...]:  # type: ignore[override]
            ctx.again = again
            ctx.save_for_backward(*(value for value in given if isinstance(value, torch.Tensor)))
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
            saved = iter(ctx.saved_tensors)  # raises where one was changed
            inputs: list[Any] = [next(saved) if is_tensor else None for is_tensor in ctx.are_tensors]
            needed = [i for i, needs in enumerate(ctx.needs_input_grad[1:]) if needs]
            keep = torch.is_grad_enabled()
            with torch.enable_grad():
                outputs = ctx.again()
            asked = [(outputs[i], g) for i, g in enumerate(gradients) if g is not None and i in outputs]
            asked = [(output, gradient) for output, gradient in asked if output.requires_grad]
            found = torch.autograd.grad(
                [output for output, _ in asked],
                [inputs[i] for i in needed],
                [gradient for _, gradient in asked],
                create_graph=keep,
                allow_unused=True,
            )
            result: list[Any] = [None] * (len(inputs) + 1)
            for i, gradient in zip(needed, found, strict=True):
                result[i + 1] = gradient
            return tuple(result)

    return Forward
