"""What is off is said, with the reason, what it costs and what to do; an unknown torch is said once, and works."""

import subprocess
import sys
import warnings

import pytest
import torch

import fake
from fxpasses.commands.main import main
from fxpasses.doctor import examine
from fxpasses.dynamo import tracing
from fxpasses.errors import UnknownTorchWarning

COPIES = "copies of the traces of repeated modules"
TRACING = "tracing on fake's dispatch cache (fake.accelerate), with lean symbols"


@pytest.fixture
def unknown_torch(monkeypatch):
    """A release that nobody has seen."""
    tracing.warn_of_torch.cache_clear()
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.99.0"))
    yield
    tracing.warn_of_torch.cache_clear()


def step(model, x):
    model.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_here_everything_that_speeds_tracing_is_on(capsys):
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert f"torch {torch.__version__}" in told
    found = {finding.name: finding for finding in examine()}
    assert found[TRACING].on
    assert found[COPIES].on
    assert found["C++ compiler"].on


def test_an_unknown_torch_is_told_once_and_compiles_without_what_rests_on_private_names(unknown_torch):
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 4))
    x = torch.randn(3, 4)
    expected = step(model, x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(model, backend="fxpasses", options={"compiler": "eager"})
        found = step(compiled, x)
        torch._dynamo.reset()
        step(torch.compile(model, backend="fxpasses", options={"compiler": "eager"}), x)
    torch.testing.assert_close(found, expected)
    (told,) = [w for w in caught if issubclass(w.category, UnknownTorchWarning)]
    assert "torch 2.99.0" in str(told.message)
    assert "python -m fxpasses doctor" in str(told.message)
    with fake.FakeTensorMode():
        assert (torch.ones(2, 3) @ torch.ones(3, 4)).shape == (2, 4)


def test_the_doctor_says_why_what_it_costs_and_what_to_do(unknown_torch, capsys):
    assert main(["doctor"]) == 0
    told = capsys.readouterr().out
    assert f"OFF  {TRACING}: fake.accelerate() knows torch" in told
    assert f"OFF  {COPIES}: they need fake.accelerate" in told
    found = {finding.name: finding for finding in examine()}
    assert all(found[name].cost and found[name].advice for name in (TRACING, COPIES))


WITHOUT_SOME_NAMES = """
import builtins, warnings
import torch
torch.__version__ = type(torch.__version__)("2.99.0")
GONE = {("torch._inductor.cpp_builder", "get_cpp_compiler"), ("torch._inductor.async_compile", "get_compile_threads")}
given = builtins.__import__

def without(name, globals=None, locals=None, fromlist=(), level=0):
    ours = (globals or {}).get("__name__", "").split(".")[0] in ("fake", "compiled_autograd", "fxpasses")
    for gone in fromlist or ():
        if ours and (name, gone) in GONE:
            raise ImportError(f"cannot import name {gone!r} from {name!r}")
    return given(name, globals, locals, fromlist, level)

builtins.__import__ = without
import fake, fxpasses
from fxpasses.doctor import examine

model, x = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU()), torch.randn(3, 4)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    compiled = torch.compile(model, backend="fxpasses", options={"compiler": "eager"})
    compiled(x).sum().backward()
torch.testing.assert_close(compiled(x), model(x))
assert any("mm" in str(node.target) for node in fxpasses.capture(model, x).joint.graph.nodes)
(told,) = [str(w.message) for w in caught if "2.99.0" in str(w.message)]
assert all(f"{module}.{name}" in told for module, name in GONE), told
assert any("no torch._inductor.cpp_builder.get_cpp_compiler" in f.problem for f in examine())
try:
    fxpasses._torch.cpp_compiler()
except fake.MissingTorchNameError as missing:
    assert missing.name == "torch._inductor.cpp_builder.get_cpp_compiler"
    print("works without")
"""


@pytest.mark.slow
def test_a_name_that_is_gone_takes_with_it_only_what_needs_it():
    done = subprocess.run([sys.executable, "-c", WITHOUT_SOME_NAMES], capture_output=True, text=True)
    assert done.stdout.strip() == "works without", done.stderr
