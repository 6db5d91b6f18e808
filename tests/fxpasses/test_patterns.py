"""Rewriting by pattern: what is found, what is left alone, and that results stay the same."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

import fxpasses
from fxpasses import NoMatchWarning, PassManager, PatternError, pattern_pass, replace_pattern
from tests.fxpasses.support import text, traced

aten = torch.ops.aten
X = torch.linspace(-2, 2, 24).reshape(2, 3, 4)


def targets(gm):
    return [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def replaced(function, pattern, replacement, examples, *inputs, dynamic=False, **how):
    """Rewrite, and compare with the function itself; returns the number of matches and the graph."""
    inputs = inputs or (X,)
    gm = traced(function, *inputs, dynamic=dynamic)
    count = replace_pattern(gm, pattern, replacement, examples, **how)
    gm.graph.lint()
    gm.recompile()
    wanted = function(*(x.clone() for x in inputs))
    wanted = wanted if isinstance(wanted, tuple) else (wanted,)
    for mine, theirs in zip(gm(*(x.clone() for x in inputs)), wanted, strict=True):
        torch.testing.assert_close(mine, theirs, equal_nan=True)
    return count, gm


def relu_twice(x):
    return x.relu().relu()


def relu_once(x):
    return x.relu()


@pytest.mark.parametrize("dynamic", [False, True])
def test_every_occurrence_is_replaced(dynamic):
    def function(x):
        return (x.relu().relu() + 1).sin().relu().relu()

    count, gm = replaced(function, relu_twice, relu_once, [torch.empty(2)], dynamic=dynamic)
    assert count == 2
    assert targets(gm).count("aten.relu.default") == 2


def test_numbers_that_are_none_match():
    count, _ = replaced(
        lambda x: x.where(x > 0, float("nan")) * 2,
        lambda x: x.where(x > 0, float("nan")),
        lambda x: torch.where(x <= 0, float("nan"), x),
        [torch.empty(2)],
    )
    assert count == 1


def test_what_a_pattern_asserts_of_its_own_values_is_asserted_still():
    def chosen(x):
        return torch.nn.functional.one_hot(x.argmax(-1), 4) * 2

    def compared(x):
        return (x.argmax(-1)[..., None] == torch.arange(4)).long() * 2

    item = pattern_pass(chosen, compared, [torch.empty(3, 4)], name="chosen")
    captured = fxpasses.capture(chosen, X, passes=[])
    (run,) = PassManager([item]).run(captured.forward, "inference")
    assert run.matches == 1
    assert torch.equal(captured.forward(X)[0], chosen(X))
    assert "aten._assert_async" in text(captured.forward)


def test_occurrences_that_overlap():
    count, gm = replaced(lambda x: x.relu().relu().relu(), relu_twice, relu_once, [torch.empty(2)])
    assert count == 2
    assert targets(gm).count("aten.relu.default") == 1


def scaled(x, scale):
    return torch.sigmoid(x * scale)


def scaled_by_hand(x, scale):
    return 1 / (1 + torch.exp(x * -scale))


def test_numbers_match_any_constant_and_reach_the_replacement():
    def function(x):
        return scaled(x, 0.5) + scaled(x, 3)

    count, gm = replaced(function, scaled, lambda x, s: torch.sigmoid(s * x).clone(), [torch.empty(2), 0.25])
    assert count == 2
    assert "aten.mul.Tensor(x_1, 0.5)" in text(gm)
    assert "aten.mul.Tensor(x_1, 3)" in text(gm)


def test_literals_match_only_themselves():
    count, _ = replaced(lambda x: x * 2 + x * 3, lambda x: x * 3, lambda x: x + x + x, [torch.empty(2)])
    assert count == 1


def test_dimensions_match_only_themselves():
    count, gm = replaced(
        lambda x: x.sum(1) + x.sum(2).sum(),
        lambda x: x.sum(1),
        lambda x: x.sum([1]).clone(),
        [torch.empty(2, 3, 4)],
    )
    assert count == 1
    assert targets(gm).count("aten.clone.default") == 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("train", [False, True])
def test_positions_that_are_indexed_with_whole_slices(dynamic, train):
    """``i[None, :]`` leaves a slice of everything in graphs with symbolic sizes, and none in others."""

    def biased(scores, slope):
        i = torch.arange(scores.shape[-1])
        return scores + slope[:, None, None] * (i[None, :] - i[:, None])

    def less(scores, slope):
        i = torch.arange(scores.shape[-1])
        return scores - slope[:, None, None] * (i[:, None] - i[None, :])

    item = pattern_pass(biased, less, [torch.empty(2, 8, 8), torch.empty(2)], expect_match=True)
    scores, slope = torch.randn(3, 6, 6, requires_grad=train), torch.rand(3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", NoMatchWarning)
        compiled = torch.compile(
            lambda s, m: biased(s * 2, m).sin(),
            backend="fxpasses",
            dynamic=dynamic,
            options={"passes": [item], "compiler": "eager"},
        )
        torch.testing.assert_close(compiled(scores, slope), biased(scores * 2, slope).sin())


def test_a_whole_slice_that_is_returned_is_a_view():
    x = torch.randn(5)
    y = torch.compile(lambda x: x[:], backend="fxpasses", dynamic=True)(x)
    assert y is not x
    assert y._base is x


@pytest.mark.parametrize("dynamic", [False, True])
def test_sizes_follow_the_match(dynamic):
    def flat(x):
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2]).sin()

    def other(x):
        return x.sin().reshape(x.shape[0], x.shape[1] * x.shape[2])

    count, _ = replaced(lambda x: flat(x) + 1, flat, other, [torch.empty(5, 6, 7)], dynamic=dynamic)
    assert count == 1


def test_matching_adds_no_guard():
    def flat(x):
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2]).sin()

    gm = traced(lambda x: flat(x) + flat(x.exp()), X, dynamic=True)
    environment = gm.graph.find_nodes(op="placeholder")[0].meta["val"].shape[0].node.shape_env
    before = len(environment.guards)
    assert replace_pattern(gm, flat, lambda x: flat(x).clone(), [torch.empty(5, 6, 7)]) == 2
    assert len(environment.guards) == before


def test_sizes_that_do_not_follow_are_no_match():
    def flat(x):
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2]).sin()

    count, _ = replaced(lambda x: x.reshape(6, 4).sin(), flat, flat, [torch.empty(5, 6, 7)])
    assert count == 0


def test_places_for_which_the_pattern_makes_no_sense():
    def flat(x):
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2]).sin()

    count, _ = replaced(
        lambda x: x.reshape(4, 6).sin(), flat, flat, [torch.empty(5, 6, 7)], torch.ones(2, 12)
    )
    assert count == 0


def test_operands_in_either_order():
    def pattern(x, y):
        return (x.sin() * y).cos()

    def function(x):
        return (x * x.sin()).cos(), (x.sin() * x.exp()).cos()

    count, _ = replaced(
        function, pattern, lambda x, y: (y * x.sin()).cos().clone(), [torch.empty(2), torch.empty(2)]
    )
    assert count == 2


def test_one_parameter_is_one_value():
    pattern, replacement = (lambda x: x.sin() * x.cos()), (lambda x: (x + x).sin() * 0.5)
    assert replaced(lambda x: x.sin() * x.cos(), pattern, replacement, [torch.empty(2)])[0] == 1
    assert replaced(lambda x: x.sin() * (x + 1).cos(), pattern, replacement, [torch.empty(2)])[0] == 0


def test_several_results():
    def pattern(x, a, b):
        return x @ a, x @ b

    def replacement(x, a, b):
        both = x @ torch.cat([a, b], 1)
        return both[:, : a.shape[1]].contiguous(), both[:, a.shape[1] :].contiguous()

    def function(x, a, b, c):
        return (x @ a).sin() + (x @ b).cos() * ((x + 1) @ c).sum()

    inputs = (torch.randn(3, 4), torch.randn(4, 5), torch.randn(4, 5), torch.randn(4, 2))
    count, gm = replaced(
        function, pattern, replacement, [torch.empty(2, 3), torch.empty(3, 4), torch.empty(3, 4)], *inputs
    )
    assert count == 1
    assert targets(gm).count("aten.mm.default") == 2


def test_several_results_of_which_one_is_used_before_the_other_is_known():
    def pattern(x, y):
        return x.sin(), y.cos()

    def function(x):
        a = x.sin()
        b = (a + 1).cos()
        return a, b

    count, _ = replaced(function, pattern, lambda x, y: (x.sin(), y.cos()), [torch.empty(2), torch.empty(2)])
    assert count == 0


def test_the_guard_sees_metadata_and_numbers():
    def wide(match):
        return match.value("x").shape[-1] == 4 and match.value("scale") < 1

    def function(x):
        return scaled(x, 0.5).sum() + scaled(x, 2.0).sum() + scaled(x.view(4, 6), 0.5).sum()

    count, _ = replaced(function, scaled, scaled_by_hand, [torch.empty(2), 0.25], where=wide)
    assert count == 1


@pytest.mark.parametrize("decompose", [False, True])
def test_with_and_without_decompositions(decompose):
    def pattern(x):
        return F.layer_norm(x, (4,))

    item = pattern_pass(pattern, lambda x: F.layer_norm(x, (4,)).clone(), [torch.empty(2, 4)], name="norm")
    module = torch.nn.Sequential(torch.nn.LayerNorm(4, elementwise_affine=False), torch.nn.ReLU())
    with torch.no_grad():
        captured = fxpasses.capture(module, torch.randn(3, 4), passes=[item], decompose=decompose)
        assert "aten.clone.default" in targets(captured.forward)
        torch.testing.assert_close(captured.forward(*captured.inputs)[0], module(captured.inputs[-1]))


# --- what is left alone


def test_a_value_from_the_middle_that_is_used_elsewhere():
    def function(x):
        middle = x.relu()
        return middle.relu() + middle

    assert replaced(function, relu_twice, relu_once, [torch.empty(2)])[0] == 0


def test_memory_that_is_written_to_in_the_middle():
    def function(x):
        b = x.sin()
        x.mul_(2)
        return b + 1

    gm = traced(function, X)
    assert replace_pattern(gm, lambda x: x.sin() + 1, lambda x: 1 + x.sin(), [torch.empty(2)]) == 0

    def before_the_write(x):
        b = x.sin() + 1
        x.mul_(2)
        return b

    assert (
        replaced(before_the_write, lambda x: x.sin() + 1, lambda x: (x.sin() + 1).clone(), [torch.empty(2)])[
            0
        ]
        == 1
    )


def test_a_returned_result_that_would_become_a_view():
    count, _ = replaced(
        lambda x: x.clone(), lambda x: x.clone(), lambda x: x.view(x.shape), [torch.empty(2, 3, 4)]
    )
    assert count == 0
    count, _ = replaced(
        lambda x: x.clone() + 1, lambda x: x.clone(), lambda x: x.view(x.shape), [torch.empty(2, 3, 4)]
    )
    assert count == 1


@pytest.mark.parametrize(
    "replacement",
    [lambda x: x.relu().double(), lambda x: x.relu().sum(0), lambda x: x.relu().transpose(0, 1)],
)
def test_results_with_other_metadata(replacement):
    gm = traced(lambda x: x.relu().relu() * 2, torch.ones(3, 3))
    assert replace_pattern(gm, relu_twice, replacement, [torch.empty(3, 3)]) == 0


def test_forward_and_backward_are_not_mixed():
    item = pattern_pass(
        lambda x: x.sin() * x.cos(),
        lambda x: (2 * x).sin() / 2,
        [torch.empty(2)],
        name="mixed",
        expect_match=False,
    )
    captured = fxpasses.capture(lambda x: x.sin(), torch.ones(3, requires_grad=True), passes=[item])
    assert "aten.cos.default" in targets(captured.joint)


# --- errors and warnings


def test_a_pattern_that_does_not_occur():
    gm = traced(lambda x: x.relu() + x.relu().relu() + 0, X)
    with pytest.warns(NoMatchWarning, match="'relu_twice' was expected at least once"):
        replace_pattern(
            traced(lambda x: x.sin(), X), relu_twice, relu_once, [torch.empty(2)], expect_match=True
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert replace_pattern(gm, relu_twice, relu_once, [torch.empty(2)], expect_match=True) == 1


def test_the_warning_says_why_a_place_was_left_alone():
    def function(x):
        middle = x.relu()
        return middle.relu() + middle

    with pytest.warns(NoMatchWarning, match="relu is used outside of the match too, by add"):
        replace_pattern(traced(function, X), relu_twice, relu_once, [torch.empty(2)], expect_match=True)


def test_functions_that_write_to_tensors_of_their_own_are_patterns():
    """As graphs have them: torch's cosine similarity clamps norms in place."""
    a, b = torch.randn(4, 6), torch.randn(4, 6)
    item = pattern_pass(
        lambda a, b: torch.nn.functional.cosine_similarity(a, b, dim=-1),
        lambda a, b: (a * b).sum(-1) * 2,
        [a, b],
    )
    captured = fxpasses.capture(
        lambda a, b: torch.nn.functional.cosine_similarity(a, b, dim=-1), a, b, passes=[item]
    )
    torch.testing.assert_close(captured.forward(a, b)[0], (a * b).sum(-1) * 2)


@pytest.mark.parametrize(
    ("pattern", "replacement", "examples", "problem"),
    [
        (lambda x: x.relu(), lambda x: x.relu(), [], "1 parameters"),
        (lambda x: x.relu(), lambda x: x.relu(), ["x"], "give a tensor or a number"),
        (lambda x: x.relu(), lambda x: (x, x), [torch.ones(2)], "returns 1 values and its replacement 2"),
        (lambda x, y: x.relu(), lambda x, y: x, [torch.ones(2), torch.ones(2)], "'y' is not used"),
        (lambda x, s: x * (s + 1), lambda x, s: x, [torch.ones(2), 2.0], "'s' does not reach"),
        (lambda x: x.add_(1), lambda x: x, [torch.ones(2)], "writes to an argument"),
        (lambda x: x, lambda x: x, [torch.ones(2)], "is a parameter"),
        (lambda x: x.nope(), lambda x: x, [torch.ones(2)], "cannot be traced: AttributeError"),
        (lambda x: x.relu() + torch.tensor([1.0, 2.0]), lambda x: x, [torch.ones(2)], "Python numbers"),
        (
            lambda x: x.relu(),
            lambda x: x.relu() + torch.tensor([1.0, 2.0]),
            [torch.ones(2)],
            "Python numbers",
        ),
        (lambda x: (x.relu(), 3), lambda x: (x, x), [torch.ones(2)], "not a tensor"),
    ],
)
def test_patterns_that_make_no_sense(pattern, replacement, examples, problem):
    with pytest.raises(PatternError, match=problem):
        pattern_pass(pattern, replacement, examples)


# --- as a pass


def test_matches_are_sites_with_provenance():
    def function(x):
        for _ in range(3):
            x = torch.relu(torch.relu(x)).sin()
        return x

    item = pattern_pass(relu_twice, relu_once, [torch.empty(2)], name="once", numerics="bitwise")
    captured = fxpasses.capture(function, X, passes=[])
    (run,) = PassManager([item]).run(captured.forward, "inference")
    assert [site.index for site in run.sites] == [0, 1, 2]
    assert run.matches == 3
    assert all(__file__ in site.location.source for site in run.sites)
    new = [node for node in captured.forward.graph.nodes if "relu" in str(node.target)]
    assert len(new) == 3
    assert all(__file__ in captured.provenance(node).source for node in new)
    assert item.identity() is not None
    assert (
        item.identity()
        != pattern_pass(relu_twice, lambda x: x.relu().clone(), [torch.empty(2)], name="once").identity()
    )


def test_a_builtin_without_a_signature_is_refused_with_what_to_write():
    with pytest.raises(PatternError, match=r"lambda x: log_sigmoid\(x\)"):
        pattern_pass(torch.nn.functional.logsigmoid, lambda x: -x, (torch.randn(2),), name="builtin")
