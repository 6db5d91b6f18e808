"""Verdicts on pairs of graphs: identities that people use, and changes that look like them."""

import copy

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import fxpasses
from fxpasses.exact import Original, equivalent
from fxpasses.exact.arithmetic import Arithmetic
from fxpasses.exact.bounds import inputs_at_bounds

X, W, B = torch.randn(4, 6), torch.randn(6, 5), torch.randn(5)
IDS = torch.tensor([[0, 2, 1], [1, 1, 3]])


def graphs(before, after, *inputs):
    return make_fx(before)(*inputs), make_fx(after)(*inputs), inputs


EQUAL = {
    "powers of a decay": (
        lambda x: (x[0].sigmoid() ** torch.arange(4.0)[:, None]).sum(0),
        lambda x: 1 + x[0].sigmoid() * (1 + x[0].sigmoid() * (1 + x[0].sigmoid())),
        X,
    ),
    "split matmul": (lambda x, w: x @ w, lambda x, w: x[:, :3] @ w[:3] + x[:, 3:] @ w[3:], X, W),
    "matmul transposed": (lambda x, w: x @ w, lambda x, w: (w.t() @ x.t()).t(), X, W),
    "softmax": (lambda x: x.softmax(-1), lambda x: x.exp() / x.exp().sum(-1, keepdim=True), X),
    "log_softmax": (lambda x: x.log_softmax(-1), lambda x: x - x.logsumexp(-1, keepdim=True), X),
    "layer norm": (
        lambda x: functional.layer_norm(x, (6,)),
        lambda x: (x - x.mean(-1, keepdim=True)) * (x.var(-1, keepdim=True, correction=0) + 1e-5).rsqrt(),
        X,
    ),
    "silu": (lambda x: functional.silu(x), lambda x: x / (1 + (-x).exp()), X),
    "gelu": (lambda x: functional.gelu(x), lambda x: 0.5 * x * (1 + torch.erf(x / 2**0.5)), X),
    "tanh": (torch.tanh, lambda x: 2 * torch.sigmoid(2 * x) - 1, X),
    "exp2": (torch.exp2, lambda x: (x * 0.6931471805599453).exp(), X),
    "a norm of norms": (
        lambda x: torch.stack([x[:2].norm(), x[2:].norm()]).norm() * x,
        lambda x: x.norm() * x,
        X,
    ),
    "squares of roots": (
        lambda x: (
            ((x.abs() + 3).sqrt() * 2).square() + torch.cat([(x.abs() + 2).rsqrt(), x]).square()[: len(x)]
        ),
        lambda x: 4 * (x.abs() + 3) + 1 / (x.abs() + 2),
        X,
    ),
    "the gradient of a norm": (
        lambda x: (
            (r := (x.square().mean(-1, keepdim=True) + 1).rsqrt())
            * (x - x * r * (x * x * r).mean(-1, keepdim=True))
        ),
        lambda x: (
            (r := (x.square().mean(-1, keepdim=True) + 1).rsqrt()) * x
            - r.pow(3) * x * (x * x).mean(-1, keepdim=True)
        ),
        X,
    ),
    "hypot": (lambda x: torch.hypot(x, x + 1), lambda x: (x.square() + (x + 1).square()).sqrt(), X),
    "log of products": (lambda x: (x.exp() * (2 * x).exp()).log(), lambda x: 3 * x, X),
    "batch norm folded": (
        lambda x, w, b: functional.batch_norm(x @ w, b, b.square() + 1),
        lambda x, w, b: ((x @ w) - b) * (b.square() + 1 + 1e-5).rsqrt(),
        X,
        W,
        B,
    ),
    "variance": (lambda x: x.var(0, correction=0), lambda x: x.square().mean(0) - x.mean(0).square(), X),
    "embedding by matmul": (
        lambda ids, w: functional.embedding(ids, w),
        lambda ids, w: (ids.unsqueeze(-1) == torch.arange(6)).to(w.dtype) @ w,
        IDS,
        W,
    ),
    "heads that share keys": (
        lambda q, k: functional.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        lambda q, k: functional.scaled_dot_product_attention(q, *[k.repeat_interleave(2, 1)] * 2),
        torch.randn(2, 4, 3, 8),
        torch.randn(2, 2, 3, 8),
    ),
    "attention": (
        lambda q: functional.scaled_dot_product_attention(q, q, q, is_causal=True),
        lambda q: (
            (q @ q.transpose(-1, -2) / 2).masked_fill(~torch.ones(3, 3).tril().bool(), -torch.inf).softmax(-1)
            @ q
        ),
        torch.randn(1, 2, 3, 4),
    ),
    "queries and keys scaled apart": (
        lambda q: ((q * 8**-0.25) @ (q * 8**-0.25).transpose(-1, -2)).softmax(-1) @ q,
        lambda q: functional.scaled_dot_product_attention(q, q, q),
        torch.randn(1, 2, 3, 8),
    ),
    "quantized and back": (
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 3, -8, 7),
        lambda x: ((x / 0.1).round() + 3).clamp(-8, 7).sub(3) * 0.1,
        X,
    ),
    "quantized by channels": (
        lambda x, b: torch.fake_quantize_per_channel_affine(
            x.t()[1:], b.abs() + 0.1, torch.tensor([3, 0, 1, 2, 5], dtype=torch.int32), 0, -8, 7
        ),
        lambda x, b: torch.stack(
            [
                ((x[:, i + 1] / (b[i].abs() + 0.1)).round() + z).clamp(-8, 7).sub(z) * (b[i].abs() + 0.1)
                for i, z in enumerate([3, 0, 1, 2, 5])
            ]
        ),
        X,
        B,
    ),
    "convolution of size one": (
        lambda x, w: functional.conv2d(x, w),
        lambda x, w: torch.einsum("bchw,oc->bohw", x, w[..., 0, 0]),
        torch.randn(2, 3, 4, 4),
        torch.randn(5, 3, 1, 1),
    ),
    "decimal constants": (lambda x: x * 0.9 + x * 0.1, lambda x: x.clone(), X),
    "logarithms of sums, in parts": (
        lambda x: x.softmax(-1),
        lambda x: (
            x
            - torch.cat([x[:, :3].logsumexp(-1, True), x[:, 3:].logsumexp(-1, True)], -1).logsumexp(-1, True)
        ).exp(),
        X,
    ),
    "logarithms of sums, the larger first": (
        lambda x: x.logsumexp(-1),
        lambda x: torch.logaddexp(x[:, :3].logsumexp(-1), x[:, 3:].logsumexp(-1)),
        X,
    ),
    "memory as it lies": (lambda x: x.t() * 2, lambda x: torch.as_strided(x * 2, (6, 4), (1, 6)), X),
    "another name": (lambda x: torch.ops.aten.true_divide(x, x + 9), lambda x: x * (x + 9).reciprocal(), X),
    "sine and cosine": (lambda x: x.sin().square() + x.cos().square(), torch.ones_like, X),
    "mean over windows": (
        lambda x: functional.avg_pool2d(x, 3, 2, 1),
        lambda x: functional.avg_pool2d(x, 3, 2, 1, divisor_override=1) / 9,
        torch.randn(1, 2, 6, 6),
    ),
    "mean over bags": (
        lambda w: functional.embedding_bag(torch.tensor([1, 2, 2, 0, 3]), w, torch.tensor([0, 2])),
        lambda w: torch.stack([w[[1, 2]].mean(0), w[[2, 0, 3]].mean(0)]),
        W,
    ),
    "largest of each bucket": (
        lambda b: torch.zeros(3).scatter_reduce(0, torch.tensor([0, 1, 1, 2, 2]), b, "amax"),
        lambda b: torch.stack([b[0], torch.maximum(b[1], b[2]), torch.maximum(b[3], b[4])]).relu(),
        B,
    ),
    "distances": (
        lambda x: torch.cdist(x, x[:2] + 1),
        lambda x: (x[:, None] - x[:2] - 1).square().sum(-1).sqrt(),
        X,
    ),
    "cast there and back": (lambda x: x.double().float() + 1, lambda x: x + 1, X),
}

DIFFERENT = {
    "other heads share keys": (
        lambda q, k: functional.scaled_dot_product_attention(q, k, k, enable_gqa=True),
        lambda q, k: functional.scaled_dot_product_attention(q, *[k.repeat(1, 2, 1, 1)] * 2),
        torch.randn(2, 4, 3, 8),
        torch.randn(2, 2, 3, 8),
    ),
    "sum of a product": (
        lambda x, w: x @ w,
        lambda x, w: x[:, :3] @ w[:3] + x[:, 3:] @ w[3:] * 1.000001,
        X,
        W,
    ),
    "epsilon": (lambda x: x.rsqrt(), lambda x: (x + 1e-6).rsqrt(), X.abs() + 1),
    "dimension": (lambda x: x.softmax(-1), lambda x: x.softmax(0), torch.randn(5, 5)),
    "tanh approximation": (lambda x: functional.gelu(x), lambda x: functional.gelu(x, approximate="tanh"), X),
    "unbiased variance": (lambda x: x.var(0), lambda x: x.var(0, correction=0), X),
    "order": (lambda x: x.cumsum(0), lambda x: x.flip(0).cumsum(0).flip(0), X),
    "scale of attention": (
        lambda q: functional.scaled_dot_product_attention(q, q, q),
        lambda q: functional.scaled_dot_product_attention(q, q, q, scale=0.5000001),
        torch.randn(1, 2, 3, 4),
    ),
    "type": (lambda x: x + 1, lambda x: (x + 1).double(), X),
    "index": (
        lambda ids, w: functional.embedding(ids, w),
        lambda ids, w: functional.embedding(ids.flip(0), w),
        IDS,
        W,
    ),
    "clamp": (lambda x: x.clamp(-1, 1), lambda x: x.clamp(-1, 1.5), X * 2),
    "absolute value": (lambda x: x.square().sqrt(), lambda x: x.clone(), X),
}


@pytest.mark.parametrize("seed", range(12))
def test_squares_of_roots_are_exact_whatever_the_numbers(seed):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    verdict = equivalent(*graphs(EQUAL["a norm of norms"][0], EQUAL["a norm of norms"][1], x))
    assert verdict.kind == "EQUAL", verdict
    cubes = equivalent(
        *graphs(lambda x: (x.square().sum().sqrt() ** 3) ** 2 * x, lambda x: x.square().sum() ** 3 * x, x)
    )
    assert cubes.kind == "EQUAL", cubes


@pytest.mark.parametrize("name", EQUAL)
def test_identities_are_certified(name):
    verdict = equivalent(*graphs(*EQUAL[name]))
    assert (verdict.kind, verdict.samples) == ("EQUAL", 2), verdict
    assert verdict.bound < 1e-5


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_functions_are_told_apart(name):
    verdict = equivalent(*graphs(*DIFFERENT[name]))
    close = name in ("epsilon", "sum of a product", "tanh approximation", "scale of attention")
    assert verdict.kind == ("APPROXIMATE" if close else "DIFFERENT"), verdict


def test_an_approximation_says_how_far_it_is_away_at_most():
    before, after, inputs = graphs(lambda x: x * 3, lambda x: x * 3.003, X)
    verdict = equivalent(before, after, inputs)
    assert verdict.distance == pytest.approx(1e-3, rel=1e-2)
    assert "at most 0.001 of the largest value away" in str(verdict)


def test_a_finding_names_output_element_values_and_node():
    before, after, inputs = graphs(lambda x: (x.exp(), x * 2), lambda x: (x.exp(), x * 3), X)
    finding = equivalent(before, after, inputs).finding
    assert finding.output == "output 1"
    assert finding.node == "mul"
    assert finding.comparison.second == pytest.approx(1.5 * finding.comparison.first)


ROWS = torch.randn(5, 3)


def test_only_what_checks_its_indices_is_asked_how_far_they_go(monkeypatch):
    given = [ROWS, torch.tensor([1, 0, 3]), torch.tensor([0, 2])]
    bags = make_fx(lambda x, i, o: functional.embedding_bag(i, x, o))(*given)
    monkeypatch.setattr(fx, "Interpreter", None)
    assert not list(inputs_at_bounds(bags, given))


def test_constants_changed_in_place_do_not_reach_the_other_graph():
    class Table(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.tensor([1, 2, 3, 4])

        def forward(self, x):
            return x * self.table.view(4, 1)

    before = make_fx(Table())(X)
    after = make_fx(Table())(X)
    (constant,) = [n for n in after.graph.nodes if n.op == "get_attr"]
    getattr(after, constant.target).add_(1)
    verdict = equivalent(before, after, [X])
    assert verdict.kind == "DIFFERENT"
    assert equivalent(before, before, [X]).kind == "EQUAL"


def test_random_numbers_are_compared_call_by_call():
    def dropped(x):
        return torch.rand_like(x) * x + torch.rand_like(x)

    before, same, inputs = graphs(dropped, dropped, X)
    assert equivalent(before, same, inputs).kind == "EQUAL"
    swapped = make_fx(lambda x: torch.rand_like(x) + torch.rand_like(x) * x)(X)
    assert equivalent(before, swapped, inputs).kind == "DIFFERENT"


def test_values_written_to_inputs_count():
    def step(amount):
        def run(x, state):
            state.add_(x, alpha=amount)
            return x * 2

        return torch.func.functionalize(run)

    before, after, inputs = graphs(step(1), step(2), X, torch.zeros(4, 6))
    verdict = equivalent(before, after, inputs)
    assert verdict.kind == "DIFFERENT"
    assert "after the run" in verdict.finding.output


def test_what_has_no_rule_is_named():
    before, after, inputs = graphs(
        lambda x: torch.linalg.matrix_exp(x) + 1,
        lambda x: torch.linalg.matrix_exp(x.t()).t() + 1,
        torch.randn(3, 3, dtype=torch.float64),
    )
    verdict = equivalent(before, after, inputs)
    assert verdict.kind == "UNPROVED"
    assert any("matrix_exp" in name for name in verdict.needed)


def test_a_graph_that_checks_its_errors_is_evaluated():
    a, b = torch.eye(4) * 4 + torch.rand(4, 4), torch.randn(4, 2)
    before, after = (
        fxpasses.capture(lambda a, b, t=t: torch.linalg.solve(a * t, b * t), a, b).forward for t in (1.0, 1.5)
    )
    token = [torch.empty(0)] * (len(before.graph.find_nodes(op="placeholder")) - 2)
    assert "with_effects" in str(after.graph)
    assert equivalent(before, after, [*token, a, b]).kind == "EQUAL"


def test_only_what_changed_is_evaluated():
    def deep(x):
        for _ in range(30):
            x = torch.sin(x) * 2
        return x

    before, after, inputs = graphs(deep, deep, X)
    last = [n for n in after.graph.nodes if n.op == "call_function"][-1]
    last.target = torch.ops.aten.div.Tensor
    last.args = (last.args[0], 0.5)
    verdict = Original(before, inputs).equivalent(after)
    assert verdict.kind == "EQUAL"
    assert verdict.evaluated == 1 < verdict.calls


def test_symbolic_sizes_are_tried_at_others():
    captured = fxpasses.capture(
        lambda x: x.sum(-1) / x.shape[-1], torch.randn(4, 6, requires_grad=True), dynamic=True
    )
    before = captured.joint
    size = next(n for n in before.graph.nodes if isinstance(n.meta.get("val"), torch.SymInt) and n.users)
    assert size.op == "placeholder"
    inputs = _inputs(before)
    assert equivalent(before, before, inputs).kind == "EQUAL"


def _inputs(gm: fx.GraphModule):
    def one(value):
        if isinstance(value, torch.SymInt):
            return value.node.hint
        return torch.randn([int(s) if isinstance(s, int) else s.node.hint for s in value.shape])

    return [one(n.meta["val"]) for n in gm.graph.find_nodes(op="placeholder")]


def test_wrong_calls_are_errors_of_their_own():
    before, after, _ = graphs(lambda x: x + 1, lambda x: x + 1, X)
    with pytest.raises(ValueError, match="1 inputs was given 2"):
        equivalent(before, after, [X, X])
    index = make_fx(lambda x, i: x[i])(X, torch.tensor([0]))
    with pytest.raises(ValueError, match="does not run on the example inputs"):
        equivalent(index, index, [X, torch.tensor([9])])


def test_a_graph_that_raises_where_the_one_before_does_not_is_another():
    before, after, inputs = graphs(lambda x: x + 1, lambda x: x[[3]] + 1, X)
    index = next(n for n in after.graph.nodes if n.target is torch.ops.aten.index.Tensor)
    index.args = (index.args[0], [torch.tensor([9])])
    verdict = equivalent(before, after, inputs)
    assert verdict.kind == "DIFFERENT"
    assert "evaluating the graph after raises IndexError" in str(verdict)


def test_an_input_that_is_read_after_it_was_written_to_has_the_new_value():
    def written(x, y):
        x.copy_(y.sin())
        return x, x * 2

    before, after, inputs = graphs(written, written, X.clone(), X)
    (output,) = after.graph.find_nodes(op="output")
    (sine,) = after.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    output.args = ([sine, *output.args[0][1:]],)
    assert equivalent(before, after, inputs).kind == "EQUAL"
    output.args = ([after.graph.find_nodes(op="placeholder")[1], *output.args[0][1:]],)
    assert equivalent(before, after, inputs).kind == "DIFFERENT"


AT_NUMBERS = {
    "a scaled comparison": (lambda x: (x * 0.1 > 0.3) * x, lambda x: (x > 3) * x, 3.0),
    "a sum": (lambda x: (x + 0.1 + 0.2 >= 0.3) * x, lambda x: (x >= 0) * x, 0.0),
    "integers": (lambda x: (x * 10).floor() / 10, lambda x: (x / 0.1).floor() / 10, 0.3),
    "a half": (lambda x: (x * 0.1).round(), lambda x: (x / 10).round(), 25.0),
    "a rounded quotient": (
        lambda x: torch.div(x, 0.1, rounding_mode="floor"),
        lambda x: (x * 10).floor(),
        0.7,
    ),
}


@pytest.mark.parametrize("name", AT_NUMBERS)
def test_what_is_compared_is_equal_where_it_is_in_real_numbers(name):
    before, after, at = AT_NUMBERS[name]
    x = torch.tensor([at, -at, at + 1], dtype=torch.float64)
    one, other, _ = graphs(before, after, x)
    assert Original(one, [x]).find_difference(other) is None


def test_a_comparison_that_takes_equal_numbers_otherwise_is_told():
    x = torch.tensor([3.0, 1.0], dtype=torch.float64)
    one, other, _ = graphs(lambda x: (x * 0.1 > 0.3) * x, lambda x: (x >= 3) * x, x)
    finding = Original(one, [x]).find_difference(other)
    assert finding is not None
    assert "element [0]: 0 became 3" in str(finding)


def test_a_label_to_ignore_is_tried_where_all_others_occur():
    labels, x = torch.tensor([0, 3, 1, 2]), torch.randn(4, 4)

    def picked(x, labels):
        at = torch.where(labels != -100, labels, 0)[:, None]
        return torch.where(labels != -100, x.gather(1, at)[:, 0], 0.0)

    made = list(inputs_at_bounds(make_fx(picked)(x, labels), [x, labels]))[-1]
    assert (made[1] == -100).any()


@pytest.mark.parametrize(
    "taken",
    [lambda x, i: torch.fmod(i, 8) * x[:, 0], lambda x, i: i.sum(), lambda x, i: i.cumsum(0).sort()[0]],
    ids=["made to floats", "summed", "sorted"],
)
def test_integers_that_are_no_indices_go_far_to_both_sides(taken):
    x, given = torch.randn(4, 4), torch.tensor([3, 1, 2, 0])
    made = list(inputs_at_bounds(make_fx(taken)(x, given), [x, given]))[-1]
    assert made[1].min() < -1000
    assert made[1].max() > 1000


def test_an_index_that_is_computed_of_two_inputs_goes_to_its_end():
    table, row, column = torch.randn(150, 2), torch.tensor([0, 1, 2, 3]), torch.tensor([9, 1, 2, 3])
    made = list(
        inputs_at_bounds(make_fx(lambda t, i, j: t[i * 10 + j])(table, row, column), [table, row, column])
    )[-1]
    assert made[1].max() == 14
    assert made[1].min() == -15
    table[made[1] * 10 + made[2]]  # both at once


def test_flags_that_floats_are_made_of_stay_flags():
    x, flags = torch.randn(4, 4), torch.tensor([1, 1, 0, 1])
    assert not list(inputs_at_bounds(make_fx(lambda x, i: (1 - i) * x[:, 0])(x, flags), [x, flags]))


def test_labels_whose_view_has_a_symbolic_size():
    x, labels = torch.randn(2, 3, 4), torch.randint(0, 4, (2, 3))

    def loss(x, labels):
        return functional.cross_entropy(x.flatten(0, 1), labels.flatten())

    captured = fxpasses.capture(loss, x, labels, dynamic=True)
    made = list(inputs_at_bounds(captured.forward, captured.inputs))[-1]
    assert any(
        v.dtype is torch.int64 and bool((v == -100).any()) for v in made if isinstance(v, torch.Tensor)
    )


def test_what_an_index_is_computed_from_goes_far_beside_a_table_of_floats():
    table, keys = torch.randn(7, 2), torch.randint(0, 1000, (5,))
    gm = make_fx(lambda table, keys: torch.nn.functional.embedding((keys * 31 + 7) % 7, table))(table, keys)
    assert [bool(made[1].abs().max() > 2**31) for made in inputs_at_bounds(gm, [table, keys])] == [
        False,
        True,
    ]


def test_collectives_are_never_called():
    """There is no process group: a call would raise. Other processes may look at other graphs, or at none."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0")),))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    verdict = equivalent(gm, copy.deepcopy(gm), [torch.randn(3)])
    assert verdict.kind == "UNPROVED"
    assert verdict.finding is not None
    assert "other processes" in str(verdict)


def test_each_step_of_a_recurrence_takes_the_exponentials_of_the_last_once(monkeypatch):
    """Three uses of the last step in each of six are 729 if each computes what it takes again."""

    def forward_variables(x):
        state = x[0]
        for row in x[1:]:
            state = torch.logsumexp(torch.stack([state, state.roll(1), state.roll(2)]), 0) + row
        return state

    counted = []
    exp = Arithmetic.exp
    monkeypatch.setattr(Arithmetic, "exp", lambda self, a: counted.append(0) or exp(self, a))
    torch.manual_seed(0)
    x = torch.randn(7, 4)
    before, after, inputs = graphs(forward_variables, lambda x: forward_variables(x * 1).exp().log(), x)
    assert equivalent(before, after, inputs).kind == "EQUAL"
    assert len(counted) < 700
