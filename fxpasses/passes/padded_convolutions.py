"""Zero padding goes into the convolution that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpasses.contract import Contract, Pass
from fxpasses.passes._matching import calls_before, find_calls, is_call, replace_results, shape_of
from fxpasses.rewriting import replace, same_metadata, value_of
from fxpasses.sites import claim

__all__ = ["PaddedConvolutions"]

aten = torch.ops.aten

_PADDING = {aten.convolution.default: 4, aten.convolution_backward.default: 5}
"""Where the padding stands among the arguments."""
_INPUT = {aten.convolution.default: 0, aten.convolution_backward.default: 1}
_TRANSPOSED = {aten.convolution.default: 6, aten.convolution_backward.default: 7}


@dataclass(frozen=True)
class PaddedConvolutions(Pass):
    """Let a convolution pad its input itself.

    Networks ported from other frameworks pad with a layer of its own (``nn.ZeroPad2d``, "same" padding): a
    copy of the whole activation in the forward pass, saved for the backward pass next to the activation, and a
    cropping copy of the gradient.

    Before::

        padded = aten.constant_pad_nd(x, [1, 1, 1, 1], 0.0)
        y = aten.convolution(padded, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        ...
        grads = aten.convolution_backward(grad, padded, weight, None, [1, 1], [0, 0], ...)
        grad_x = aten.constant_pad_nd(grads[0], [-1, -1, -1, -1])

    After::

        y = aten.convolution(x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
        ...
        grads = aten.convolution_backward(grad, x, weight, None, [1, 1], [1, 1], ...)
        grad_x = grads[0]

    For padding with zeros that is the same on both sides of each spatial dimension, when all users of the
    padded value are such convolutions. Equal up to rounding where weights are finite.
    """

    name: ClassVar[str] = "padded_convolutions"
    contract: ClassVar[Contract] = Contract(("joint", "inference"), numerics="tolerance")

    def apply(self, gm: fx.GraphModule) -> bool:
        changed = False
        for pad in find_calls(gm.graph, aten.constant_pad_nd.default):
            added = _symmetric_zeros(pad)
            if added is None or not pad.users or not all(_takes(user, pad, added) for user in pad.users):
                continue
            if not claim(pad):
                continue
            for user in list(pad.users):
                _move_into(user, pad, added)
            gm.graph.erase_node(pad)
            changed = True
        return changed


def _symmetric_zeros(pad: fx.Node) -> list[int] | None:
    """How many zeros ``pad`` puts on each side of each spatial dimension, first dimension first, or None."""
    fill = pad.args[2] if len(pad.args) > 2 else 0
    amounts = list(pad.args[1])  # type: ignore[arg-type]
    before, after = amounts[0::2], amounts[1::2]
    spatial = value_of(pad).dim() - 2
    if fill != 0 or before != after or spatial < 1 or len(before) > spatial:
        return None
    if not all(isinstance(n, int) and n >= 0 for n in before):
        return None
    return [0] * (spatial - len(before)) + before[::-1]


def _takes(user: fx.Node, pad: fx.Node, added: list[int]) -> bool:
    """Whether ``user`` is a convolution, or its gradient, that can do the padding itself."""
    if not is_call(user, *_PADDING) or shape_of(pad.args[0]) is None:
        return False
    if user.args[_TRANSPOSED[user.target]] or [  # type: ignore[index]
        position for position, value in enumerate(user.args) if value is pad
    ] != [_INPUT[user.target]]:  # type: ignore[index]
        return False
    if not same_metadata(_new_value(user, pad, added), _first(value_of(user))):
        return False
    return user.target is aten.convolution.default or all(_crops(g, pad) for g in _input_gradients(user))


def _new_value(user: fx.Node, pad: fx.Node, added: list[int]) -> torch.Tensor | None:
    """The fake value of a convolution that pads itself; of its gradient, the part that has to stay as it is."""
    if user.target is not aten.convolution.default:
        return _first(value_of(user))
    args = [value_of(a) if isinstance(a, fx.Node) else a for a in _with_padding(user, pad, added)]
    with value_of(user).fake_mode:
        return aten.convolution.default(*args)


def _first(value: object) -> torch.Tensor | None:
    return value[0] if isinstance(value, (list, tuple)) else value  # type: ignore[return-value]


def _input_gradients(backward: fx.Node) -> list[fx.Node]:
    """What uses the gradient of the padded input."""
    return [user for item in backward.users if item.args[1] == 0 for user in item.users]


def _crops(node: fx.Node, pad: fx.Node) -> bool:
    wanted = [-amount for amount in pad.args[1]]  # type: ignore[union-attr]
    return is_call(node, aten.constant_pad_nd.default) and list(node.args[1]) == wanted  # type: ignore[arg-type]


def _with_padding(user: fx.Node, pad: fx.Node, added: list[int]) -> list[object]:
    args = list(user.args)
    place = _PADDING[user.target]  # type: ignore[index]
    inner = list(args[place])  # type: ignore[arg-type]
    inner = inner * len(added) if len(inner) == 1 else inner
    args[place] = [a + b for a, b in zip(inner, added, strict=True)]
    args[_INPUT[user.target]] = pad.args[0]  # type: ignore[index]
    return args


def _move_into(user: fx.Node, pad: fx.Node, added: list[int]) -> None:
    new = calls_before(user, like=user)(user.target, *_with_padding(user, pad, added))
    if user.target is aten.convolution.default:
        replace(user, new)
        return
    gradient = replace_results(user, new).get(0)
    for crop in list(gradient.users) if gradient is not None else []:
        same = same_metadata(value_of(gradient), value_of(crop))  # type: ignore[arg-type]
        copy = {"memory_format": torch.contiguous_format}
        replace(crop, gradient if same else calls_before(crop)(aten.clone.default, gradient, **copy))  # type: ignore[arg-type]
