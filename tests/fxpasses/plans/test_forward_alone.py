"""Plans of calls with gradients on whose backward pass did not run: of the forward pass alone."""

import contextlib
import gc
import shutil
import warnings

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import fxpasses
from fxpasses.plans.files.plan_files import comes_last
from fxpasses.plans.running.forward_alone import write_deferred_plans
from fxpasses.plans.walks.results import tensors_in

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x, scale=None):
        hidden = self.norm(self.body(x).tanh() * (1 if scale is None else scale))
        return {"hidden": hidden, "others": [self.head(hidden), (hidden.detach() * 2,)], "rows": len(x)}


class Noisy(Heads):
    def forward(self, x):
        return nn.functional.dropout(self.body(x), training=True)


class Counting(Heads):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(1)
        return self.body(x)


class Defaults(Heads):
    def forward(self, x, **options):
        options.setdefault("scale", 2)
        options.update(shift=1)
        return self.body(x) * options.pop("scale") + options["shift"]


def made(kind=Heads):
    torch.manual_seed(0)
    return kind()


def planned(model, cache):
    """What a later process has: a model compiled anew, whose plans are there."""
    gc.collect()
    return fxpasses.compile(model, cache=cache)


def forward_once(cache, kind=Heads, *, leaf=False):
    compiled = fxpasses.compile(made(kind), cache=cache)
    compiled(torch.randn(4, 8, requires_grad=leaf))
    write_deferred_plans()
    return [path.name for path in cache.glob("*/*.plan")]


def test_a_function_may_change_its_own_keyword_arguments(cache):
    assert forward_once(cache, Defaults)
    model, x = made(Defaults), torch.randn(4, 8)
    compiled, options = planned(model, cache), {"scale": 3}
    assert_close(compiled(x), model(x))
    assert_close(compiled(x, **options), model(x, scale=3))
    assert fxpasses.stats().plans_used == 1
    assert options == {"scale": 3}


def gradients(out, inputs):
    hidden, (logits, _) = out["hidden"], out["others"]
    return torch.autograd.grad(logits.square().sum() + hidden.sum(), inputs)


@pytest.fixture
def cache(tmp_path):
    tmp_path.chmod(0o700)
    gc.collect()  # a fake mode of another test that ends later would undo its patch of ``Module._apply`` then
    fxpasses.reset_stats()
    return tmp_path


def test_it_is_used_where_no_gradient_is_asked_for(cache):
    (name,) = forward_once(cache)
    assert comes_last(cache / name)
    graphs = fxpasses.stats().graphs
    model, x = made(), torch.randn(4, 8)
    compiled = planned(model, cache)
    for _ in range(2):
        assert_close(compiled(x), model(x))
    stats = fxpasses.stats()
    assert (stats.plans_used, stats.plans_refused, stats.graphs) == (1, {}, graphs)
    out = compiled(x)
    assert out["hidden"].requires_grad
    assert out["others"][0].requires_grad
    assert not out["others"][1][0].requires_grad


@pytest.mark.parametrize("leaf", [True, False])
def test_gradients_are_those_of_a_second_call_and_the_next_one_is_compiled(cache, leaf):
    forward_once(cache, leaf=leaf)
    model = made()
    compiled = planned(model, cache)
    x = torch.randn(4, 8, requires_grad=leaf)
    asked = [x, *model.parameters()] if leaf else list(model.parameters())
    first, second = compiled(x), compiled(x)
    expected = gradients(model(x), asked)
    for out in (first, second):  # the plan is gone with the first one
        assert_close(gradients(out, asked), expected)
    assert not [p for p in cache.glob("*/*.plan") if comes_last(p)]
    written = fxpasses.stats().plans_written
    assert_close(gradients(compiled(x), asked), expected)
    assert fxpasses.stats().plans_written == written + 1
    again = planned(model, cache)
    graphs = fxpasses.stats().graphs
    assert_close(gradients(again(x), asked), expected)
    assert fxpasses.stats().graphs == graphs


@pytest.mark.slow
def test_hooks_and_gradients_that_are_there_are_left_alone(cache):
    forward_once(cache)
    model, x = made(), torch.randn(4, 8)
    compiled = planned(model, cache)
    model.body.weight.grad = torch.ones(8, 8)
    out = compiled(x)
    out["others"][0].sum().backward()
    expected = torch.autograd.grad(model(x)["others"][0].sum(), [model.body.weight])[0]
    assert_close(model.body.weight.grad, expected + 1)


@pytest.mark.slow
def test_a_second_derivative(cache):
    forward_once(cache)
    model, x = made(), torch.randn(4, 8)
    compiled = planned(model, cache)
    for call in (compiled, model):
        (first,) = torch.autograd.grad(
            call(x)["others"][0].square().sum(), [model.body.weight], create_graph=True
        )
        (second,) = torch.autograd.grad(first.square().sum(), [model.body.weight])
        if call is compiled:
            found = first, second
    assert_close(found, (first, second), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_change_between_forward_and_backward_pass_is_an_error(cache):
    forward_once(cache)
    model, x = made(), torch.randn(4, 8)
    compiled = planned(model, cache)
    out = compiled(x)
    model.norm.eps = 0.5
    with pytest.raises(RuntimeError, match="the model or what its code reads has changed"):
        out["hidden"].sum().backward()
    model.norm.eps = 1e-5
    out = compiled(x)
    with torch.no_grad():
        model.body.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out["hidden"].sum().backward()
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Noisy, Counting])
def test_calls_that_differ_the_second_time_have_none(cache, kind):
    assert forward_once(cache, kind) == []


@pytest.mark.parametrize("around", [torch.autocast("cpu", torch.bfloat16), contextlib.nullcontext()])
def test_a_second_call_has_the_autocast_of_the_first(cache, around):
    x = torch.ones(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        fxpasses.compile(made(), cache=cache)(x)
    write_deferred_plans()
    model = made()
    compiled, found = planned(model, cache), []
    for call in (compiled, model):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = call(x)
        with around:
            sum(value.float().sum() for value in tensors_in(out)).backward()
        found.append([out, *(p.grad for p in model.parameters())])
    assert fxpasses.stats().plans_used == 1
    assert out["hidden"].dtype is torch.bfloat16
    assert_close(*found)


@pytest.mark.slow
def test_a_later_backward_pass_gives_a_plan_with_both(cache):
    model, x = made(), torch.randn(4, 8)
    compiled = fxpasses.compile(model, cache=cache)
    out = compiled(x)
    write_deferred_plans()
    asked = list(model.parameters())
    gradients(out, asked)
    assert sorted(map(comes_last, cache.glob("*/*.plan"))) == [False, True]
    graphs = fxpasses.stats().graphs
    assert_close(gradients(planned(model, cache)(x), asked), gradients(model(x), asked))
    assert fxpasses.stats().graphs == graphs


@pytest.mark.slow
def test_after_some_calls_the_same_process_uses_it_too(cache):
    model = made()
    compiled = fxpasses.compile(model, cache=cache)
    for _ in range(6):
        x = torch.randn(4, 8)
        assert_close(compiled(x), model(x))
    assert fxpasses.stats().plans_used == 1
    asked = list(model.parameters())
    for _ in range(3):
        assert_close(gradients(compiled(x), asked), gradients(model(x), asked))


@pytest.mark.slow
def test_save_says_that_there_is_no_backward_pass(cache, tmp_path):
    compiled = fxpasses.compile(made(), cache=cache)
    compiled(torch.randn(4, 8))
    with pytest.warns(UserWarning, match="has the forward pass alone"):
        fxpasses.save(compiled, tmp_path / "model.fxp")
    model, x = made(), torch.randn(4, 8)
    loaded = fxpasses.load(tmp_path / "model.fxp", model, trust=True)
    asked = list(model.parameters())
    for _ in range(2):
        assert_close(gradients(loaded(x), asked), gradients(model(x), asked))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = fxpasses.compile(model, cache=cache)
        for _ in range(2):
            gradients(again(x), asked)
        fxpasses.save(again, tmp_path / "whole.fxp")


@pytest.mark.slow
def test_a_directory_that_is_gone_is_not_made_again(cache):
    folder = cache / "plans"
    fxpasses.compile(made(), cache=folder)(torch.randn(4, 8))
    shutil.rmtree(folder)
    write_deferred_plans()
    assert not folder.exists()


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, given, times=1.0):
        x, y = given
        return self.first(x).tanh() * self.second(y).sigmoid() * times


def of_one_another(model):
    """Inputs that are computed from a weight of the model, and the second one from the first; what they come from."""
    x = torch.linspace(-1, 1, 32).reshape(4, 8).requires_grad_()
    h = x @ model.first.weight
    return x, [h, h.sin()]


def forward_of_pair_once(cache):
    model = made(Pair)
    fxpasses.compile(model, cache=cache)(of_one_another(model)[1], times=2.0)
    write_deferred_plans()


@pytest.mark.parametrize("change", [len, list.clear, list.reverse])
def test_gradients_go_on_from_arguments_as_they_were(cache, change):
    forward_of_pair_once(cache)
    model = made(Pair)
    compiled, found = planned(model, cache), []
    for call in (compiled, model):
        x, given = of_one_another(model)
        out = call(given, times=2.0)
        change(given)
        model.zero_grad()
        out.square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert fxpasses.stats().plans_used == 1
    assert_close(*found)


def test_hooks_of_inputs_run_once(cache):
    forward_once(cache, leaf=True)
    model, seen = made(), []
    compiled = planned(model, cache)
    x = torch.ones(4, 8, requires_grad=True)
    for tensor in (x, model.body.weight):
        tensor.register_hook(lambda gradient: (seen.append(1), gradient * 3)[1])
    found = []
    for call in (compiled, model):
        x.grad = None
        model.zero_grad()
        call(x)["others"][0].square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters())])
    assert_close(*found)
    assert len(seen) == 4
    assert fxpasses.stats().plans_used == 1


class Reentrant(Heads):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=True).tanh()


def test_nor_has_a_part_that_is_differentiated_by_backward_alone(cache):
    assert forward_once(cache, Reentrant, leaf=True) == []


class Shift(Heads):
    def forward(self, x):
        return x + self.body.weight[0]


def test_nor_has_a_call_of_inference_tensors(cache):
    with torch.inference_mode():
        x = torch.ones(4, 8)
    model = made(Shift)
    fxpasses.compile(model, cache=cache)(x)
    write_deferred_plans()
    assert not list(cache.glob("*/*.plan"))


def test_nor_has_one_of_weights_that_are_computed(cache):
    weight = torch.ones(8, 8, requires_grad=True)
    other = weight.sin()

    def call(x):
        return (x @ weight).tanh() @ other

    fxpasses.compile(call, cache=cache)(torch.ones(4, 8))
    write_deferred_plans()
    assert not list(cache.glob("*/*.plan"))


calls = []


class Asking(Heads):
    def forward(self, x):
        if torch.compiler.is_compiling():
            return self.body(x).tanh()
        calls.append(1)
        return self.body(x).tanh() * 1


def test_the_second_call_takes_the_branches_that_were_compiled(cache):
    forward_once(cache, Asking)
    calls.clear()
    model = made(Asking)
    compiled = planned(model, cache)
    compiled(torch.ones(4, 8)).sum().backward()
    assert fxpasses.stats().plans_used == 1
    assert not calls
    assert not torch.compiler.is_compiling()


def test_a_change_that_was_taken_back_is_none(cache):
    forward_once(cache)
    model, x = made(), torch.ones(4, 8)
    compiled, found = planned(model, cache), []
    for call in (compiled, model):
        out = call(x)
        model.eval()
        model.train()
        model.requires_grad_(False).requires_grad_(True)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out["others"][0].sum().backward()
        found.append([p.grad for p in model.parameters()])
    assert fxpasses.stats().plans_used == 1
    assert_close(*found)


def test_another_weight_in_the_place_of_one_is_a_change(cache):
    forward_once(cache)
    model = made()
    out = planned(model, cache)(torch.ones(4, 8))
    model.body.weight = nn.Parameter(model.body.weight.detach().clone())
    with pytest.raises(RuntimeError, match="the model or what its code reads has changed"):
        out["hidden"].sum().backward()


def test_a_second_derivative_with_regard_to_an_input_that_was_computed_is_refused(cache):
    h = torch.ones(4, 8, requires_grad=True) * 2
    fxpasses.compile(made(), cache=cache)(h)
    write_deferred_plans()
    model, x = made(), torch.ones(4, 8, requires_grad=True)
    out = planned(model, cache)(x * 2)["others"][0]
    assert fxpasses.stats().plans_used == 1
    (first,) = torch.autograd.grad(out.square().sum(), [x], create_graph=True)
    assert_close(first.detach(), torch.autograd.grad(model(x * 2)["others"][0].square().sum(), [x])[0])
    with pytest.raises(RuntimeError, match="double backward"):
        first.sum().backward()


def encoder():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def call_encoder(cache):
    model = encoder()
    return fxpasses.compile(model, cache=cache, regions="always")(torch.ones(2, 4, 8))


def test_a_model_that_is_gone_has_one_whose_layers_are_compiled_once_and_have_no_dropout(cache):
    call_encoder(cache)
    gc.collect()
    write_deferred_plans()
    (name,) = cache.glob("*/*.plan")
    assert comes_last(name)
    model = encoder()
    assert_close(call_encoder(cache), model(torch.ones(2, 4, 8)), rtol=1e-4, atol=1e-5)
    assert fxpasses.stats().plans_used == 1
