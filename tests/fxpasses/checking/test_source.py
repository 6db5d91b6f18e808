"""Passes of every make written down in a repro file, and the lines of a pass that raises."""

from __future__ import annotations

import enum
import functools
from dataclasses import dataclass

import pytest
import torch

import fxpasses
from fxpasses.checking.faults.repro import replay
from tests.fxpasses.checking.repros import in_this_process

aten = torch.ops.aten


class Which(enum.Enum):
    SIN = "sin"
    COS = "cos"


@dataclass(frozen=True)
class Setting:
    factor: float = 1.0
    which: Which = Which.COS


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def times_two(x):
    return x * 2.0


def by_pattern_with_a_contract():
    def pattern(x):
        return x * 2.0

    def replacement(x):
        return x * 3.0

    return fxpasses.pattern_pass(
        pattern, replacement, (torch.empty(4),), name="tripled", numerics="bitwise", expect_match=False
    )


def by_pattern_of_lambdas():
    return fxpasses.pattern_pass(lambda x: x * 2.0, lambda x: x * 3.0, (torch.empty(4),), name="of_lambdas")


def by_pattern_with_a_guard_and_a_number():
    def smaller(x, factor):
        return x * (factor * 0.5)

    return fxpasses.pattern_pass(
        lambda x, factor: x * factor,
        smaller,
        (torch.empty(4), 0.375),
        where=lambda match: True,
        name="guarded",
    )


def by_pattern_of_another_function():
    return fxpasses.pattern_pass(times_two, lambda x: x * 3.0, (torch.empty(4),), name="imported")


def multiplications(gm):
    return gm.graph.find_nodes(op="call_function", target=aten.mul.Tensor)


def scaled(gm, setting):
    for node in multiplications(gm):
        node.args = (node.args[0], setting.factor if setting.which is Which.COS else 5.0)
    return True


def by_lambda():
    return fxpasses.graph_pass(lambda gm: scaled(gm, Setting(7.0)), name="of_a_lambda")


def by_partial():
    return fxpasses.graph_pass(functools.partial(scaled, setting=Setting(7.0, Which.SIN)), name="partly")


def by_function_with_an_option():
    @fxpasses.graph_pass
    def multiplied(gm, by: float = 2.0):
        return scaled(gm, Setting(by))

    return multiplied(by=9.0)


def by_class_with_options():
    @dataclass(frozen=True)
    class Multiply(fxpasses.Pass):
        name = "multiply"
        setting: Setting = Setting()
        names: tuple[object, ...] = ()

        def apply(self, gm):
            return scaled(gm, self.setting)

    return Multiply(Setting(7.0), (Which.SIN, torch.device("cpu"), scaled))


def by_names_bound_by_statements():
    def caught(gm):
        try:
            return gm.nothing
        except AttributeError as missing:
            match [str(missing), 7.0]:
                case [_, factor, *rest] as both:
                    return scaled(gm, Setting(factor + len(rest) * len(both)))

    return fxpasses.graph_pass(caught, name="catches")


def by_functions_named_by_hand():
    def made(factor):
        def run(gm):
            return scaled(gm, Setting(run.times * factor(7.0)))

        run.__name__, run.times = f"scaled_by_{factor.__name__}", 2.0
        return run

    factor = lambda value: value + 0.5  # noqa: E731
    factor.__name__ = "more"
    return fxpasses.graph_pass(made(factor), name="named by hand")


WRONG = [
    by_functions_named_by_hand,
    by_names_bound_by_statements,
    by_pattern_with_a_contract,
    by_pattern_of_lambdas,
    by_pattern_with_a_guard_and_a_number,
    by_pattern_of_another_function,
    by_lambda,
    by_partial,
    by_function_with_an_option,
    by_class_with_options,
]


def error_of(item, **options):
    options = {"passes": [item], "compiler": "eager", "check": "values", **options}
    with pytest.raises(Exception) as caught:
        torch.compile(lambda x: (x * 2.0).sin(), backend="fxpasses", options=options)(torch.randn(4))
    return getattr(caught.value, "inner_exception", caught.value)


@pytest.mark.parametrize("make", WRONG)
def test_a_pass_of_any_make_gets_a_repro_file(make):
    error = error_of(make())
    assert isinstance(error, fxpasses.ValueMismatchError)
    status, output, errors = in_this_process(error.repro)
    assert status == 1, errors
    assert "is wrong" in output


def test_a_repro_file_makes_inputs_whose_elements_share_memory():
    @fxpasses.graph_pass
    def traced_size(gm):
        divisions = list(gm.graph.find_nodes(op="call_function", target=aten.div.Scalar))
        for node in divisions:
            node.args = (node.args[0], 12)
        return bool(divisions)

    def mean(x):
        return x.sin().mean()

    options = {"passes": [traced_size], "compiler": "eager", "check": "values"}
    with pytest.raises(fxpasses.ValueMismatchError) as caught:  # the gradient of the mean is expanded
        torch.compile(mean, backend="fxpasses", options=options, dynamic=True)(
            torch.ones(3, 4, requires_grad=True)
        )
    status, output, errors = in_this_process(caught.value.repro)
    assert status == 1, errors
    assert "is wrong" in output


def by_a_nested_helper():
    def deepest(node):
        return {}[node.name]

    def helper(node):
        return deepest(node)

    @fxpasses.graph_pass
    def looks_up(gm):
        for node in multiplications(gm):
            helper(node)
        return True

    return looks_up, "deepest"


def by_a_guard():
    def never(match):
        raise ZeroDivisionError("in the guard")

    return fxpasses.pattern_pass(
        times_two, times_two, (torch.empty(4),), where=never, name="guarded"
    ), "never"


def by_a_lambda():
    return fxpasses.graph_pass(lambda gm: gm.graph.nothing, name="of_a_lambda"), "<lambda>"


def by_recursion():
    def again(depth):
        return 1 // depth + again(depth - 1)

    return fxpasses.graph_pass(lambda gm: again(20), name="recursive"), "more"


RAISING = [by_a_nested_helper, by_a_guard, by_a_lambda, by_recursion]


@pytest.mark.parametrize("make", RAISING)
def test_an_exception_shows_the_line_in_the_pass(make):
    item, expected = make()
    error = error_of(item, check="structure")
    assert isinstance(error, fxpasses.PassError)
    assert f"{__file__}:" in error.lines[-1]
    assert any(expected in line for line in error.lines)
    assert error.lines[-1] in str(error)
    assert len(error.lines) < 8


@pytest.mark.parametrize("make", [by_a_nested_helper, by_a_guard, by_a_lambda])
def test_a_pass_that_raises_gets_a_repro_file(make):
    error = error_of(make()[0])
    status, _, errors = in_this_process(error.repro)
    assert status == 1, errors


def test_a_repro_tells_the_fault_that_was_found(capsys):
    @fxpasses.graph_pass(numerics="bitwise")
    def drops_zeros(gm):
        for node in gm.graph.find_nodes(op="call_function", target=aten.add.Tensor):
            node.replace_all_uses_with(node.args[0])
            gm.graph.erase_node(node)
        return True

    def graph(x):
        return (aten.add.Tensor(x, 0.0),)

    told = {}
    for fault in ("value", "aliasing", "structure", ""):
        assert replay(graph, [torch.tensor([-0.0])], drops_zeros, bitwise=True, fault=fault) == 1
        told[fault] = capsys.readouterr().out
    assert "0 became -0" in told["value"]
    assert "memory" not in told["value"]
    assert all("memory" in told[fault] for fault in ("aliasing", "structure", ""))
