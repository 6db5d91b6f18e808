"""``fxpasses.testing.prove``: right and wrong passes, by match site."""

import operator
import re
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

import fxpasses
from fxpasses import Contract, Pass, ValueMismatchError, claim, graph_pass, insert_call, pattern_pass
from fxpasses.exact.fields import Field
from fxpasses.exact.machine import Machine
from fxpasses.exact.run import Run
from fxpasses.graphs.rewriting import constants_of
from fxpasses.passes import EliminateCommonSubexpressions
from fxpasses.testing import NoSiteError, WrongPassError, prove
from fxpasses.testing.plugin import prove_pass  # noqa: F401  (a fixture)

aten, prims = torch.ops.aten, torch.ops.prims


def model(x):
    return torch.exp(x) + torch.exp(x).sin() + torch.exp(2 * x) + torch.exp(2 * x).cos()


def test_a_library_pass_is_proved_site_by_site():
    proof = prove(EliminateCommonSubexpressions(), model, torch.randn(3, 4, requires_grad=True))
    assert proof.ok
    assert {site.graph for site in proof.sites} >= {"joint"}
    proof.raise_if_wrong()


@dataclass(frozen=True)
class HalfRight(Pass):
    """Doubles by adding; of a product with three it takes the double, too."""

    name: ClassVar[str] = "half_right"
    contract: ClassVar[Contract] = Contract(graphs="inference")

    def apply(self, gm):
        changed = False
        for node in gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor):
            if node.args[1] in (2, 3) and claim(node):
                node.target, node.args = aten.add.Tensor, (node.args[0], node.args[0])
                changed = True
        return changed


def test_the_wrong_site_is_named():
    proof = prove(HalfRight(), lambda x: (x * 2, x * 3), torch.randn(4))
    kinds = [site.verdict.kind for site in proof.sites]
    assert kinds == ["EQUAL", "DIFFERENT", "DIFFERENT"]  # each site alone, then all
    with pytest.raises(WrongPassError, match=r"site 1: node 'mul_1'"):
        proof.raise_if_wrong()


def test_pattern_passes_and_modules():
    fuse = pattern_pass(
        lambda x, y: torch.sigmoid(x) * x + y,
        lambda x, y: nn.functional.silu(x) + y,
        (torch.randn(2, 2),) * 2,
        name="silu",
    )

    class Gate(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            h = self.linear(x)
            return torch.sigmoid(h) * h + x

    proof = prove(fuse, Gate(), torch.randn(3, 4), decompose=False)
    assert proof.ok, proof


def test_a_pass_that_rewrites_nothing_is_no_proof():
    with pytest.raises(NoSiteError, match="changes nothing"):
        prove(HalfRight(), operator.neg, torch.randn(3))


@pytest.mark.slow
def test_without_a_model_a_pattern_is_proved_on_itself():
    right = pattern_pass(
        lambda x, y: torch.sigmoid(x) * x + y,
        lambda x, y: nn.functional.silu(x) + y,
        (torch.randn(2, 3),) * 2,
        name="silu",
    )
    proof = prove(right, decompose=False)
    assert proof.ok, proof
    assert {site.setting for site in proof.sites} >= {
        "as it is",
        "bfloat16",
        "not contiguous",
        "symbolic sizes",
        "1 for 3",
    }
    assert "| its pattern | inference | EQUAL | as it is, bfloat16, float16," in proof.table()


@pytest.mark.slow
def test_conditions_under_which_a_pass_is_right_are_found():
    flips = pattern_pass(
        lambda x: x.exp().sum(-1),
        lambda x: x.exp()[..., : x.shape[-1] // 2 * 2].sum(-1),
        (torch.randn(2, 4),),
        name="pairs",
    )
    proof = prove(flips, decompose=False)
    assert [c for c in proof.conditions if "DIFFERENT where: odd sizes" in c], proof
    with pytest.raises(WrongPassError, match="odd sizes"):
        proof.raise_if_wrong()


def retargeted(before, after, *numbers):
    """A pass that calls another operator, perhaps with other numbers."""

    @graph_pass(name="other")
    def item(gm):
        nodes = [n for n in gm.graph.find_nodes(op="call_function", target=before) if claim(n)]
        for node in nodes:
            node.target, node.args = after, (*node.args[: len(node.args) - len(numbers)], *numbers)
        return bool(nodes)

    return item


@graph_pass(name="writes")
def writes(gm):
    """Writes to the constant that a graph holds."""
    (constant,) = constants_of(gm).values()
    with torch.no_grad():
        constant[7] += 0.01
    return True


def labelled(x, labels):
    return nn.functional.cross_entropy(x, labels, ignore_index=-100)


def looked_up(ids):
    return torch.tensor([0.5 * i + 1 for i in range(8)])[ids] * 2


@pytest.mark.parametrize(
    ("item", "model", "inputs"),
    [
        (
            retargeted(aten.ge.Scalar, aten.gt.Scalar),
            lambda x: torch.where(x >= 1, x * 2, x),
            [torch.randn(3, 4)],
        ),
        (
            retargeted(aten.ne.Scalar, aten.gt.Scalar, 0),
            labelled,
            [torch.randn(6, 5), torch.arange(6) % 4 + 1],
        ),
        (writes, looked_up, [torch.arange(12).view(3, 4) % 5]),
    ],
    ids=["ties", "a label that is zero", "an element of a constant"],
)
def test_what_random_samples_do_not_show_is_wrong(item, model, inputs):
    inputs[0].requires_grad_(inputs[0].is_floating_point())
    proof = prove(item, model, *inputs)
    (*_, site) = [site for site in proof.sites if site.findings]
    assert site.said == "DIFFERENT"
    assert not proof.ok
    with pytest.raises(WrongPassError, match="though on random inputs EQUAL"):
        proof.raise_if_wrong()


def test_digits_that_are_lost_are_said_and_those_that_are_not():
    def logarithm(x):
        return x.exp().log1p()

    inputs = [torch.randn(8, 16)]
    wrong = pattern_pass(lambda x: x.log1p(), lambda x: (x + 1).log(), inputs, name="log")
    proof = prove(wrong, logarithm, *inputs, decompose=False)
    assert not proof.ok
    assert proof.sites[-1].said == "LESS PRECISE"
    right = pattern_pass(lambda x: x.log1p(), lambda x: x.log1p().clone(), inputs, name="same")
    proof = prove(right, logarithm, *inputs, decompose=False)
    assert proof.ok
    assert "no other value at edges, and no digits lost" in str(proof)


def test_each_site_that_loses_digits_is_said_to():
    def model(x):
        for _ in range(3):
            x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() + 0.5
        return x

    inputs = [torch.randn(4, 1)]
    low = pattern_pass(
        lambda x: x.rsqrt(), lambda x: x.bfloat16().rsqrt().float(), inputs, name="low", graphs=["inference"]
    )
    proof = prove(low, model, torch.randn(4, 16))
    assert [site.said for site in proof.sites] == ["LESS PRECISE"] * 4


def test_labels_to_ignore_stand_in_no_proofs_way():
    labels = torch.tensor([1, 4, -100, 0, 2, 3])
    right = retargeted(aten.ne.Scalar, aten.gt.Scalar)
    proof = prove(right, labelled, torch.randn(6, 5), labels)
    assert {site.said for site in proof.sites} == {"EQUAL"}


def test_symbolic_sizes_stay_symbolic():
    @graph_pass(name="rounds")
    def rounds(gm):
        """Counts in bfloat16."""
        nodes = [
            n
            for n in gm.graph.find_nodes(op="call_function", target=prims.convert_element_type.default)
            if n.args[0].target is prims.iota.default
        ]
        for node in nodes:
            with gm.graph.inserting_before(node):
                args = (node.args[0], torch.bfloat16)
                half = insert_call(gm.graph, prims.convert_element_type.default, args, {}, like=node)
                node.args = (half, torch.float32)
        return bool(nodes)

    def model(x, w):
        return torch.arange(x.shape[1]).float() * w * x

    x, w = torch.randn(2, 9), torch.randn((), requires_grad=True)
    proof = prove(rounds, model, x, w, dynamic=True)
    assert [site.said for site in proof.sites if site.graph == "joint"] == ["LESS PRECISE"]


def test_the_plugin_fails_the_tests_of_wrong_passes(prove_pass):  # noqa: F811
    def times(number):
        return pattern_pass(lambda x: x.exp() * 2, lambda x: x.exp() * number, [torch.ones(2)], name="p")

    assert prove_pass(times(2.0), lambda x: x.exp() * 2, torch.randn(2)).ok
    with pytest.raises(WrongPassError, match="computes something else"):
        prove_pass(times(3), lambda x: x.exp() * 2, torch.randn(2))


@pytest.mark.parametrize(("size", "threads"), [(4, 1), (1 << 15, 2)])
def test_graphs_of_small_values_are_judged_on_one_thread(size, threads):
    seen = []

    def looks(gm):
        seen.append(torch.get_num_threads())
        return False

    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(NoSiteError):
            prove(graph_pass(looks), torch.sin, torch.randn(size))
        assert set(seen) == {threads}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_drops_nothing_is_as_exact_as_its_definition(dtype):
    fused = torch.nn.functional.scaled_dot_product_attention
    inputs = [torch.randn(2, 2, 8, 16).to(dtype) for _ in range(3)]
    written_out = pattern_pass(
        lambda q, k, v: fused(q, k, v),
        lambda q, k, v: ((q @ k.mT) * 0.25).softmax(-1) @ v,
        inputs,
        name="written out",
        graphs=["inference"],
    )
    proof = prove(written_out, fused, *inputs)
    assert proof.ok, proof


def test_a_graph_that_raises_on_values_of_a_window_is_another_one():
    table = torch.randn(10, 6)

    @graph_pass(graphs=["inference"])
    def drops_the_clamp(gm):
        (node,) = gm.graph.find_nodes(op="call_function", target=aten.embedding.default)
        node.args = (node.args[0], node.args[1].args[0].args[0])
        return True

    proof = prove(
        drops_the_clamp, lambda x: nn.functional.embedding((x * 10).long().clamp(0, 9), table), torch.rand(5)
    )
    assert not proof.ok
    assert "raises IndexError" in str(proof)


def test_other_numbers_than_the_example_of_a_pattern_are_tried():
    """A pattern that takes a number matches any: the larger of both is the leaky one for slopes up to 1."""
    item = pattern_pass(
        lambda x, slope: torch.where(x > 0, x, x * slope),
        lambda x, slope: torch.maximum(x, x * slope),
        [torch.randn(4, 6), 0.01],
        name="leaky_by_maximum",
    )
    proof = prove(item)
    assert not proof.ok
    assert proof.conditions == ["its pattern: DIFFERENT where: slope = 3.0"]
    assert "symbolic sizes" in {site.setting for site in proof.sites}  # in which the number is no symbol


def test_what_cannot_be_differentiated_is_tried_in_all_settings():
    def replaced(x, mean, var):
        scaled = (x - mean) * (var + 1e-5).rsqrt()
        return scaled + 1 if x.shape[0] % 2 else scaled

    item = pattern_pass(
        lambda x, mean, var: nn.functional.batch_norm(x, mean, var),
        replaced,
        [torch.randn(4, 6), torch.randn(6), torch.ones(6)],
        name="wrong_for_odd_batches",
    )
    proof = prove(item)
    assert "its pattern: DIFFERENT where: odd sizes" in proof.conditions


def test_a_setting_that_cannot_be_captured_is_a_condition():
    item = pattern_pass(
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127) * 1,
        [torch.randn(4, 6)],
        name="fake_quantize",
        numerics="none",
    )
    proof = prove(item)
    assert proof.ok
    missing = [text for text in proof.conditions if "cannot be captured" in text]
    assert missing == [f"{name}: cannot be captured where: {setting}" for name, setting in proof.uncaptured]


def test_the_lower_end_of_integers_is_tried():
    item = pattern_pass(
        lambda q, scale: (q.to(torch.float32) - 7.0) * scale,
        lambda q, scale: (q - 7).to(torch.float32) * scale,  # wraps
        [torch.zeros(4, 6, dtype=torch.int8), torch.randn(1, 6)],
        name="subtracts_in_int8",
    )
    assert not prove(item).ok


def test_boundaries_are_sorted():
    item = pattern_pass(
        lambda x, bounds: torch.bucketize(x, bounds),
        lambda x, bounds: (x.unsqueeze(-1) > bounds).sum(-1),
        [torch.randn(4, 6), torch.randn(5)],
        name="counts",
    )
    assert prove(item).ok


def rotated(x, y, angles):
    turns = torch.polar(torch.ones_like(angles), angles)
    given = torch.view_as_complex(x.unflatten(-1, (-1, 2))), torch.view_as_complex(y.unflatten(-1, (-1, 2)))
    return [torch.view_as_real(z * turns).flatten(-2) for z in given]


def by_parts(x, y, angles, sign=1):
    def one(z):
        a, b = z[..., ::2], z[..., 1::2]
        cos, sin = angles.cos(), sign * angles.sin()
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)

    return [one(x), one(y)]


@pytest.mark.parametrize(("sign", "said"), [(1, "EQUAL"), (-1, "DIFFERENT")])
def test_complex_numbers_are_exact(sign, said):
    """Rotary embeddings as complex products are those by parts."""
    examples = [torch.randn(2, 4, 6), torch.randn(2, 4, 6), torch.randn(4, 3)]
    item = pattern_pass(
        rotated,
        lambda x, y, angles: by_parts(x, y, angles, sign),
        examples,
        name="rotary",
        graphs="inference",
    )
    proof = prove(item)
    assert {site.said for site in proof.sites} == {said}
    assert not any(site.verdict.opaque for site in proof.sites)


@pytest.mark.parametrize(
    "before",
    [
        lambda z, w: torch.where(z.real > 0, z, 2.0),
        lambda z, w: torch.where(z.real > 0, z, w),
        lambda z, w: nn.functional.pad(z, (1, 0), value=1.0),
        lambda z, w: torch.cat([z, w.to(z.dtype)]),
        lambda z, w: z + 1,
        lambda z, w: z * w - 2,
    ],
)
def test_numbers_and_real_tensors_beside_complex_ones_have_no_imaginary_part(before):
    """By the exact evaluation, against torch."""
    x, w = torch.randn(4, 6, 2, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)

    def parts(x, w):
        return torch.view_as_real(before(torch.view_as_complex(x), w))

    gm = fxpasses.capture(parts, x, w).forward
    run = Run(Machine(Field(0), 0), gm)
    arithmetic = run._machine.arithmetic
    (found,) = run.evaluate(arithmetic.dual(x), arithmetic.dual(w))
    torch.testing.assert_close(found.witness, parts(x, w))


@pytest.mark.slow
def test_a_sum_of_complex_tensors():
    """It is lowered to views of another type."""
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    item = pattern_pass(
        lambda x, y: torch.view_as_real(torch.fft.rfft(x) + torch.fft.rfft(y)),
        lambda x, y: torch.view_as_real(torch.fft.rfft(x + y)),
        [x, y],
        name="transform_of_sum",
    )
    assert {site.said for site in prove(item).sites} <= {"EQUAL", "UNPROVED"}


def test_parameters_are_named():
    """In a proof and in a value check: by what they are in the model, not by AOTAutograd's numbers alone."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    example = [torch.randn(3, 8), torch.randn(3, 8)]
    wrong = pattern_pass(lambda g, y: g * (1 - y * y), lambda g, y: g * (1 - y), example, expect_match=False)
    named = r"gradient of primals_\d \(0\.(weight|bias)\)"
    assert re.search(f"DIFFERENT: {named}, element", str(prove(wrong, model, torch.randn(3, 4))))
    options = {"passes": ["default", wrong], "check": "values", "cache": "off", "compiler": "eager"}
    compiled = torch.compile(model, backend="fxpasses", options=options)
    with pytest.raises(ValueMismatchError, match=f"{named}: element"):
        compiled(torch.randn(3, 4)).sum().backward()
