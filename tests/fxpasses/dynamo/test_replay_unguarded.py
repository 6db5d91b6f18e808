"""What a layer does that no guard of Dynamo tells of: which object one is, and objects that the program made before."""

import enum

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import Replicate, Shard

from fxpasses import stats
from tests.fxpasses.dynamo.support import COPIED, Layer, Stack, agree, compiled

pytestmark = pytest.mark.usefixtures("as_traced")


class Kind(enum.Enum):
    PLAIN = 1
    OTHER = 2


class Shared:
    chosen = None
    factors: dict = {}
    losses: list = []
    state = None


_NOTHING = object()
_BY_VALUE = {F.relu: 2.0, Kind.PLAIN: 3.0, (1, "two"): 4.0}


class IsChosen(Layer):
    def forward(self, x):
        return super().forward(x) * (3.0 if self is Shared.chosen else 1.0)


class EqualsChosen(Layer):
    def forward(self, x):
        return super().forward(x) * (3.0 if self == Shared.chosen else 1.0)


class InnerIsChosen(Layer):
    def forward(self, x):
        return super().forward(x) * (3.0 if self.linear is Shared.chosen.linear else 1.0)


class IsAKey(Layer):
    def forward(self, x):
        return super().forward(x) * Shared.factors.get(self, 1.0)


class IsPartOfAKey(Layer):
    def forward(self, x):
        return super().forward(x) * Shared.factors.get(("layer", self), 1.0)


class IsAmongTheKeys(Layer):
    def forward(self, x):
        return super().forward(x) * (3.0 if self in Shared.factors else 1.0)


@pytest.mark.parametrize(
    "kind", [IsChosen, EqualsChosen, InnerIsChosen, IsAKey, IsPartOfAKey, IsAmongTheKeys]
)
@pytest.mark.parametrize("place", [0, 4])
def test_a_layer_that_asks_which_one_it_is(kind, place):
    model, x = Stack(kind), torch.randn(3, 8)
    Shared.chosen = model.layers[place]
    Shared.factors = {Shared.chosen: 3.0, ("layer", Shared.chosen): 5.0}
    torch.testing.assert_close(compiled(model)(x), model(x))


class AsksByValue(Layer):
    def __init__(self, width=8):
        super().__init__(width)
        self.kind, self.act, self.key = Kind.PLAIN, F.relu, (1, "two")

    def forward(self, x, mask=None, other=_NOTHING):
        y = super().forward(x) * _BY_VALUE[self.act] + _BY_VALUE[self.kind] - _BY_VALUE[self.key]
        plain = self.kind is Kind.PLAIN and self.act is F.relu and mask is None and other is _NOTHING
        return y if plain and x.dtype is torch.float32 else -y


def test_what_is_guarded_by_value_may_be_asked():
    model = Stack(AsksByValue)
    agree(model, compiled(model), torch.randn(3, 8))
    assert stats().copied_calls == COPIED


_SHARDED, _BY_PLACEMENT = (Shard(0), Replicate()), {Replicate(): 2.0, Shard(1): 3.0}


class AsksForPlacements(Layer):
    """As ``parallelize_module``'s hooks do: a comparison of tuples asks for identity first."""

    def __init__(self, width=8):
        super().__init__(width)
        self.where = (Shard(0), Replicate())

    def forward(self, x):
        y = super().forward(x) * _BY_PLACEMENT[self.where[1]]
        return y if self.where == _SHARDED else -y


def test_placements_are_guarded_by_value():
    model = Stack(AsksForPlacements)
    agree(model, compiled(model), torch.randn(3, 8))
    assert stats().copied_calls == COPIED


@pytest.mark.parametrize("where", [(Shard(1), Replicate()), (Shard(0), Shard(1))])
def test_a_layer_with_another_placement(where):
    model, x = Stack(AsksForPlacements), torch.randn(3, 8)
    model.layers[4].where = where
    torch.testing.assert_close(compiled(model)(x), model(x))


def test_a_layer_that_asks_which_placement_it_has():
    class IsPlacement(AsksForPlacements):
        def forward(self, x):
            y = super().forward(x)
            return -y if self.where[0] is Shared.chosen else y

    model, x = Stack(IsPlacement), torch.randn(3, 8)
    Shared.chosen = model.layers[4].where[0]
    torch.testing.assert_close(compiled(model)(x), model(x))


def test_a_layer_with_an_attribute_of_its_own():
    class Looks(Layer):
        def forward(self, x):
            return super().forward(x) * (3.0 if "special" in self.__dict__ else 1.0)

    model, x = Stack(Looks), torch.randn(3, 8)
    model.layers[4].special = None
    torch.testing.assert_close(compiled(model)(x), model(x))


class Collects(Layer):
    def forward(self, x):
        y = super().forward(x)
        Shared.losses.append(y.square().mean())
        return y


def test_layers_collect_in_a_list_that_the_program_made():
    class Collecting(Stack):
        def forward(self, x):
            Shared.losses = []
            return super().forward(x) + sum(Shared.losses)

    model = Collecting(Collects)
    agree(model, compiled(model), torch.randn(3, 8))
    assert len(Shared.losses) == len(model.layers)


def test_an_object_that_the_program_made_changes_between_layers():
    class State:
        factor = 1.0

    class Reads(Layer):
        def forward(self, x):
            return super().forward(x) * Shared.state.factor * Shared.factors["all"]

    class Changes(Stack):
        def forward(self, x):
            Shared.state, Shared.factors = State(), {"all": 1.0}
            for number, layer in enumerate(self.layers):
                if number == 3:
                    Shared.state.factor = 2.0
                if number == 5:
                    Shared.factors["all"] = 3.0
                x = layer(x)
            return x

    model = Changes(Reads)
    agree(model, compiled(model), torch.randn(3, 8))


def test_a_list_of_the_programs_own_costs_no_copies():
    class Listing(Stack):
        def forward(self, x):
            Shared.state = {"made": 1.0}
            states = []
            for layer in self.layers:
                x = layer(x)
                states.append(x)
            return sum(states) * Shared.state["made"]

    model = Listing()
    agree(model, compiled(model), torch.randn(3, 8))
    assert stats().copied_calls == COPIED
