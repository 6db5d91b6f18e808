"""Dropout masks are sampled with 15 random bits an element instead of a random float."""

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
"""A sample of 64 bits is split into four integers of 16; the highest of the 64 is always 0, so each gives 15 bits."""

_COMPARED = {
    aten.gt.Scalar: aten.ge.Scalar,
    aten.ge.Scalar: aten.ge.Scalar,
    aten.lt.Scalar: aten.lt.Scalar,
    aten.le.Scalar: aten.lt.Scalar,
}
"""Comparisons of a uniform number in [0, 1) with ``p``, and that of an integer in [0, 32768) with ``32768 * p``.

Of the floats those above ``p`` and those from ``p`` on are equally many up to one; of few integers they are not.
"""


@dataclass(frozen=True)
class PackDropoutRng(Pass):
    """Sample four elements of a dropout mask with one call of the RNG.

    Inductor samples a 32-bit float for each element of a mask on the CPU and compares it with the probability: about 8 ns an
        element, 7 to 23% of the training steps of BERT, GPT-2 and T5. A 64-bit sample is enough for four elements.

        Before::

            number = aten.rand([64, 128])
            keep = aten.gt(number, 0.1)                              # bool[64, 128]

        After::

            samples = aten.random(aten.empty([2048], int64))
            numbers = aten.view.dtype(samples, int16)                # four for each sample
            numbers = aten.view(numbers, [64, 128]) & 32767
            keep = aten.ge(numbers, 3277)                            # 3277 / 32768 = 0.10001

        Other random numbers than before: other elements are dropped, as with another seed. Where Inductor is to sample what eager
        samples (``fallback_random``) nothing is rewritten. The same seed still gives the same masks, and the backward pass reads the mask of
        the forward pass. The probability is rounded to a multiple of 1/32768.

        Attributes:
            min_elements: masks of fewer elements are left as they are.
            tolerance: the most that rounding may change the share of dropped or of kept elements, relative to it.
    """

    name: ClassVar[str] = "pack_dropout_rng"
    contract: ClassVar[Contract] = Contract("joint", numerics="none")
    min_elements: int = 2048
    tolerance: float = 0.01

    def __post_init__(self) -> None:
        require_at_least(self, min_elements=0, tolerance=0.0)

    def apply(self, gm: fx.GraphModule) -> bool:
        from fake.seam.inductor import config  # Inductor, which listing passes does without

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
            # Whoever recomputes a checkpointed call sets the generator back for the calls that it knows.
            if any("recompute" in node.meta for node in (rand, *rand.users)):
                continue
            if not all(self._is_mask(user, rand) for user in rand.users) or not claim(rand):
                continue
            _rewrite(rand, shape)
            changed = True
        return changed

    def _is_mask(self, user: fx.Node, rand: fx.Node) -> bool:
        """Whether ``user`` compares the samples with a probability that 15 bits can express."""
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
    # Nothing reads the memory before it is filled, and torch's own CSE, which does not know that `random` calls the
    # RNG, merges no two `empty`: masks of one size stay different.
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
