"""Sample dropout masks from 15 random bits per element instead of a random float."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from fxpasses.graphs.rewriting import replace, same_metadata, value_of
from fxpasses.pass_manager.pass_base import Contract, Pass
from fxpasses.pass_manager.sites import claim
from fxpasses.passes._matching import calls_before, find_calls, is_call, shape_of
from fxpasses.passes._options import require_at_least

aten = torch.ops.aten

_LEVELS = 1 << 15
"""A 64-bit sample is split into four 16-bit integers. Its top bit is always 0, so each gives 15 bits."""

_COMPARED = {
    aten.gt.Scalar: aten.ge.Scalar,
    aten.ge.Scalar: aten.ge.Scalar,
    aten.lt.Scalar: aten.lt.Scalar,
    aten.le.Scalar: aten.lt.Scalar,
}
"""Comparisons of a uniform number in [0, 1) with ``p``, and of an integer in [0, 32768) with ``32768 * p``.

The numbers of floats above ``p`` and from ``p`` on are equal up to one. Those of few integers are not.
"""


@dataclass(frozen=True)
class PackDropoutRng(Pass):
    """Sample four elements of a dropout mask with one call of the RNG.

    On the CPU, Inductor samples a 32-bit float for each element of a mask and compares it with the
    probability. This takes about 8 ns per element, 7 to 23% of the training steps of BERT, GPT-2 and T5. A
    64-bit sample is enough for four elements.

    Before::

        number = aten.rand([64, 128])
        keep = aten.gt(number, 0.1)                              # bool[64, 128]

    After::

        samples = aten.random(aten.empty([2048], int64))
        numbers = aten.view.dtype(samples, int16)                # four for each sample
        numbers = aten.view(numbers, [64, 128]) & 32767
        keep = aten.ge(numbers, 3277)                            # 3277 / 32768 = 0.10001

    The random numbers change, so other elements are dropped, as with another seed. Nothing is rewritten if
    Inductor must sample what eager samples (``fallback_random``). The same seed still gives the same masks,
    and the backward pass reads the mask of the forward pass. The probability is rounded to a multiple of
    1/32768.

    Attributes:
        min_elements: masks with fewer elements are left unchanged.
        tolerance: maximum relative change, by rounding, of the share of dropped or of kept elements.
    """

    name: ClassVar[str] = "pack_dropout_rng"
    contract: ClassVar[Contract] = Contract("joint", numerics="none")
    min_elements: int = 2048
    tolerance: float = 0.01

    def __post_init__(self) -> None:
        require_at_least(self, min_elements=0, tolerance=0.0)

    def apply(self, gm: fx.GraphModule) -> bool:
        from fake.seam.inductor import config  # lazy: listing passes must not import Inductor

        if config.fallback_random:
            return False
        changed = False
        for rand in find_calls(gm.graph, aten.rand.default):
            shape = shape_of(rand)
            if shape is None or not math.prod(shape) or math.prod(shape) < self.min_elements:
                continue
            value = value_of(rand)
            if value.device.type != "cpu" or not value.is_contiguous() or not rand.users:
                continue
            # Recomputing a checkpointed call resets the generator for the calls that it knows.
            if any("recompute" in node.meta for node in (rand, *rand.users)):
                continue
            if not all(self._is_mask(user, rand) for user in rand.users) or not claim(rand):
                continue
            _rewrite(rand, shape)
            changed = True
        return changed

    def _is_mask(self, user: fx.Node, rand: fx.Node) -> bool:
        """Whether ``user`` compares the samples with a probability that 15 bits can represent."""
        if not is_call(user, *_COMPARED) or user.args[0] is not rand:
            return False
        probability = user.args[1]
        if not isinstance(probability, float) or not 0 < probability < 1:
            return False
        level = _level(probability)
        off = abs(level / _LEVELS - probability)
        return 0 < level < _LEVELS and off <= self.tolerance * min(probability, 1 - probability)


def _level(probability: float) -> int:
    return round(probability * _LEVELS)


def _rewrite(rand: fx.Node, shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    call = calls_before(rand, like=rand)
    # Nothing reads the memory before it is filled. Torch's own CSE, which does not know that `random` uses
    # the RNG, merges no two `empty` calls, so masks of one size stay different.
    memory = call(aten.empty.memory_format, [-(-count // 4)], dtype=torch.int64, device=value_of(rand).device)
    numbers = call(aten.view.dtype, call(aten.random.default, memory), torch.int16)
    if count % 4:
        numbers = call(aten.slice.Tensor, numbers, 0, 0, count)
    numbers = call(aten.bitwise_and.Scalar, call(aten.view.default, numbers, list(shape)), _LEVELS - 1)
    for mask in list(rand.users):
        level = _level(mask.args[1])  # type: ignore[arg-type]
        new = calls_before(mask, like=mask)(_COMPARED[mask.target], numbers, level)  # type: ignore[index]
        assert same_metadata(value_of(new), value_of(mask))
        replace(mask, new)
    rand.graph.erase_node(rand)
