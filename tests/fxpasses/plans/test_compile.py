"""``fxpasses.compile``: plans of inference and training, what is refused, and damaged files."""

import copy
import functools
import gc
import os
import pickle
import weakref

import pytest
import torch
from torch import nn

import fxpasses
from fake.seam.inductor import config as inductor_config
from fxpasses.passes import TunedPasses
from fxpasses.plans.compile import Compiled
from fxpasses.plans.errors import NoPlan, PlanFileError
from fxpasses.plans.files.plan_files import read_sections, write_sections
from fxpasses.plans.inputs.arguments import describe_arguments, describe_options
from fxpasses.plans.inputs.surroundings import _own_source, surroundings
from fxpasses.plans.recording.recording import Recording
from fxpasses.plans.recording.recording_step import recording_step
from fxpasses.plans.running.loaded import Directory
from fxpasses.plans.running.plan import Plan
from fxpasses.plans.walks.reads import check_covered
from fxpasses.plans.walks.walk import Walk
from fxpasses.tuning import tuned_graph as tuning_graph
from fxpasses.tuning.tuning_session import Session
from tests.fxpasses.plans.models_for_plans import Answer, Pair

REFUSED = {"object": "a frame that changes an object"}
COUNTS = {
    "sizes": (1, 2, 2),
    "shared sizes": (1, 2, 2),
    "repeated sizes": (1, 2, 2),
    "graph break": (2, 2, 2),
    "attribute": (1, 2, 2),
}
"""How many plans the first process uses and writes, and the second uses: for the first size and for all others, for each frame, before and after."""


@pytest.mark.slow
def test_plans_are_used_by_the_next_process(cold, cache, run_models):
    for name, (agrees, used, written, refused) in cold.items():
        assert agrees, name
        if name in REFUSED:
            assert (used, written, len(refused)) == (0, 0, 1), (name, refused)
        else:
            uses, plans, _ = COUNTS.get(name, (1, 1, 1))
            if name == "sets back":
                used = min(used, 1)  # eager calls, with which each is compared, change what the plan watches
            assert (used, written, refused) == (uses, plans, {}), (
                name
            )  # the process that wrote it uses it, too
    warm, dynamo, by_torch = run_models(cache, *(name for name in cold if name not in REFUSED))
    assert not dynamo
    again, *_ = run_models(
        cache, "object"
    )  # AOTAutograd's cache may be used there: it is known that there is no plan
    assert again["object"][3] == {REFUSED["object"]: 1}
    assert len(list(cache.glob("*/*.none"))) >= len(REFUSED)
    assert by_torch == [2, 0, False]  # the plans that fxpasses.compile has written
    assert all(agrees for agrees, *_ in warm.values())
    assert warm.pop("sets back")[1] >= 1
    assert {name: used for name, (_, used, _, _) in warm.items()} == {
        name: COUNTS.get(name, (1, 1, 1))[2] for name in warm
    }


@pytest.mark.slow
def test_damaged_files_are_left_aside(cold, cache, tmp_path, run_models):
    files = sorted(cache.glob("*/*.plan"))
    assert len(files) >= 3
    content = files[0].read_bytes()
    for number, damaged in enumerate([
        b"", content[:-1], content + b"x", content[: len(content) // 2], content[:100] + b"\0" + content[101:],
        content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], b"another format\n" + content,
    ]):  # fmt: skip
        path = tmp_path / f"{number}.plan"
        path.write_bytes(damaged)
        path.chmod(0o600)
        tmp_path.chmod(0o700)
        with pytest.raises(PlanFileError, match=str(path)):
            read_sections(path)
    path.write_bytes(content)
    assert read_sections(path).keys() >= {"plan", "code"}
    path.chmod(0o666)
    with pytest.raises(PlanFileError, match="others than you may write"):
        read_sections(path)
    os.mkfifo(tmp_path / "pipe.plan", 0o600)  # whose other end would be waited for
    with pytest.raises(PlanFileError, match="no regular file"):
        read_sections(tmp_path / "pipe.plan")
    # Each plan in the place of another: the key does not fit, and nothing is used but what is compiled anew.
    contents = [file.read_bytes() for file in files]
    for file, other in zip(files, [*contents[1:], contents[0]], strict=True):
        file.write_bytes(other)
    swapped, *_ = run_models(cache, "inference", "training")
    assert all(agrees for agrees, *_ in swapped.values())
    assert [written for _, _, written, _ in swapped.values()] == [1, 1]


def test_sections_are_what_was_written(tmp_path):
    tmp_path.chmod(0o700)
    sections = {"plan": b"{}", "code": bytes(range(256)), "kernel 0 a": b""}
    write_sections(tmp_path / "a.plan", sections)
    assert read_sections(tmp_path / "a.plan") == sections
    assert [path.name for path in tmp_path.iterdir()] == ["a.plan"]


def test_what_cannot_be_seen_into_is_refused():
    for hidden in (iter([1]), (x for x in ()), memoryview(b"a"), torch, {object()}, open):
        walk = Walk()
        model = nn.Linear(2, 2)
        model.hidden = [hidden]
        if hidden is open:
            assert walk.add("model", model)
        else:
            with pytest.raises(NoPlan):
                walk.add("model", model)


def _decorated_by(held):
    def decorate(function):
        def run(*args):
            return function(*args) if held else None

        return run

    return decorate


class _Prepared(nn.Linear):
    prepare = _decorated_by(iter([1]))(lambda self: None)  # nobody can see into an iterator


def test_a_method_that_cannot_be_seen_into_must_not_be_traced():
    walk, model = Walk(), _Prepared(2, 2)
    assert walk.add("model", model) == Walk().add("model", model)
    with pytest.raises(NoPlan, match="a traced function that holds"):
        check_covered([_Prepared.prepare.__code__], walk)
    model.prepared = model.prepare  # an object of the model may be called in other ways
    model.held = [_decorated_by(iter([1]))(len)]
    with pytest.raises(NoPlan, match="iterator"):
        Walk().add("model", model)


def test_what_torch_keeps_of_a_function_after_its_first_call_is_no_content():
    @torch._disable_dynamo
    def disabled(x):
        return x + 1

    before = Walk().add("function", disabled)
    disabled(torch.ones(1))
    assert "__dynamo_disable" in vars(disabled.__wrapped__)
    assert Walk().add("function", disabled) == before
    disabled.__wrapped__.limit = 2
    assert Walk().add("function", disabled) != before


def test_the_hash_of_our_source_is_remembered(tmp_path, monkeypatch):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("FXPASSES_CACHE_DIR", str(tmp_path))
    digest = _own_source()
    (memory,) = (tmp_path / "sources").iterdir()
    assert memory.read_text() == digest
    memory.write_text("remembered")
    assert _own_source() == "remembered"
    memory.chmod(0o666)  # others could have written that
    assert _own_source() == digest


class _Choice:
    def __init__(self, by):
        self.by = by

    def uuid(self):
        return self.by


def test_a_setting_that_is_an_object_counts_with_its_identity():
    found = []
    for by in (b"1", b"1", b"2"):
        with inductor_config.patch(post_grad_custom_post_pass=_Choice(by)):
            found.append(surroundings()["setting torch._inductor.config.post_grad_custom_post_pass"])
    assert found[0] == found[1] != found[2]
    with (
        inductor_config.patch(post_grad_custom_post_pass=_decorated_by(iter([1]))(len)),
        pytest.raises(NoPlan),
    ):
        surroundings()


def test_wrong_arguments_are_named():
    with pytest.raises(fxpasses.OptionsError, match="model"):
        fxpasses.compile(3)
    with pytest.raises(fxpasses.OptionsError, match="cache"):
        fxpasses.compile(nn.Linear(2, 2), cache=True)


def test_without_a_cache_it_is_torch_compile():
    compiled = fxpasses.compile(nn.Linear(4, 4), cache="off", compiler="eager", passes=[])
    x = torch.randn(2, 4)
    torch.testing.assert_close(compiled(x), compiled.model(x))
    assert compiled.weight is compiled.model.weight
    copied = copy.deepcopy(compiled)
    assert copied.model is not compiled.model
    torch.testing.assert_close(copied(x), compiled(x))


def test_what_is_compiled_of_a_module_is_a_child_like_it(tmp_path):
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    child = fxpasses.compile(model, compiler="eager", cache=tmp_path)
    parent = nn.Sequential(child, nn.ReLU())
    assert list(parent.state_dict()) == ["0.weight", "0.bias"]
    assert next(parent.parameters()) is model.weight
    child.weight = nn.Parameter(torch.zeros(3, 3))
    assert next(parent.parameters()) is model.weight
    for again in (parent, copy.deepcopy(parent), pickle.loads(pickle.dumps(parent))):
        torch.testing.assert_close(again(x), model(x).relu())
        assert type(again[0]) is Compiled
    assert not isinstance(fxpasses.compile(torch.sin), nn.Module)


def test_a_container_that_is_compiled_has_its_parts():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = copy.deepcopy(fxpasses.compile(model, compiler="eager", cache="off"))
    assert len(compiled) == 2
    assert compiled[1] is list(compiled)[1] is compiled.model[1]
    assert not hasattr(fxpasses.compile(nn.Linear(3, 3)), "__len__")


def test_the_steps_that_lightning_calls_are_compiled():
    class Module(nn.Linear):
        def training_step(self, batch):
            return self(batch).square().mean()

    compiled = fxpasses.compile(Module(3, 1), compiler="eager", cache="off")
    x, before = torch.randn(2, 3), fxpasses.stats().graphs
    torch.testing.assert_close(compiled.training_step(x), compiled.model.training_step(x))
    assert fxpasses.stats().graphs == before + 1
    assert compiled.training_step is compiled.training_step


def test_wrappers_of_torch_compile_leave_no_trace_on_the_model(monkeypatch):
    real = torch.compile

    @functools.wraps(real)
    def keeping(model, **how):
        model.kept = copy.deepcopy(how)
        return real(model, **how)

    monkeypatch.setattr(torch, "compile", keeping)
    model = nn.Linear(2, 2)
    fxpasses.compile(model, compiler="eager", cache="off")(torch.ones(1, 2))
    assert not hasattr(model, "kept")
    assert type(copy.deepcopy({"passes": TunedPasses()})["passes"]) is TunedPasses


def test_as_a_decorator_in_a_class_it_makes_a_method():
    class Counts:
        def __init__(self, factor):
            self.factor = factor

        @fxpasses.compile(compiler="eager", cache="off")
        def scaled(self, x):
            return x * self.factor

    assert Counts(3).scaled(torch.ones(2)).tolist() == [3.0, 3.0]
    assert Counts.scaled(Counts(2), torch.ones(1)).tolist() == [2.0]


def test_as_a_decorator_it_takes_options():
    @fxpasses.compile(compiler="eager", cache="off")
    def function(x):
        return x.sin()

    x = torch.randn(3)
    torch.testing.assert_close(function(x), x.sin())
    assert isinstance(function, Compiled)


def test_a_plan_is_looked_for_again_once_the_model_is_another(tmp_path, monkeypatch):
    looked = []
    monkeypatch.setattr(Directory, "find", lambda self, abouts, *_: looked.append(abouts[0]["model"]))
    model = nn.Linear(2, 2)
    # Graphs that run in eager have no plans.
    compiled = fxpasses.compile(model, cache=tmp_path, compiler="eager")
    for factor, times in ((None, 1), (2, 2), (2, 2), *((n, n) for n in range(3, 9)), (9, 8), (10, 8)):
        model.factor = factor
        for _ in range(3):
            with torch.no_grad():
                compiled(torch.ones(1, 2))
        assert len(looked) == len(set(looked)) == times


def test_what_is_measured_is_kept_where_plans_are(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        tuning_graph, "tuned_graph", lambda gm, inputs, options, *_: seen.append(options.cache) or gm.forward
    )
    for cache in (tmp_path, "auto"):
        torch._dynamo.reset()
        fxpasses.compile(lambda x: x + 1, passes="tuned", cache=cache)(torch.ones(2))
    assert seen == [str(tmp_path), "auto"]


def test_an_error_of_the_model_has_no_other_before_it(tmp_path):
    def wrong(x):
        raise ZeroDivisionError("mine")

    # A report, of which there are no plans.
    compiled = fxpasses.compile(wrong, compiler="eager", report=tmp_path / "report", cache=tmp_path)
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        compiled(torch.ones(2))
    assert caught.value.__context__ is None


def test_torch_compile_looks_where_its_options_say(monkeypatch):
    made = []
    monkeypatch.setattr(Compiled, "__call__", lambda self, *args: made.append(self) or args)
    model = nn.Linear(2, 2)
    for options in ({"cache": "folder"}, {"cache": "off"}, None):  # tests run with FXPASSES_CACHE_DIR=off
        call = torch.compile(model, backend="fxpasses", options=options, dynamic=True)
        if options == {"cache": "folder"}:
            assert call(3) == (3,)
    monkeypatch.delenv("FXPASSES_CACHE_DIR")
    assert torch.compile(model, backend="fxpasses")(4) == (4,)  # nothing has to be asked for
    with inductor_config.patch(force_disable_caches=True):
        torch.compile(model, backend="fxpasses")
    torch.compile(model, backend="eager")
    assert [compiled.model for compiled in made] == [model, model]
    assert [compiled._plan_store._path.name for compiled in made] == ["folder", "fxpasses"]
    with pytest.raises(fxpasses.OptionsError, match="cache"):
        fxpasses.Options.parse({"cache": 3})


def test_objects_among_arguments_are_walked_over():
    model, x = nn.Linear(2, 2), torch.ones(1)
    answer = Answer(x, Pair(model, [x]))
    tokens, tensors, objects = describe_arguments((model, [model, 3], answer), {}, lambda tensor: None)
    assert {id(item) for item in objects} == {id(model), id(Answer), id(Pair)}
    assert [id(item) for item in tensors] == [id(x)]
    assert describe_arguments((model, [model, 3], answer), {}, lambda tensor: None)[0] == tokens
    answer.more = 1
    assert describe_arguments((model, [model, 3], answer), {}, lambda tensor: None)[0] != tokens


@pytest.mark.slow
def test_an_input_whose_backward_pass_never_comes_is_freed(tmp_path):
    torch._dynamo.reset()
    compiled = fxpasses.compile(nn.Linear(2, 2), cache=str(tmp_path), compiler="eager")
    x = torch.ones(1, 2)
    seen = weakref.ref(x)
    compiled(x)
    del x
    gc.collect()
    assert seen() is None
    assert compiled.why_no_plan == ""  # it is still to come


def test_a_full_disk_is_not_remembered(tmp_path, monkeypatch):
    torch._dynamo.reset()

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recording, "_write", refuse)
    compiled = fxpasses.compile(nn.Linear(2, 2), cache=str(tmp_path), compiler="eager")
    with torch.no_grad():
        compiled(torch.ones(1, 2))
    assert compiled.why_no_plan == "the disk refuses: No space left on device"
    assert list(tmp_path.glob("*/*.none")) == []


def test_errors_of_plans_cost_the_plan_alone(tmp_path, monkeypatch, caplog):
    torch._dynamo.reset()

    def fails(*_):
        raise ZeroDivisionError("in the middle")

    model, x = nn.Linear(2, 2), torch.ones(1, 2)
    for owner, name, reason in ((Recording, "_observe", "recording"), (Walk, "add", "looking for a plan")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, recording_step(fails) if owner is Recording else fails)
            compiled = fxpasses.compile(copy.deepcopy(model), cache=str(tmp_path), compiler="eager")
            with torch.no_grad():
                torch.testing.assert_close(compiled(x), model(x))
        assert compiled.why_no_plan == f"an error while {reason}: ZeroDivisionError"
        assert "in the middle" in caplog.text
        caplog.clear()


def test_a_call_that_raises_runs_once(tmp_path):
    torch._dynamo.reset()
    runs = []

    @torch.compiler.disable
    def note():
        runs.append(1)
        if len(runs) > 1:
            raise ValueError("of the model")

    def function(x):
        y = x.sin()
        note()
        return y + 1

    compiled = fxpasses.compile(function, cache=str(tmp_path), compiler="eager")
    compiled(torch.ones(2))
    with pytest.raises(ValueError, match="of the model"):
        compiled(torch.ones(2))
    assert len(runs) == 2


@pytest.mark.slow
def test_a_plan_of_a_tuned_program_holds_as_long_as_what_was_kept_and_gives_way_where_it_fails(
    tmp_path, monkeypatch
):
    options = {
        "passes": "tuned",
        "cache": str(tmp_path),
        "inductor": {"cpp_wrapper": False},
    }  # nothing to try
    x = torch.randn(8)

    def process():
        torch._dynamo.reset()
        fxpasses.reset_stats()
        compiled = torch.compile(lambda x: x.sin() * 2, backend="fxpasses", options=options)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), x.sin() * 2)
        stats = fxpasses.stats()
        return stats.tuned, stats.tuned_reused, stats.plans_written, stats.plans_used, stats.plans_refused

    assert process() == (1, 0, 0, 0, {"passes that are chosen by measuring": 1})
    assert process() == (0, 1, 1, 0, {})
    with monkeypatch.context() as fails:
        fails.setattr(Plan, "__call__", lambda *_: 1 / 0)
        assert process()[1:4] == (1, 0, 1)
    (kept,) = tmp_path.glob("tuned/*/*.json")
    kept.write_text(kept.read_text().replace('"struck": ""', '"struck": "it failed"'))
    assert process() == (0, 1, 1, 0, {})


def test_the_key_of_a_plan_says_how_passes_are_chosen():
    told = [
        describe_options({"passes": passes})
        for passes in ("tuned", Session(), Session(goal="memory"), Session(passes=()))
    ]
    assert told[0] == told[1] == describe_options({"passes": Session(seconds=1.0, fresh=True)})
    assert len({option["passes"] for option in told}) == 3


@pytest.mark.slow
def test_sizes_of_a_model_that_counts_its_batches_are_those_of_a_plan(tmp_path):
    """Dynamo has a guard source for the number in ``num_batches_tracked``, about which it asks nothing."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    for plans in (0, 1):
        torch._dynamo.reset()
        fxpasses.reset_stats()
        compiled = fxpasses.compile(model, cache=tmp_path, dynamic=True)
        for rows in (3, 5):
            compiled(torch.randn(rows, 4)).sum().backward()
        assert (fxpasses.stats().graphs, fxpasses.stats().plans_refused) == (1 - plans, {})
        assert fxpasses.stats().plans_used >= plans


def test_sizes_and_parts_of_arguments_among_results(tmp_path):
    linear = torch.nn.Linear(8, 8)

    def answer(batch):
        return {"loss": linear(batch["x"]).sum(), "rows": batch["x"].shape[0], "names": batch["names"]}

    for process in range(2):
        torch._dynamo.reset()
        compiled = fxpasses.compile(answer, cache=tmp_path)
        before = fxpasses.stats().graphs
        for rows in (2, 3, 5, 4):
            batch = {"x": torch.randn(rows, 8), "names": ["a", "b"]}
            found = compiled(batch)
            torch.testing.assert_close(found["loss"], answer(batch)["loss"])
            found["loss"].backward()
            assert found["rows"] == rows
            assert found["names"] is batch["names"]
        assert (fxpasses.stats().graphs == before) == (process == 1)
