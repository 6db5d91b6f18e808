"""States of torch around a call: those in which a plan runs, those in which it does not, and what a plan is told from."""

import pytest
import torch
from torch import nn

import fxpasses


def by_dtype(x):
    return x * (2 if torch.get_autocast_dtype("cpu") is torch.bfloat16 else 3)


def by_functions(x):
    return x * (2 if torch._C._is_torch_function_enabled() else 3)


def _second(model, directory, *given):
    """The model as a second process has it: compiled, with a plan, and nothing of Dynamo's."""
    for _ in range(2):
        torch._dynamo.reset()
        compiled = fxpasses.compile(model, cache=directory)
        for _ in range(2):
            torch.testing.assert_close(compiled(*given), model(*given))
    return compiled


@pytest.mark.parametrize("stance", ["fail_on_recompile", "eager_on_recompile"])
def test_a_plan_runs_where_nothing_may_be_compiled(stance, tmp_path):
    model = nn.Linear(2, 2).requires_grad_(False)
    x = torch.ones(3, 2)
    fxpasses.reset_stats()
    compiled = _second(model, tmp_path, x)
    assert fxpasses.stats().graphs == 1
    fresh = fxpasses.compile(model, cache=tmp_path)
    with torch.compiler.set_stance(stance):
        for call in (compiled, fresh, compiled, fresh):
            torch.testing.assert_close(call(x), model(x))
        other = torch.ones(4, 2, dtype=torch.float64), model.double()
        if stance == "fail_on_recompile":
            with pytest.raises(RuntimeError, match="fail_on_recompile"):
                compiled(other[0])
        else:
            torch.testing.assert_close(compiled(other[0]), model(other[0]))
        assert fxpasses.stats().graphs == 1
    torch.testing.assert_close(compiled(other[0]), model(other[0]))
    assert (fxpasses.stats().graphs, fxpasses.stats().plans_written) == (2, 2)


def test_a_stance_with_another_backend_has_that_compile(tmp_path):
    compiled = _second(by_dtype, tmp_path, torch.ones(2))
    seen = []
    with torch.compiler.set_stance("default", force_backend=lambda gm, inputs: seen.append(gm) or gm.forward):
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]
    assert seen


def test_functions_that_are_not_overridden(tmp_path):
    compiled = _second(by_functions, tmp_path, torch.ones(2))
    for _ in range(2):
        with torch._C.DisableTorchFunctionSubclass():
            assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
        assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]


def test_the_type_of_autocast_where_it_is_off(tmp_path):
    compiled = _second(by_dtype, tmp_path, torch.ones(2))
    before = torch.get_autocast_dtype("cpu")
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        assert compiled(torch.ones(2)).tolist() == [3.0, 3.0]
    finally:
        torch.set_autocast_dtype("cpu", before)
    assert compiled(torch.ones(2)).tolist() == [2.0, 2.0]


def test_hooks_on_all_modules_run_once_for_the_model(tmp_path):
    torch._dynamo.reset()
    model, seen = nn.Sequential(nn.Linear(2, 2)), []
    compiled = fxpasses.compile(model, cache=tmp_path, compiler="eager")
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        with torch.no_grad():
            compiled(torch.ones(1, 2))
    finally:
        handle.remove()
    assert [module for module in seen if module is not model[0]] == [model]


def test_attributes_are_deleted_where_they_were_set():
    compiled = fxpasses.compile(nn.Linear(2, 2), cache="off")
    compiled.note = 1
    del compiled.note
    assert not hasattr(compiled.model, "note")
    del compiled.bias
    assert "bias" not in compiled.model.state_dict()
    with pytest.raises(AttributeError, match="note"):
        del compiled.note
