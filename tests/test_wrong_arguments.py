"""Every public function, given values of the wrong type: never an error about something inside of it."""

import inspect

import pytest
import torch

import compiled_autograd
import fake
import fake.library
import fxpasses
import fxpasses.partitioner
import fxpasses.testing
from fake.library import custom_op
from fake.library.errors import LibraryError, ProfileError, RegistrationError, SchemaError, SignatureError
from fake.wrong_arguments import ArgumentTypeError, check_type
from fxpasses import Options, OptionsError, PatternError

PACKAGES = (fxpasses, fake, compiled_autograd, fake.library, fxpasses.partitioner, fxpasses.testing)
TORCHS_OWN = {"extract_tensor_metadata", "register_opaque_type"}
ENDS_SOMETHING = {"bisect_script", "reset", "reset_stats", "reset_compilations", "disable_disk_cache"}
WRONG = {"integer": 3, "None": None, "text": "x", "object": object(), "list": [1], "class": int}
INTERNAL = (AttributeError, KeyError, IndexError, AssertionError, NameError, RecursionError)


def _calls():
    for package in PACKAGES:
        for name in package.__all__:
            function = getattr(package, name)
            if not inspect.isfunction(function) or name in TORCHS_OWN | ENDS_SOMETHING:
                continue
            parameters = inspect.signature(function).parameters.values()
            required = [p for p in parameters if p.default is p.empty and "VAR" not in p.kind.name]
            if any(p.kind.name != "KEYWORD_ONLY" for p in required):
                yield pytest.param(function, required, id=f"{package.__name__}.{name}")


@pytest.mark.parametrize(("function", "required"), list(_calls()))
@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_no_public_function_fails_inside(function, required, wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    named = {p.name: wrong for p in required if p.kind is p.KEYWORD_ONLY}
    failed = None
    try:
        result = function(*[wrong] * (len(required) - len(named)), **named)
        if hasattr(result, "__enter__"):
            with result:
                pass
    except Exception as error:  # noqa: BLE001  (which one is what the other tests ask)
        failed = error
    finally:
        fake.disable_disk_cache()
    assert not isinstance(failed, INTERNAL)


GRAPH = torch.fx.symbolic_trace(lambda x: torch.sin(x))


@pytest.mark.parametrize(
    ("call", "error", "named"),
    [
        (lambda: fxpasses.annotated_code(fxpasses.capture(torch.sin, torch.ones(2))), ArgumentTypeError, "captured.forward"),
        (lambda: fxpasses.insert_call(GRAPH, torch.sin, (), like=None), ArgumentTypeError, "graph is .*; pass a torch.fx.Graph"),
        (lambda: fxpasses.insert_call(GRAPH.graph, torch.sin, (), like=None), ArgumentTypeError, "insert_call: like is None"),
        (lambda: fxpasses.partition(3, (), num_fwd_outputs=1), ArgumentTypeError, "partition: joint is 3"),
        (lambda: fxpasses.replace_pattern(3, torch.sin, torch.cos, [torch.ones(2)]), ArgumentTypeError, "replace_pattern: gm is 3"),
        (lambda: fxpasses.replace_pattern(GRAPH, torch.sin, torch.cos, 3), PatternError, "inputs is 3"),
        (lambda: fxpasses.replace_pattern(GRAPH, torch.sin, torch.cos, "x"), PatternError, "inputs is 'x'"),
        (lambda: fxpasses.replace_pattern(GRAPH, 3, torch.cos, []), PatternError, "pattern is 3"),
        (lambda: fxpasses.pattern_pass(torch.sin, torch.cos, 3), PatternError, "inputs is 3"),
        (lambda: fxpasses.graph_pass(int), fxpasses.ContractError, "wrap it: lambda gm"),
        (lambda: fxpasses.testing.prove(3), ArgumentTypeError, "prove: item is 3"),
        (lambda: Options(memory_budget=2), OptionsError, "memory_budget.*from 0.0 to 1.0"),
        (lambda: Options(memory_budget=float("nan")), OptionsError, "memory_budget"),
        (lambda: Options(regions="sometimes"), OptionsError, "regions"),
        (lambda: Options(compiler="inducter"), OptionsError, "did you mean 'inductor'"),
        (lambda: Options(passes=3), OptionsError, "passes.*a list"),
        (lambda: fake.FakeTensorProp(3), ArgumentTypeError, "FakeTensorProp: module is 3"),
        (lambda: fake.FakeTensorProp(GRAPH, 3), ArgumentTypeError, "FakeTensorProp: mode is 3"),
        (lambda: fake.facts_of(None), ArgumentTypeError, "facts_of: number is None"),
        (lambda: fake.mark_dynamic(3, {}), ArgumentTypeError, "mark_dynamic: tensor is 3"),
        (lambda: fake.using_shape_env(3).__enter__(), fake.ContractError, "must map names of inputs"),
        (lambda: fake.enable_disk_cache(3), ArgumentTypeError, "directory is 3"),
        (lambda: compiled_autograd.save_graph(3, "x.py"), ArgumentTypeError, "save_graph: graph is 3"),
        (lambda: compiled_autograd.load_graph(3), ArgumentTypeError, "load_graph: path is 3"),
        (lambda: setattr(compiled_autograd.config, "fallbak", False), AttributeError, "no setting 'fallbak'; settings are"),
        (lambda: setattr(compiled_autograd.config, "fallback", "no"), ArgumentTypeError, "config: fallback is 'no'"),
        (lambda: compiled_autograd.config.patch(max_nested_captures=-1).__enter__(), ArgumentTypeError, "an integer, 0 or more"),
        (lambda: compiled_autograd.config.patch(keep_nodes=True).__enter__(), ArgumentTypeError, "keep_nodes is True"),
        (lambda: compiled_autograd.explain(3), ArgumentTypeError, "explain: fn is 3"),
        (lambda: fake.library.get_ctx(), fake.library.errors.MissingContextError, "inside a fake kernel"),
    ],
)  # fmt: skip
def test_errors_name_the_argument(call, error, named):
    with pytest.raises(error, match=named):
        call()


def test_a_parsed_value_of_an_option_is_checked_once_more_when_it_is_replaced():
    options = Options.parse(
        {"regions": ["blocks.*"], "passes": ["default"], "inductor": {"max-autotune": True}}
    )
    assert options == Options(regions=("blocks.*",), inductor={"max_autotune": True})


def test_long_values_are_cut():
    with pytest.raises(ArgumentTypeError) as caught:
        check_type("f", "x", torch.ones(300), (int,), "an integer")
    assert len(str(caught.value)) < 150
    assert caught.value.argument == "x"


def kernel(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@pytest.mark.parametrize(
    ("function", "options", "error", "named"),
    [
        (3, {}, SchemaError, "3 is no function with annotations"),
        (len, {}, SchemaError, "is no function with annotations"),
        (torch.nn.Linear(2, 2), {}, SchemaError, "is no function with annotations"),
        (3, {"schema": "(Tensor x) -> Tensor"}, SignatureError, "3 is no function"),
        (kernel, {"mutates_args": 3}, SchemaError, "mutates_args is 3"),
        (kernel, {"mutates_args": [3]}, SchemaError, r"mutates_args is \[3\]"),
        (kernel, {"device_types": 3}, RegistrationError, "device_types is 3"),
        (kernel, {"device_types": []}, RegistrationError, r"device_types is \[\]"),
        (kernel, {"device_types": "cpux"}, RegistrationError, "'cpux' is neither a device type"),
        (kernel, {"schema": 3}, SchemaError, "expected schema to look like"),
        (kernel, {"schema": "named(Tensor x) -> Tensor"}, SchemaError, "expected schema to look like"),
        (kernel, {"tags": 3}, SchemaError, "tags is 3"),
        (kernel, {"tags": ["x"]}, SchemaError, r"tags is \['x'\]"),
        (kernel, {"differentiable": 3}, SchemaError, "differentiable is 3"),
    ],
)
def test_nothing_is_defined_by_a_wrong_custom_op(function, options, error, named):
    with pytest.raises(error, match=named):
        custom_op("wrong_arguments::op", function, **{"mutates_args": (), **options})
    assert not hasattr(torch.ops.wrong_arguments, "op")


@pytest.mark.parametrize("name", [3, None, "op", "a::b::c"])
def test_wrong_names_are_refused_before_the_decorator(name):
    with pytest.raises(SchemaError, match="is not the name of an operator"):
        custom_op(name, mutates_args=())


@pytest.mark.parametrize(
    ("register", "named"),
    [
        (lambda op: op.register_fake(3), "the fake kernel does not fit.*3 is no function"),
        (lambda op: op.register_kernel("cpu", 3), "the kernel does not fit.*3 is no function"),
        (lambda op: op.register_kernel(3), "device_types is 3"),
        (lambda op: op.register_autograd(3), "the backward formula does not fit.*3 is no function"),
        (lambda op: op.register_autograd(lambda ctx, grad: grad, setup_context=3), "the setup_context does not fit"),
        (lambda op: op.register_vmap(3), "the vmap rule does not fit.*3 is no function"),
        (lambda op: op.register_torch_dispatch(torch.Tensor, 3), "the torch_dispatch rule does not fit"),
        (lambda op: op.register_torch_dispatch(3, lambda *args: None), "torch_dispatch_class is 3"),
        (lambda op: op.register_autocast("cpu", 3), "cast_inputs is 3"),
        (lambda op: op.register_autocast("cpu", torch.int64), "cast_inputs is torch.int64"),
        (lambda op: op.register_effect(3), "effect is 3"),
        (lambda op: fake.library.impl("wrong_arguments::op", 3, kernel), "device_types is 3"),
        (lambda op: fake.library.destroy(3), "destroy: 3 is no operator"),
        (lambda op: fake.library.opcheck(op, (torch.ones(2),), {"y": 1}), "has no argument 'y'"),
        (lambda op: fake.library.opcheck(op, (torch.ones(2),), test_utils=3), "test_utils=3"),
        (lambda op: fake.library.probe(op, 3), "samples is 3"),
        (lambda op: fake.library.probe(op, [(torch.ones(2),)], budget="x"), "the budget is 'x'"),
        (lambda op: fake.library.register_fake("op", kernel), "'op' is not the name of an operator"),
        (lambda op: fake.library.register_autograd("wrong_arguments::nope", lambda ctx, grad: grad), "there is no operator"),
        (lambda op: fake.library.register_vmap("wrong_arguments::nope", kernel), "there is no operator"),
        (lambda op: fake.library.register_autocast("wrong_arguments::nope", "cpu", torch.bfloat16), "there is no operator"),
        (lambda op: fake.library.Library(3, "DEF"), "ns is 3"),
        (lambda op: fake.library.Library("wrong_arguments", "FRAGMENT").define(3), "schema is 3"),
    ],
)  # fmt: skip
def test_wrong_registrations(register, named):
    op = custom_op("wrong_arguments::op", kernel, mutates_args=())
    try:
        with pytest.raises(LibraryError, match=f"(?s){named}"):
            register(op)
        assert op(torch.ones(2)).tolist() == [1.0, 1.0]
    finally:
        fake.library.destroy(op)


@pytest.mark.parametrize("wrong", [3, None, {"a": 1}, {"a.b": {1}}, {3: set()}])
def test_wrong_profiles(wrong, tmp_path):
    with pytest.raises(ProfileError, match="no dictionary of profiles"):
        fake.library.generate_yaml_from_profiles(wrong)
    with pytest.raises(ProfileError, match="no dictionary of profiles"):
        fake.library.save_op_profiles(wrong, tmp_path / "profiles.yaml")
    with (
        pytest.raises(ProfileError, match="no dictionary of profiles"),
        fake.library.unsafe_generate_fake_kernels(wrong),
    ):
        pass
