"""Plans of the forward pass alone, for calls with gradients on whose backward pass never ran.

If no gradient is requested, nothing is compiled for the backward pass, so there is nothing to write. Such a
plan runs the forward graph and saves its inputs. If a gradient is requested after all, the model is called
again in eager and its result is differentiated, as ``torch.utils.checkpoint`` does. The plan is then deleted:
the next call compiles, and its plan has both passes. Calls that might differ when repeated have no such plan.
"""

from __future__ import annotations

import collections
import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fake.seam.dispatch import DisableAutocast
from fxpasses.plans import _torch
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.inputs.surroundings import STATE, state
from fxpasses.plans.running._torch_hooks import without_hooks
from fxpasses.plans.running.runtime import NoDoubleBackward, check_backward
from fxpasses.plans.walks.replaced import are_functions_unchanged
from fxpasses.plans.walks.results import places_of_tensors, result_builder, tensors_in
from fxpasses.plans.walks.reusable_walks import ReusableWalks

if TYPE_CHECKING:
    from fxpasses.plans.running.plan import Plan
    from fxpasses.plans.running.walked_model import WalkedModel

_THREADS = "number of threads"
"""The part of torch's state that matters only to compiled code. It may differ where a backward pass runs."""
FORWARD_ALONE = "forward alone"
"""The kind of such a plan."""


class DeferredWriter(Protocol):
    """Writes a plan once there is a backward pass."""

    def write_forward_alone(self) -> None:
        """Write a plan without a backward pass, for as long as there is none."""


_deferred: collections.deque[DeferredWriter] = collections.deque()
"""The waiting writers of this process. They are kept, since a function that returned has dropped its model
and all that was compiled for it."""
_MAX_DEFERRED = 64


def defer_write(writer: DeferredWriter) -> None:
    """Write a plan at process exit if no backward pass comes. If many wait, write that of the oldest now."""
    _deferred.append(writer)
    while len(_deferred) > _MAX_DEFERRED:
        _deferred.popleft().write_forward_alone()


def write_deferred_plans() -> None:
    """Write plans without a backward pass, since none has come so far. Also called at process exit."""
    while _deferred:
        _deferred.popleft().write_forward_alone()


class ForwardAlone:
    """The call of such a plan.

    Args:
        plan: the plan.
        content: the content of its file.
        forward: the compiled graph; takes a list, which it empties.
        walked_model: the model.
    """

    def __init__(
        self,
        plan: Plan,
        content: Mapping[str, Any],
        forward: Callable[[list[Any]], Sequence[Any]],
        walked_model: WalkedModel,
    ) -> None:
        self._plan, self._walked_model, self._content = weakref.ref(plan), weakref.ref(walked_model), content
        self._state = content["about"]["state"]
        self._places = list(places_of_tensors(content["layout"]))
        self._build_arguments = result_builder(content["given"], ())
        self._apply = _autograd_function(content["facts"], content["inputs"], forward).apply

    def __call__(self, inputs: list[Any], arguments: Sequence[torch.Tensor]) -> Any:
        """Run the graph on ``inputs``. ``arguments`` are the tensors among the arguments of the call."""
        plan, walked_model = self._plan(), self._walked_model()
        assert plan is not None  # the plan makes this call
        assert walked_model is not None
        objects = walked_model.objects()

        def rerun(arguments: Sequence[torch.Tensor], inputs: Sequence[Any]) -> dict[int, torch.Tensor]:
            self._check_unchanged(walked_model, objects, inputs)
            plan.strike()
            return self._rerun(walked_model.model, [*arguments, *objects])

        with torch.enable_grad():
            return self._apply(rerun, arguments, *inputs)

    def _check_unchanged(
        self, walked_model: WalkedModel, objects: Sequence[Any], inputs: Sequence[Any]
    ) -> None:
        try:
            now = {name: str(value) for name, value in zip(STATE, state(), strict=True)}
            differs = [name for name, value in self._state.items() if now[name] != value and name != _THREADS]
            if not differs and not self._is_unchanged(walked_model, objects, inputs):
                differs = ["the model or what its code reads"]
        except NoPlan as error:
            differs = [error.reason]
        if differs:
            raise RuntimeError(
                f"{', '.join(differs)} has changed since a forward pass whose backward pass was not "
                "compiled: it is computed by a second call of the model. Run the backward pass before the change, or compile with cache='off'"
            )

    def _is_unchanged(self, walked_model: WalkedModel, objects: Sequence[Any], inputs: Sequence[Any]) -> bool:
        content, again = (
            self._content,
            ReusableWalks(),
        )  # the watched walk fails for a change that was reverted
        walk, digest = again.walk_call(walked_model.model, objects)
        if digest != walked_model.digest or not are_functions_unchanged(content["functions"]):
            return False
        continued = again.continue_over_reads(None, content["reads"], content["read"], walk, digest)
        places = enumerate(content["inputs"])
        return continued is not None and all(
            continued.tensors[source[1]] is inputs[i] for i, source in places if source[0] == "model"
        )

    def _rerun(self, model: Any, given: Sequence[Any]) -> dict[int, torch.Tensor]:
        args, kwargs = self._build_arguments((), given)  # containers as they were in the call
        with (
            _torch.compile_session_context(),
            torch.random.fork_rng(devices=[]),
        ):  # for draws that nothing depends on
            found = tensors_in(_torch.eager_callable(model)(*args, **kwargs))
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
        def forward(ctx: Any, rerun: Any, arguments: Any, *given: Any) -> tuple[Any, ...]:  # type: ignore[override]
            """Run it. Args: a function that calls the model again, the tensors among the call's arguments,
            and the graph's inputs."""
            ctx.rerun, ctx.arguments, ctx.autocast = rerun, len(arguments), _autocast_state()
            ctx.save_for_backward(*arguments, *(value for value in given if isinstance(value, torch.Tensor)))
            ctx.are_tensors = [isinstance(value, torch.Tensor) for value in given]
            with DisableAutocast():  # the graph has its casts
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
            arguments, saved = list(map(_detach_non_leaf, kept[: ctx.arguments])), iter(kept[ctx.arguments :])
            inputs: list[Any] = [next(saved) if is_tensor else None for is_tensor in ctx.are_tensors]
            for i, place in places.items():
                inputs[i] = arguments[place]
            needed = [i for i, needs in enumerate(ctx.needs_input_grad[2:]) if needs]
            create_graph = torch.is_grad_enabled()
            check_backward(None, donates=False)
            with torch.enable_grad(), contextlib.ExitStack() as stack:
                for autocast in ctx.autocast:
                    stack.enter_context(torch.autocast(*autocast))
                outputs = ctx.rerun(arguments, inputs)
            pairs = [(outputs[i], g) for i, g in enumerate(gradients) if g is not None and i in outputs]
            pairs = [(output, gradient) for output, gradient in pairs if output.requires_grad]
            needed_inputs = [inputs[i] for i in needed]
            is_last = create_graph and any(
                one is not other for one, other in zip(arguments, kept, strict=False)
            )
            with without_hooks(needed_inputs):  # hooks see the gradient of the whole call
                found = torch.autograd.grad(
                    [output for output, _ in pairs],
                    needed_inputs,
                    [gradient for _, gradient in pairs],
                    create_graph=create_graph and not is_last,
                    allow_unused=True,
                )
            result: list[Any] = [None] * (len(inputs) + 2)
            for i, gradient in zip(needed, found, strict=True):
                result[i + 2] = gradient
            if is_last:
                return NoDoubleBackward.apply(lambda given: result, False, torch.empty(0, requires_grad=True))  # type: ignore[no-any-return]
            return tuple(result)

    return Forward


def _autocast_state() -> list[tuple[Any, ...]]:
    """Return the arguments of the ``torch.autocast`` contexts that bring back the present state."""
    cache = torch.is_autocast_cache_enabled()
    return [
        (device, torch.get_autocast_dtype(device), enabled, cache)
        for device in ("cpu", "cuda")
        if (enabled := torch.is_autocast_enabled(device)) or device == "cpu"
    ]


def _detach_non_leaf(argument: torch.Tensor) -> torch.Tensor:
    """Detach an argument from its history. Its source may be an input too, and gets its gradient later."""
    return argument if argument.is_leaf else argument.detach().requires_grad_(argument.requires_grad)
