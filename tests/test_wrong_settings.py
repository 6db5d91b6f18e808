"""Keyword arguments of the wrong kind: refused by name, before anything is done, and what was called works as before."""

import pytest
import torch

import compiled_autograd
import fake
import fxpasses
from fake.wrong_arguments import ArgumentTypeError
from fxpasses import ContractError, Options, OptionsError
from fxpasses.exact import equivalent
from fxpasses.partitioner import MinCutPartitioner

X = torch.ones(2, 3)
CAPTURED = fxpasses.capture(torch.nn.Linear(3, 3), X)


class Unprintable:
    __hash__ = None

    def __repr__(self):
        raise ZeroDivisionError

    __eq__ = __repr__


def _partition(**settings):
    return fxpasses.partition(
        CAPTURED.joint, CAPTURED.inputs, **{"num_fwd_outputs": CAPTURED.num_outputs, **settings}
    )


def _check(**settings):
    return fxpasses.check(torch.sin, X, show=settings.pop("show", False), **settings)


def _bisect(**settings):
    return fxpasses.bisect_script(__file__, **settings)


def _mode():
    """Made in each call: one that lives keeps the operators of symbolic sizes in force."""
    return fake.FakeTensorMode(shape_env=fake.ShapeEnv())


def _captured_pass(dynamic):
    with compiled_autograd.enable("aot_eager", dynamic=dynamic):
        pass


CALLS = [
    (lambda **s: fxpasses.capture(torch.sin, X, **s), {"dynamic": "x", "decompose": "no", "observers": 3}),
    (lambda **s: fxpasses.capture(torch.sin, X, **s), {"observers": [3]}),
    (lambda **s: fxpasses.compile(torch.sin, **s), {"dynamic": "x", "fullgraph": "no"}),
    (_partition, {"num_fwd_outputs": -1, "decides": 3, "curve": "no", "static_lifetime_input_indices": "x"}),
    (_partition, {"num_fwd_outputs": True, "decides": lambda graph, names: ["nope"]}),
    (_partition, {"decides": lambda graph, names: None, "static_lifetime_input_indices": [-1]}),
    (lambda **s: fxpasses.PassManager([], **s), {"checks": 3, "structure": "no", "holds": 3}),
    (lambda **s: fxpasses.PassManager([], **s), {"checks": [3], "holds": [3]}),
    (lambda **s: fxpasses.regions(CAPTURED.forward, **s), {"cost": 3}),
    (lambda **s: equivalent(CAPTURED.forward, CAPTURED.forward, **{"inputs": CAPTURED.inputs, **s}), {"inputs": 3, "samples": "x", "signed_zeros": "no"}),
    (lambda **s: fxpasses.report("nowhere", **s), {"output": 3, "against": 3}),
    (_check, {"kwargs": 3, "dynamic": "x", "backward": "no", "show": "no"}),
    (_bisect, {"args": "x", "state": 3, "output": 3, "console": 3}),
    (_bisect, {"args": [3], "output": ""}),
    (lambda **s: compiled_autograd.explain(torch.sin, X, **s), {"dynamic": "x"}),
    (_captured_pass, {"dynamic": "x"}),
    (lambda **s: fake.FakeTensorMode(**s), {"shape_env": 3}),
    (lambda **s: _mode().from_tensor(**{"tensor": X, **s}), {"tensor": 3, "name": 3, "source": "x", "symbolic_context": 3}),
    (lambda **s: fake.FakeCopyMode(**s), {"fake_mode": 3}),
    (lambda **s: fake.explain(_mode().shape_env, **s), {"graph": 3}),
    (lambda **s: fake.enable_disk_cache(**s), {"directory": ""}),
    (lambda **s: fake.enable_disk_cache(**s), {"directory": "a\0b"}),
    (lambda **s: CAPTURED.provenance(**s), {"node": "mul"}),
    (lambda **s: fxpasses.claim(**s), {"node": None}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        pytest.param(call, name, value, id=f"{number}-{name}")
        for number, (call, settings) in enumerate(CALLS)
        for name, value in settings.items()
    ],
)
def test_a_wrong_setting_is_named(call, name, value):
    with pytest.raises(ArgumentTypeError, match=f": {name} is ") as caught:
        call(**{name: value})
    assert caught.value.argument == name


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: fxpasses.check(torch.sin, X, options=3), OptionsError),
        (lambda: fxpasses.check(torch.sin, X, seconds="x"), OptionsError),
        (lambda: fxpasses.bisect_script(__file__, confirm="x"), fxpasses.BisectError),
        (lambda: fxpasses.bisect_script(__file__, timeout="x"), fxpasses.BisectError),
        (lambda: fxpasses.compile(torch.sin, passes=3)(X), OptionsError),
        (lambda: fxpasses.fixpoint(fxpasses.graph_pass(lambda gm: False), name=3), ContractError),
        (lambda: fxpasses.Contract(numerics=["bitwise"]), ContractError),
        (lambda: fxpasses.Contract(metadata={}), ContractError),
        (lambda: fxpasses.Contract(provides=[""]), ContractError),
        (lambda: MinCutPartitioner(True), ValueError),
        (lambda: fake.FakeTensorMode().from_tensor(X, dims={0: "dynamic"}), fake.ContractError),
        (lambda: Options(report="a\0b"), OptionsError),
        (lambda: Options(cache=""), OptionsError),
        (lambda: Options.parse({10**5000: 1}), OptionsError),
    ],
)
def test_values_that_do_not_fit(call, error):
    torch._dynamo.reset()
    with pytest.raises(error):
        call()


ODD = {"unprintable": Unprintable(), "list": [1] * 1000, "integer": 10**5000, "bytes": b"x" * 1000}


@pytest.mark.parametrize("value", ODD.values(), ids=ODD)
@pytest.mark.parametrize("name", Options.names())
def test_an_option_is_named_whatever_its_value_is_like(name, value):
    with pytest.raises(OptionsError, match=f"'{name}'") as caught:
        Options.parse({name: value})
    assert len(str(caught.value)) < 400


def test_a_mode_that_is_refused_leaves_nothing_in_force():
    from fake.seam.patches import LEDGER

    before = [LEDGER.is_in_force(entry) for entry in LEDGER.entries]
    with pytest.raises(ArgumentTypeError):
        fake.FakeTensorMode(shape_env="x")
    assert [LEDGER.is_in_force(entry) for entry in LEDGER.entries] == before
