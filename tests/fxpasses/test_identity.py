"""What a pass's identity covers, and why a cache missed."""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
import textwrap
import types
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

import fxpasses
from fxpasses import Compilation, Pass, explain_miss, graph_pass, pattern_pass
from fxpasses.compiling.graph_compilers import cache_identity
from fxpasses.compiling.options import Options
from fxpasses.pass_manager.identity import identify

LIBRARY = {
    "__init__.py": "",
    "constants.py": "LIMIT = 3\nNAMES = {'a': 1}\n",
    "helpers.py": """
        from mylib import constants
        def deep(x): return x + constants.LIMIT
        def fuse(x): return deep(x)
        def unrelated(x): return x
    """,
    "base.py": """
        from fxpasses import Pass
        class Base(Pass):
            def inherited(self): return 1
    """,
    "passes.py": """
        from dataclasses import dataclass
        from mylib import helpers
        from mylib.base import Base
        SCALE = 2.0
        def local(x): return x * SCALE
        @dataclass(frozen=True)
        class Mine(Base):
            name = "mylib::mine"
            threshold: float = 0.5
            def apply(self, gm):
                local(helpers.fuse(1))
                return False
    """,
}


def import_library(folder, **changes):
    """The identity of ``mylib.passes.Mine`` with some files changed, from a fresh import."""
    root = folder / "mylib"
    root.mkdir(exist_ok=True)
    for name, content in LIBRARY.items():
        old, new = changes.get(name.removesuffix(".py"), ("", ""))
        assert old in textwrap.dedent(content)
        (root / name).write_text(
            textwrap.dedent(content).replace(old, new) if old else textwrap.dedent(content)
        )
    for name in [name for name in sys.modules if name.partition(".")[0] == "mylib"]:
        del sys.modules[name]
    importlib.invalidate_caches()
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    try:
        return importlib.import_module("mylib.passes").Mine
    finally:
        sys.path.remove(str(folder))
        sys.dont_write_bytecode = False


@pytest.mark.parametrize(
    ("changes", "factor"),
    [
        ({"passes": ("return False", "return bool(0)")}, "code mylib.passes.Mine.apply"),
        ({"passes": ("x * SCALE", "x - SCALE")}, "code mylib.passes.local"),
        ({"passes": ("SCALE = 2.0", "SCALE = 2.5")}, "constant mylib.passes.SCALE"),
        ({"helpers": ("return deep(x)", "return deep(-x)")}, "code mylib.helpers.fuse"),
        ({"helpers": ("x + constants", "x - constants")}, "code mylib.helpers.deep"),
        ({"constants": ("LIMIT = 3", "LIMIT = 4")}, "constant mylib.constants.LIMIT"),
        ({"base": ("return 1", "return 2")}, "code mylib.base.Base.inherited"),
    ],
)
def test_whatever_a_pass_reaches_is_a_factor(tmp_path, changes, factor):
    before = import_library(tmp_path)().identify()
    after = import_library(tmp_path, **changes)().identify()
    assert before.digest is not None
    assert before.digest != after.digest
    differences = [d for d in before.differences(after) if not d.startswith("module ")]
    assert differences == [factor]


def test_the_same_source_has_the_same_identity(tmp_path):
    assert import_library(tmp_path)().identity() == import_library(tmp_path)().identity()


def test_comments_and_docstrings_do_not_count(tmp_path):
    before = import_library(tmp_path)().identity()
    commented = import_library(tmp_path, passes=("def local(x):", "# a remark\n\ndef local(x):"))().identity()
    assert before == commented


def test_options_are_factors(tmp_path):
    mine = import_library(tmp_path)
    first, second = mine(threshold=0.5).identify(), mine(threshold=0.25).identify()
    assert first.differences(second) == ["option threshold"]
    assert mine().identity() == mine(threshold=0.5).identity()


@pytest.mark.slow
def test_the_identity_is_the_same_in_another_process():
    script = "from fxpasses.passes import default_passes\nprint([p.identity() for p in default_passes()])"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.getcwd()}
    printed = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == str([item.identity() for item in fxpasses.passes.default_passes()])


def closing_over(value, *, default=1):
    @graph_pass(name="closes")
    def closes(gm, by=default):
        return bool(value and by < 0)

    return closes


def test_closures_and_defaults_are_factors():
    base = closing_over(1).identify()
    assert base.digest == closing_over(1).identity()
    (factor,) = base.differences(closing_over(2).identify())
    assert factor.startswith("closure ")
    assert factor.endswith("closes.value")
    assert closing_over(1, default=2).identity() != base.digest
    assert (
        closing_over([1, {"a": torch.float32}]).identity()
        != closing_over([1, {"a": torch.float64}]).identity()
    )
    assert closing_over({3, 4}).identity() == closing_over({4, 3}).identity()
    assert closing_over(torch.ones(2)).identity() != closing_over(torch.zeros(2)).identity()
    assert closing_over(1).identity() != closing_over(1.0).identity() != closing_over(True).identity()


def test_functions_reached_through_values_are_factors():
    def one(x):
        return x + 1

    def two(x):
        return x + 2

    assert closing_over(one).identity() != closing_over(two).identity()
    assert closing_over({"f": [one]}).identity() != closing_over({"f": [two]}).identity()
    assert closing_over(lambda: one(1)).identity() != closing_over(lambda: two(1)).identity()


def test_functions_that_call_each_other():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert closing_over(even).identity() == closing_over(even).identity() is not None


def test_what_cannot_be_hashed_is_named(tmp_path):
    with open(tmp_path / "x", "w") as file:
        found = closing_over(file).identify()
    assert found.digest is None
    assert found.unknown[0].endswith("closes.value")


def test_counters_have_no_identity():
    count = 0

    @graph_pass
    def counts(gm):
        nonlocal count
        count += 1
        return False

    assert counts.identity() is None


def test_patterns_have_an_identity():
    def make(scale):
        return pattern_pass(
            lambda x: x * 3, lambda x: x * scale, [torch.empty(2)], name="scales", where=lambda m: scale > 1
        )

    assert make(3).identity() == make(3).identity() is not None
    assert make(3).identity() != make(4).identity()


def test_objects_with_state():
    class Settings:
        def __init__(self, width):
            self.width = width

    assert closing_over(Settings(1)).identity() == closing_over(Settings(1)).identity() is not None
    assert closing_over(Settings(1)).identity() != closing_over(Settings(2)).identity()


def test_the_key_of_the_caches_covers_the_passes():
    keys = {cache_identity(Options.parse({"passes": [closing_over(v)]})) for v in (1, 2)}
    assert len(keys) == 2
    assert None not in keys


def test_identify_takes_functions_too():
    found = identify(closing_over)
    assert f"code {__name__}.closing_over" in found.factors
    assert found.digest == identify(closing_over).digest


# --- why a cache missed


@dataclass(frozen=True)
class Threshold(Pass):
    "Does nothing, with an option."

    name: ClassVar[str] = "threshold"
    level: int = 1

    def apply(self, gm):
        return False


def compiled(function=None, inputs=None, dynamic=False, **options):
    """The record of one compilation."""

    def default(x):
        return x.sin() + 1

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(
            function or default, backend="fxpasses", options={"compiler": "eager", **options}, dynamic=dynamic
        )(*(inputs or [torch.ones(2, 3)]))
    return fxpasses.compilations()[-1]


@pytest.mark.parametrize(
    ("first", "second", "factor"),
    [
        ({"memory_budget": 0.5}, {"memory_budget": 0.25}, "option memory_budget"),
        (
            {"passes": []},
            {"passes": ["eliminate_dead_code"]},
            "pass 'eliminate_dead_code' is only in the second",
        ),
        (
            {"passes": ["remove_no_ops", "eliminate_dead_code"]},
            {"passes": ["eliminate_dead_code", "remove_no_ops"]},
            "order of the passes",
        ),
        ({"passes": [Threshold(1)]}, {"passes": [Threshold(2)]}, "option level of pass 'threshold'"),
        ({"passes": [closing_over(1)]}, {"passes": [closing_over(2)]}, "closes.value of pass 'closes'"),
        ({"inductor": {"max_autotune": True}}, {}, "inductor setting max_autotune"),
        ({"inputs": [torch.ones(4, 3)]}, {}, "shape of input x"),
        ({"inputs": [torch.ones(2, 3).double()]}, {}, "dtype of input x"),
        ({"inputs": [torch.ones(3, 2).t()]}, {}, "strides of input x"),
        ({"inputs": [torch.ones(2, 3, requires_grad=True)]}, {}, "requires_grad of input x"),
        ({"function": lambda x: x.sin() + 2}, {"function": lambda x: x.sin() + 3}, "line 3 of the graph"),
    ],
)
def test_the_factor_is_named(first, second, factor):
    miss = explain_miss(compiled(**first), compiled(**second))
    assert len(miss.differences) == 1
    assert factor in miss.factor
    assert factor in str(miss)


class Normed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x):
        return self.norm(x)


def transposed(model):
    model.norm.weight = torch.nn.Parameter(torch.ones(6)[::2])
    return model


@pytest.mark.parametrize(
    ("change", "factor"),
    [
        (lambda model: model.eval(), "training mode"),
        (lambda model: model.requires_grad_(False), "requires_grad of inputs norm.weight, norm.bias"),
        (transposed, "strides of input norm.weight"),
    ],
)
def test_the_factor_is_named_for_a_model(change, factor):
    first, second = (compiled(function=model.forward) for model in (Normed(), change(Normed())))
    miss = explain_miss(first, second)
    assert [d.factor.replace("self.", "") for d in miss.differences] == [factor]


def test_surroundings_and_dynamic_sizes_are_named(monkeypatch):
    first = compiled()
    monkeypatch.setenv("TORCHINDUCTOR_SOMETHING", "1")
    monkeypatch.setenv("TORCH_LOGS", "")
    assert str(explain_miss(first, compiled())) == (
        "the cache entry differs in environment variable TORCHINDUCTOR_SOMETHING: missing -> 1"
    )
    monkeypatch.delenv("TORCHINDUCTOR_SOMETHING")
    miss = explain_miss(first, compiled(dynamic=True))
    assert [d.factor for d in miss.differences] == ["dynamic sizes"]
    older = dataclasses.replace(first, factors={**first.factors, "torch": "2.5.0"})
    assert [d.factor for d in explain_miss(older, first).differences] == ["torch"]


def test_nothing_differs():
    miss = explain_miss(compiled(), compiled())
    assert miss.factor is None
    assert "nothing" in str(miss)


def test_surroundings_are_factors():
    first = compiled()
    with torch.autocast("cpu"):
        second = compiled()
    assert "autocast" in explain_miss(first, second).factor


def test_a_captured_backward_pass_is_told_from_a_function():
    torch._dynamo.reset()
    options = {"compiler": "eager", "compiled_autograd": True}
    run = torch.compile(lambda x: (x * x).sum(), backend="fxpasses", options=options)
    run(torch.ones(3, requires_grad=True)).backward()
    first, second = fxpasses.compilations()[-2:]
    difference = explain_miss(first, second).differences[0]
    assert str(difference) == "what is compiled: a function -> a captured backward pass"


def test_what_cannot_be_cached_is_said():
    seen = []

    @graph_pass
    def collects(gm):
        seen.append(gm)
        return False

    miss = explain_miss(compiled(passes=[collects]), compiled(passes=[collects]))
    assert "pass 'collects' depends on closure" in str(miss)


def test_a_module_may_have_itself_for_an_attribute():
    helpers: Any = types.ModuleType("identity_helpers")
    helpers.helpers, helpers.scale = helpers, 2

    namespace = {"helpers": helpers, "__name__": "identity_reader"}
    exec("def read(gm):\n    return helpers.helpers.scale\n", namespace)
    found = []
    for helpers.scale in (2, 3):
        found.append(identify(namespace["read"]).factors["constant identity_helpers.scale"])
    assert found[0] != found[1]


def test_records_travel_between_processes(tmp_path):
    first, second = compiled(), compiled(memory_budget=0.5)
    path = tmp_path / "first.json"
    path.write_text(first.to_json())
    assert Compilation.from_json(first.to_json()) == first
    assert explain_miss(path, second).factor == "option memory_budget"


def test_the_inductor_cache_is_used_and_missed_as_explained():
    torch._dynamo.reset()
    model = torch.nn.Linear(3, 3)

    def run(level):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.compile(model, backend="fxpasses", options={"passes": [Threshold(level)]})(torch.ones(2, 3))
        return fxpasses.compilations()[-1]

    run(1)
    again, other = run(1), run(2)
    assert again.from_cache
    assert not other.from_cache
    assert explain_miss(again, other).factor == "option level of pass 'threshold'"
