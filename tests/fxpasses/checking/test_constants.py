"""Passes that write to the tensors that a graph holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fxpasses
from fxpasses._torch import disable_current_modes
from fxpasses.graphs.rewriting import constants_of, copy_graph
from tests.fxpasses.checking.repros import in_this_process

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def f(x):
    return x.sin() * torch.tensor([2.0, 3.0, 4.0]) + x.cos()


def held(gm):
    return list(gm.graph.find_nodes(op="get_attr"))


def doubled_in_place(gm):
    for name in {str(n.target) for n in held(gm)}:
        with disable_current_modes():
            getattr(gm, name).mul_(2)


@fxpasses.graph_pass
def doubles(gm):
    "Wrong on purpose."
    doubled_in_place(gm)
    return True


@fxpasses.graph_pass
def doubles_and_halves(gm):
    doubled_in_place(gm)
    for node in held(gm):
        with gm.graph.inserting_after(node):
            half = gm.graph.call_function(aten.mul.Tensor, (node, 0.5))
        half.meta.update(node.meta)
        node.replace_all_uses_with(half, delete_user_cb=lambda user, half=half: user is not half)
    return True


@fxpasses.graph_pass
def large_constant(gm):
    "Wrong on purpose: the constant becomes one that is not written as numbers."
    for node in held(gm):
        with disable_current_modes():
            setattr(gm, str(node.target), torch.full((3,), float("inf")))
    return True


def run(item, example=None, **options):
    options = {"passes": [item], "compiler": "eager", "check": "values", **options}
    example = torch.ones(3) if example is None else example
    return torch.compile(f, backend="fxpasses", options=options)(example)


@pytest.mark.parametrize("grad", [False, True])
def test_a_constant_that_is_written_to_is_seen(grad):
    with pytest.raises(Exception) as caught:
        run(doubles, torch.ones(3, requires_grad=grad))
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, fxpasses.ValueMismatchError)
    assert error.repro_calls == 1
    status, output, errors = in_this_process(error.repro)
    assert status == 1, errors
    assert "is wrong" in output
    assert "CONSTANTS" in Path(error.repro).read_text()


@pytest.mark.parametrize("how", ["written", "replaced", "data", "numpy"])
def test_a_pass_that_hides_what_it_did_to_a_constant(how):
    @fxpasses.graph_pass
    def hides(gm):
        for node in held(gm) if how == "replaced" else ():
            with disable_current_modes():
                setattr(gm, str(node.target), getattr(gm, str(node.target)) * 2)
        for node in held(gm) if how in ("data", "numpy") else ():  # no write that a tensor counts
            value = getattr(gm, str(node.target))
            with disable_current_modes():
                (value.data if how == "data" else value.numpy())[0] = 7.0
        if how == "written":
            doubled_in_place(gm)
        return False

    with pytest.raises(Exception, match=r"'hides' failed .* apply returned False but changed the graph"):
        run(hides, check="structure")


def test_a_write_that_no_tensor_counts_is_a_change(caplog):
    @fxpasses.graph_pass
    def writes(gm):
        for node in held(gm):
            getattr(gm, str(node.target)).data[0] = 7.0
        return True

    with pytest.raises(Exception, match="writes"):
        run(writes)
    assert "changed nothing" not in caplog.text
    (done,) = fxpasses.PassManager([writes]).run(fxpasses.capture(f, torch.ones(3)).forward, "inference")
    assert done.changed


def test_a_constant_that_is_written_to_is_a_change():
    gm = fxpasses.capture(f, torch.ones(3)).forward
    (done,) = fxpasses.PassManager([doubles]).run(gm, "inference")
    assert done.changed
    assert done.modified


def test_a_right_rewrite_with_another_constant_is_right():
    x = torch.randn(3)
    torch.testing.assert_close(run(doubles_and_halves, x), f(x))


def test_a_constant_that_is_put_in_the_place_of_another_is_seen():
    with pytest.raises(Exception, match="large_constant"):
        run(large_constant)


def test_eager_runs_the_graph_as_it_was():
    @fxpasses.graph_pass
    def doubles_and_raises(gm):
        doubled_in_place(gm)
        raise ZeroDivisionError

    x = torch.randn(3)
    got = run(doubles_and_raises, x, check="structure", on_failure="eager")
    torch.testing.assert_close(got, f(x))


def test_copies_share_what_has_the_same_bits():
    base = torch.arange(6.0)
    graph = torch.fx.Graph()
    names = ["whole", "rest"]
    graph.output(tuple(graph.get_attr(name) for name in names))
    gm = torch.fx.GraphModule({"whole": base, "rest": base[3:]}, graph)
    first = copy_graph(gm, constants=True)
    again = copy_graph(gm, constants=True, like=first)
    mine = constants_of(first)
    assert mine["whole"].untyped_storage().data_ptr() == mine["rest"].untyped_storage().data_ptr()
    assert all(mine[name] is constants_of(again)[name] for name in names)
    base.add_(1)
    changed = constants_of(copy_graph(gm, constants=True, like=first))
    assert changed["whole"].equal(base)
    assert mine["whole"].equal(torch.arange(6.0))
