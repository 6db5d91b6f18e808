"""Operators of other libraries have plans: what of them decides the trace is part of the key, and their kernels run as they are."""

import functools
import sys

import pytest
import torch
from torch import nn

import fake.library
import fxpasses
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.objects.library_operators import operator_dependencies, parts_of_operator
from fxpasses.plans.objects.watched_state import Watch
from tests import children

FACTOR = 2.0


def like(x):
    return torch.empty_like(x)


def scaled(g):
    return g * FACTOR


@torch.library.custom_op("fxpasses_tests_plans::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("fxpasses_tests_plans::copied", mutates_args=())
def copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def formula(ctx, g):
    return scaled(torch.ops.fxpasses_tests_plans.copied(g))


doubled.register_fake(lambda x: like(x))
doubled.register_autograd(formula)
copied.register_fake(lambda x: like(x))


@torch.library.custom_op("fxpasses_tests_plans::added", mutates_args={"x"})
def added(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


@torch.library.custom_op("fxpasses_tests_plans::many", mutates_args=())
def many(x: torch.Tensor, factors: list[float]) -> list[torch.Tensor]:
    return [x * factor for factor in factors]


@fake.library.custom_op("fxpasses_tests_plans::checked", mutates_args=())
def checked(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x * factor


many.register_fake(lambda x, factors: [like(x) for _ in factors])
checked.register_fake(lambda x, factor: like(x))
LIBRARY = torch.library.Library("fxpasses_tests_plans", "FRAGMENT")
LIBRARY.define("tripled(Tensor x) -> Tensor")
LIBRARY.impl("tripled", lambda x: x * 3, "CPU")
torch.library.register_fake("fxpasses_tests_plans::tripled", lambda x: like(x), lib=LIBRARY)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return doubled(self.linear(x)).sin()


def step(model, called, x):
    model.zero_grad()
    result = called(x)
    result.sum().backward()
    return [result.detach(), *(p.grad.clone() for p in model.parameters())]


def check(model, compiled, x):
    torch.testing.assert_close(step(model, compiled, x), step(model, model, x))


@pytest.fixture
def restored(monkeypatch):
    parts = {name: vars(doubled)[name] for name in ("_backward_fn", "_abstract_fn")}
    yield monkeypatch
    vars(doubled).update(parts)
    doubled.register_kernel("cpu", lambda x: x * 2)
    torch._dynamo.reset()


def tripled_kernel(x):
    return x * 3


CHANGES = {
    "nothing": lambda patch: None,
    "a number that the formula reads": lambda patch: patch.setattr(sys.modules[__name__], "FACTOR", 5.0),
    "a function that the formula calls": lambda patch: patch.setattr(
        sys.modules[__name__], "scaled", lambda g: g * 7
    ),
    "the formula": lambda patch: doubled.register_autograd(lambda ctx, g: g * 11),
    "what a fake kernel calls": lambda patch: patch.setattr(
        sys.modules[__name__], "like", lambda x: x.new_empty(x.shape)
    ),
    "the fake kernel": lambda patch: doubled.register_fake(lambda x: x.new_empty(x.shape)),
    "the kernel": lambda patch: doubled.register_kernel("cpu", tripled_kernel),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_registered_is_looked_at_and_the_kernel_is_called(tmp_path, restored, change):
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Model(), torch.randn(3, 4)
    compiled = fxpasses.compile(model, cache=tmp_path)
    for _ in range(2):
        check(model, compiled, x)
    CHANGES[change](restored)
    harmless = change in ("nothing", "the kernel")
    if harmless:
        check(model, compiled, x)  # of the others Dynamo has no guards
    for known in (harmless, True):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        check(model, fxpasses.compile(model, cache=tmp_path), x)
        assert (fxpasses.stats().graphs, fxpasses.stats().plans_used) == ((0, 1) if known else (1, 0))


def test_a_plan_of_an_operator_gives_way_once_something_is_registered(tmp_path, restored):
    """In a process that has compiled nothing; what it compiled itself torch would go on to use."""
    torch._dynamo.reset()
    model, x = Model(), torch.randn(3, 4)
    check(model, fxpasses.compile(model, cache=tmp_path), x)
    for change in ("the formula", "a function that the formula calls"):
        torch._dynamo.reset()
        doubled.register_autograd(formula)
        compiled = fxpasses.compile(model, cache=tmp_path)
        fxpasses.reset_stats()
        check(model, compiled, x)
        assert fxpasses.stats().plans_used == 1
        CHANGES[change](restored)
        check(model, compiled, x)
        restored.undo()


def writes(x):
    result = x.clone() * 2
    added(result, x)
    return result.sin()


PROGRAMS = {
    "without a gradient of its own": lambda x: torch.ops.fxpasses_tests_plans.tripled(x).sin(),
    "one that writes": writes,
    "several results": lambda x: sum(many(x, [2.0, 3.0])).sin(),
    "of fake.library": lambda x: checked(x, 3.0).sin(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_operators_of_all_kinds_have_plans(tmp_path, name):
    x, program = torch.randn(3, 4), PROGRAMS[name]
    for known in (False, True):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        torch.testing.assert_close(fxpasses.compile(program, cache=tmp_path)(x), program(x))
        assert (fxpasses.stats().graphs, fxpasses.stats().plans_used) == ((0, 1) if known else (1, 0))


class Settings:
    def size(self):
        return 3


SETTINGS, TABLE, CACHED = Settings(), {"three": Settings()}, functools.lru_cache(lambda: like(SETTINGS))


def imports(x):
    from tests.fxpasses.plans.functions_between import tripled

    return tripled(x)


@pytest.mark.parametrize(
    ("fake_kernel", "named"),
    [
        (lambda x: x.new_empty(SETTINGS.size()), "Settings"),
        (lambda x: x.new_empty(TABLE["three"].size()), "Settings"),
        (lambda x: CACHED(), "Settings"),
        (functools.partial(lambda settings, x: x, SETTINGS), "Settings"),
        (lambda x, size=SETTINGS.size: size(), "a method"),
        (imports, "imports imports"),
    ],
    ids=["object", "of a table", "cached", "partial", "default", "import"],
)
def test_what_may_call_anything_has_no_plan(fake_kernel, named):
    with torch.library._scoped_library("fxpasses_tests_plans", "FRAGMENT") as library:
        library.define("made(Tensor x) -> Tensor")
        library.impl("made", lambda x: x, "CPU")
        torch.library.register_fake("fxpasses_tests_plans::made", fake_kernel, lib=library)
        with pytest.raises(NoPlan, match=named):
            operator_dependencies([torch.ops.fxpasses_tests_plans.made.default])


def test_what_is_decomposed_in_an_unknown_way_has_no_plan():
    with torch.library._scoped_library("fxpasses_tests_plans", "FRAGMENT") as library:
        library.define("unknown(Tensor x) -> Tensor")
        library.impl("unknown", lambda x: x, "CompositeImplicitAutograd")
        with pytest.raises(NoPlan, match="cannot be seen into"):
            operator_dependencies([torch.ops.fxpasses_tests_plans.unknown.default])


def test_all_that_is_called_while_an_operator_is_traced():
    codes, names = operator_dependencies([doubled])
    assert set(names) == {f"fxpasses_tests_plans.{name}.default" for name in ("doubled", "copied")}
    assert {formula.__code__, scaled.__code__, like.__code__} <= set(codes)


VERSION = "2.1"


@torch.compiler.assume_constant_result
def is_newer(than, *, exactly=False):
    return than <= VERSION and not exactly


def of_version(x):
    return x.sin() if is_newer("2.0") and not is_newer("2.1", exactly=True) else x.cos()


@pytest.mark.slow
def test_results_that_stand_for_constants_are_asked_for_once_in_each_process(tmp_path, monkeypatch):
    x = torch.randn(3)
    for version, known in (("2.1", False), ("2.1", True), ("2.3", True), ("1.9", False), ("1.9", True)):
        monkeypatch.setattr(sys.modules[__name__], "VERSION", version)
        torch._dynamo.reset()
        fxpasses.reset_stats()
        torch.testing.assert_close(fxpasses.compile(of_version, cache=tmp_path)(x), of_version(x))
        assert (fxpasses.stats().graphs, fxpasses.stats().plans_used) == ((0, 1) if known else (1, 0)), (
            version
        )


@pytest.mark.parametrize("argument", [torch.ones(2), [1, (2, 3)]], ids=["tensor", "tuple"])
def test_constant_results_of_what_cannot_be_written_down_have_no_plan(tmp_path, argument):
    asked = torch.compiler.assume_constant_result(lambda given: 3)

    def program(x):
        return x * asked(argument)

    torch._dynamo.reset()
    fxpasses.reset_stats()
    x = torch.randn(3)
    torch.testing.assert_close(fxpasses.compile(program, cache=tmp_path)(x), x * 3)
    assert fxpasses.stats().plans_written == 0
    assert any("constant" in reason for reason in fxpasses.stats().plans_refused)


def test_each_overload_of_a_name_counts():
    with torch.library._scoped_library("fxpasses_tests_plans", "FRAGMENT") as library:
        for overload, kernel in (("one", lambda x: x + 1), ("two", lambda x, n: x)):
            more = ", int n" if overload == "two" else ""
            library.define(f"several.{overload}(Tensor x{more}) -> Tensor")
            torch.library.register_fake(f"fxpasses_tests_plans::several.{overload}", kernel, lib=library)
        parts = dict(parts_of_operator(torch.ops.fxpasses_tests_plans.several, Watch()))
    assert {name.partition(" ")[0].rpartition(".")[2] for name in parts} == {"one", "two"}
    assert sum(name.endswith(" fake") for name in parts) == 2


LATE = """
import torch, sys, fxpasses, json
library = torch.library.Library("fxpasses_late", "DEF")
library.define("repeated(Tensor x, SymInt n) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
library.impl("repeated", lambda x, n: x.repeat(n), "CompositeExplicitAutograd")
torch.library.register_fake("fxpasses_late::repeated", lambda x, n: x.new_empty(x.shape[0] * n), lib=library)

def function(x):
    return torch.ops.fxpasses_late.repeated(x.sin(), 2)

compiled, x = fxpasses.compile(function, cache=sys.argv[1]), torch.arange(3.0)
torch.testing.assert_close(compiled(x), function(x))
print(json.dumps(fxpasses.stats().graphs))
"""


@pytest.mark.slow
def test_what_torch_notes_when_an_operator_is_first_called_counts_for_nothing(tmp_path):
    """That its fake kernel was asked once."""
    tmp_path.chmod(0o700)
    program = tmp_path / "program.py"
    program.write_text(LATE)
    found = [children.run_fresh(str(program), str(tmp_path / "plans")) for _ in range(2)]
    assert [(done.returncode, done.stdout.split()[-1:]) for done in found] == [(0, ["1"]), (0, ["0"])], found
