"""Recording of one call that compiles: makes a plan of what the compiler stack produced, or says why not."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from fake.seam.dispatch import is_any_autocast_enabled
from fxpasses._torch import dynamo_config
from fxpasses.compiling.observing import Observer, Recorder, recorded_by, recorder
from fxpasses.graphs.rewriting import outputs_of
from fxpasses.plans import _torch, native
from fxpasses.plans.errors import NoPlan
from fxpasses.plans.files.plan_files import hash_of, write_plan, write_refusal
from fxpasses.plans.graph_breaks.between import Functions, Stub, names_of
from fxpasses.plans.graph_breaks.frames import PYTHON, function_of
from fxpasses.plans.inputs.arguments import containers_of
from fxpasses.plans.inputs.exchanged import numbers_of_exchanged
from fxpasses.plans.inputs.given_numbers import names_of_numbers, numbers_among
from fxpasses.plans.inputs.parameter_gradients import have_no_gradients
from fxpasses.plans.inputs.surroundings import surroundings
from fxpasses.plans.objects._torch_optimizers import is_optimizer_step
from fxpasses.plans.recording import _torch_compiled as _t
from fxpasses.plans.recording._torch_facts import metadata_before_unwrapping, plain_facts, runtime_facts
from fxpasses.plans.recording.generated import Module
from fxpasses.plans.recording.recorded_forward import RecordedForward
from fxpasses.plans.recording.recorded_frames import RecordedFrames
from fxpasses.plans.recording.recorded_inputs import RecordedInputs, check_mutated_inputs, version_counters
from fxpasses.plans.recording.recorded_trace import RecordedTrace
from fxpasses.plans.recording.recording_step import recording_step
from fxpasses.plans.running.forward_alone import FORWARD_ALONE
from fxpasses.plans.running.runtime import load_library
from fxpasses.plans.tensors.shards import RecordedShards, flatten_sharded
from fxpasses.plans.walks.reads import Read, read_of_attributes, reads_of_optimizers, walk_reads
from fxpasses.plans.walks.replaced import split_lazy_module_reads, torch_functions_in
from fxpasses.plans.walks.results import layout_of
from fxpasses.plans.walks.walk import Walk
from fxpasses.plans.walks.written_again import note_run

log = logging.getLogger(__name__)


class Recording(Observer, Recorder):
    """Watches one compilation and writes its plan.

    Args:
        model: the model.
        arguments: the tensors among the arguments.
        objects: the objects among the arguments that have to be walked.
        folder: maps the factors of a plan to its folder.
        abouts: the key's factors, those with symbolic sizes, and both of these with symbolic numbers.
        given: the arguments of the call.
        done: called once with the path of the plan, if one is written, and the reason if not, or "".
        keep_in_memory: called with a plan that cannot be written: its content, frame code, and what runs its graph.
        functions: those between the graphs of the model.

    Attributes:
        is_over: whether the call is over.
        file: the plan, once it is written.
    """

    def __init__(
        self,
        model: Any,
        arguments: Sequence[torch.Tensor],
        objects: Sequence[Any],
        folder: Callable[[dict[str, Any]], Path],
        abouts: Sequence[dict[str, Any]],
        given: tuple[tuple[Any, ...], dict[str, Any]],
        done: Callable[[Path | None, str], None],
        keep_in_memory: Callable[[dict[str, Any], bytes, Callable[..., Any]], None],
        functions: Functions,
    ) -> None:
        super().__init__()
        self._model, self._arguments, self._objects, self._functions = model, arguments, objects, functions
        self._folder, self._abouts, self._about, self._done = folder, abouts, abouts[0], done
        self._keep, self._versions = keep_in_memory, list[int]()
        self._in_memory: Callable[..., Any] | None = None
        self._graphs, self._facts, self._outputs = dict[str, Any](), dict[str, Any](), list[Any]()
        self._trace, self._forward = RecordedTrace(), RecordedForward(given, arguments, objects)
        self._calls = self._compilations = 0
        self._frames = RecordedFrames(model, functions)
        self._walk, self._frame_code = Walk(keep_facts=True, leaves_open=True), b""
        self._reads, self._lazy, self._content = list[Any](), list[Any](), dict[str, Any]()
        self._without_gradient, self._files = list[int](), dict[str, str]()
        self._shards, self._containers = RecordedShards(), containers_of(given)
        self._inputs, self._given = RecordedInputs(), numbers_among(*given)
        self._autocast = self.is_over = self._frame_was_seen = self._resumes = self._finished = False
        self._number_of_outputs, self._refused, self._refusal_lasts = 0, "", True
        self.file: Path | None = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Record what is compiled in this block."""
        self._skips_hooks = dynamo_config.skip_nnmodule_hook_guards
        with (
            recorded_by(self),
            _t.recorded_compilation(),
            self._frames.watching(self._on_traced_frame, self._on_compiled_frame),
            self._functions.run(functools.partial(recorded_by, None)),
        ):
            try:
                yield
            except BaseException:
                self._finished = True
                self._release_model()
                raise
        self._resumes = not self._compilations and self._frames.has_resumed_graphs()
        if reason := self._frames.problem():
            self.refuse(reason)

    def _on_traced_frame(self) -> None:
        if recorder() is self and not self._compilations and not self._frame_was_seen:
            self._note_trace()

    def _on_compiled_frame(self, code: types.CodeType, new_code: types.CodeType) -> None:
        # Not a frame of a resumed function.
        if recorder() is self and self._frames.add(code, new_code):
            self._frame_was_seen = True
            self._wrap_resume_functions()
            if not self._compilations:
                self._check_trace()  # before it runs

    @recording_step
    def _wrap_resume_functions(self) -> None:
        self._frames.wrap_resume_functions()

    def instead_of(self, code: types.CodeType) -> types.CodeType | None:
        """What a function between graphs runs in place of ``code``, which Dynamo is about to compile."""
        return self._frames.instead_of(code)

    @property
    def has_graph(self) -> bool:
        """Whether anything was compiled for the frames of the model itself, or for what they resume with."""
        return self._compilations > 0 or self._resumes

    def refuse(self, reason: str) -> None:
        """Give up on a plan. The first ``reason`` counts."""
        self._refused = self._refused or reason

    def observer(self) -> Observer:
        """Called by the backend for each graph from Dynamo."""
        self._compilations += 1
        if self._refused:
            return Observer()
        self._observe()
        return self

    @recording_step
    def depends_on(self, file: Path | None) -> None:
        """Called by the backend if measurements choose passes. ``file`` is an earlier choice, or None."""
        if file is None:
            self._refusal_lasts = False  # next time there is a file
            self.refuse("passes that are chosen by measuring")
            # No plan comes of this trace: spare each call the guards that only plans need, a third of all.
            dynamo_config.skip_nnmodule_hook_guards = self._skips_hooks
        else:
            self._files[str(file)] = hash_of(file.read_bytes())

    @recording_step
    def _observe(self) -> None:
        self._autocast = is_any_autocast_enabled()
        if self._compilations > 1:
            self.refuse("a graph break")
        self._note_trace()

    @recording_step
    def _note_trace(self) -> None:
        """Note what the trace of a frame depends on, before Dynamo drops it at the end of the trace."""
        if not _t.is_tracing_call_of(self._model):
            self.refuse("another function runs in Python")
        if _t.depends_on_set_order():
            self.refuse("the order of a set")
        self._frames.called = _t.inlined_callable()
        differs = self._trace.note(dictionaries=is_optimizer_step(getattr(self._model, "__code__", None)))
        self._frames.why_more = self._frames.why_more or (differs and "a frame that changes an object")

    @recording_step
    def _note_inputs(self, graph: fx.Graph) -> None:
        self._inputs.note_graph(graph)
        self._forward.note_trace(graph)

    @recording_step
    def guards(self, shape_env: Any, graph: fx.Graph) -> None:
        """Called by the backend once the guards on sizes are known."""
        self._inputs.note_graph(graph)
        self._inputs.compile_guards(shape_env)

    def graph(self, kind: str, gm: fx.GraphModule) -> None:
        if kind == "forward":
            self._forward.note_graph(gm)
        elif kind == "backward":
            self._without_gradient = [i for i, value in enumerate(outputs_of(gm.graph)) if value is None]

    @recording_step
    def compiled(self, kind: str, compiled: Callable[..., Any]) -> None:
        """Called by the pipeline for each compiled graph."""
        self._graphs[kind] = compiled
        if kind != "backward":
            self._facts = runtime_facts()
            if self._facts["refused"]:
                self.refuse(self._facts["refused"])
        elif self.is_over and not self._finished:  # by another thread, which also compiled it
            self._finish()

    def watched(
        self,
        compiled: Callable[..., Any],
        lifted: Sequence[torch.Tensor] = (),
        graph: fx.Graph | None = None,
        *,
        in_memory: bool = False,
    ) -> Callable[..., Any]:
        """Wrap a compiled function to note the inputs and outputs of its first call.

        Args:
            compiled: the function.
            lifted: the tensor attributes of Dynamo's graph, which are inputs of the compiled function.
            graph: Dynamo's graph.
            in_memory: whether the plan is for this process only, because the function cannot be written.
        """
        self._in_memory = compiled if in_memory else None
        self._inputs.lifted = len(lifted)
        if graph is not None:
            self._note_inputs(graph)

        def run(*inputs: Any) -> Any:
            if self._finished:
                note_run(self.file)
                return compiled(*inputs)
            if self.is_over:
                if self._forward.count_run_alone():
                    self.write_forward_alone()
                return compiled(*inputs)
            self._calls += 1
            if self._calls == 1:
                self._note_first_call([*lifted, *inputs])
            outputs = compiled(*inputs)
            if in_memory and version_counters(inputs) != self._versions:
                self.refuse("changed tensors, and a program that cannot be written")
            self._outputs = list(outputs)
            self._note_outputs()
            return outputs

        return run

    @recording_step
    def _note_outputs(self) -> None:
        """Note what the graph returned, and what AOTAutograd knew before it unwrapped sharded tensors."""
        before = metadata_before_unwrapping(self._outputs) if "forward" in self._graphs else None
        self._number_of_outputs = self._shards.note_call(
            self._outputs, self._facts, before, with_backward="forward" in self._graphs
        )

    def finish(self, result: Any) -> None:
        """End the call, which returned ``result``. Write the plan now, or once there is a backward graph."""
        self._end_call(result)
        if self._refused:
            self.end(None, self._refused, lasting=False)  # after an error; otherwise it has ended already

    @recording_step
    def _note_first_call(self, inputs: Sequence[Any]) -> None:
        """Inspect the inputs of the graph's first call."""
        self._versions = version_counters(inputs)
        self._check_trace()
        if self._in_memory is None:
            check_mutated_inputs(flatten_sharded(inputs), self._facts)
        self._inputs.note_sources(inputs, self._walk, self._arguments)
        self._shards.note_inputs(inputs)
        self._forward.note_inputs(inputs, self._inputs.sources)
        self._content |= {"inputs": self._inputs.sources, "lifted": self._inputs.lifted}

    @recording_step
    def _check_trace(self) -> None:
        """Inspect what the trace depended on, after the trace and before any of its effects."""
        walk, trace = self._walk, self._trace
        reads, self._lazy = split_lazy_module_reads(trace.reads())
        if walk.walk_call(self._model, self._objects) != [self._about["model"], self._about["objects"]]:
            raise NoPlan("the model changes while it is compiled")
        changed = {name for name, _ in surroundings().items() ^ self._about["surroundings"].items()}
        changed.difference_update(_torch.DYNAMIC_SETTINGS if self._about["dynamic"] != "None" else ())
        if changed:
            raise NoPlan(f"changed while it is compiled: {', '.join(sorted(changed))}")
        self._content = {"model_tensors": len(walk.tensors), "read": ""}
        self._walk_reads(reads)
        self._inputs.given = names_of_numbers(self._model, self._given)
        names = self._inputs.find_symbolic(trace, self._arguments, walk)
        if not self._compilations:
            self._inputs.compile_frame_guards(trace.shape_env)
        elif self._inputs.are_fixed and self._inputs.attributes:
            self._inputs.compile_guards(trace.shape_env)
        self._walk_reads([read_of_attributes(names)])
        gradients = trace.reads_gradients
        self._walk_reads(reads_of_optimizers(walk, trace.codes, self._inputs.options, gradients=gradients))
        if gradients and not have_no_gradients(self._arguments):
            raise NoPlan("gradients are read, and an argument has one")
        read = {id(tensor): i for i, tensor in enumerate(walk.tensors[self._content["model_tensors"] :])}
        places = enumerate(map(read.get, map(id, self._arguments)))
        self._content["arguments_read"] = {str(i): place for i, place in places if place is not None}
        trace.check(walk, self._containers)
        exchanged = numbers_of_exchanged(trace.exchanged, walk.places, walk.tensors, self._inputs.grow)
        self._content |= {"exchanged": exchanged, "grow": sorted(self._inputs.grow)}

    def _walk_reads(self, reads: Sequence[Read]) -> None:
        digests = self._content["read"], walk_reads(self._walk, reads)
        self._content["read"] = ":".join(filter(None, digests))
        self._reads += reads

    @recording_step
    def _end_call(self, result: Any) -> None:
        if not self._compilations:
            self._write_without_graph()
            return
        try:
            if self._refused:
                raise NoPlan(self._refused)
            if self._calls != 1:
                raise NoPlan("a graph that was called more than once")
            self._describe_result(result)
        except NoPlan as error:
            self.end(None, error.reason, error.where)
            return
        self.is_over = True
        # A backward pass may never come. Hold nothing of the model, whose compiled code holds this recording.
        self._release_model()
        if "forward" not in self._graphs or "backward" in self._graphs:
            self._finish()
        else:
            self._forward.defer_write(self, self._folder(self._about).parent)

    @recording_step
    def write_forward_alone(self) -> None:
        """Write a plan without a backward pass, since none has come so far."""
        if self._finished or self.file is not None or self._in_memory is not None:
            return
        try:
            self.file = self._write(FORWARD_ALONE)
        except (NoPlan, OSError) as error:
            log.info("no plan without a backward pass: %s", error)
        else:
            self._done(self.file, "")

    def _write_without_graph(self) -> None:
        """Write a plan without a graph: which functions in Python have graphs, and how the frame resumes."""
        goes_on, stubs = self._resumes, self._functions.stubs()
        is_alone = not goes_on and not self._functions and self._frames.is_single_frame()
        try:
            if (goes_on or is_alone) and self._refused:
                raise NoPlan(self._refused)
            if goes_on:
                self._describe_frame(stubs)
            elif is_alone:  # it runs unchanged
                self._content |= {"frame": None, "between": []}
            elif not stubs:
                raise NoPlan("nothing was compiled")
            else:
                # It runs in Python and may change the model on the way, as DistributedDataParallel does.
                self._walk = Walk(keep_facts=True, leaves_open=True)
                self._walk.walk_call(self._model, self._objects)
                self._reads, self._trace, self._lazy = [], RecordedTrace(), []
                content = {"model_tensors": sys.maxsize, "read": "", "frame": None}
                self._content = content | {"between": names_of(stubs)}
            module = Module(fixed=False, operators=[])
            asked = self._inputs.guard_arguments(module) or []
            sections = {"frame": self._frame_code} if goes_on else {}
            sections |= {"code": module.sections()[0]} if asked else {}
            any_sizes = not goes_on or self._inputs.any_sizes  # code in Python does not depend on sizes
            plan = {**self._plan_content({"changed": []}, asked, any_sizes), "kind": PYTHON, "inputs": []}
            self.end(self._write_file(plan, sections), "")
        except NoPlan as error:
            self.end(None, error.reason, error.where)

    def _describe_frame(self, stubs: Sequence[Stub]) -> None:
        own = function_of(self._model)[0].__globals__.get("__name__")
        names = {name for module, name, *_ in self._reads if module == own}
        self._content["through"] = self._frames.through()
        described = self._frames.describe(stubs, names)
        self._content["frame"], self._frame_code, self._content["between"] = described

    def _describe_result(self, result: Any) -> None:
        """Describe how the result is made of the graph's outputs: as plain data, or by Dynamo's code.

        Raises:
            NoPlan: neither is possible.
        """
        walk, stubs = self._walk, self._functions.stubs()
        try:
            if self._frames.why_more or stubs:
                raise NoPlan(self._frames.why_more or "another function runs in Python")
            layout = layout_of(result, walk, self._arguments, self._outputs, self._containers)
            if not self._inputs.are_fixed and layout.has_number:
                raise NoPlan("a number among the results of symbolic sizes")
            classes = [name for name in dict.fromkeys(layout.classes) if name not in self._reads]
            self._walk_reads(classes)
            self._content["layout"] = layout.content
        except NoPlan as why:
            try:
                self._describe_frame(stubs)
            except NoPlan as error:
                log.info("no plan: %s", error)
                raise (error if self._frames.resumed or stubs else why) from None

    def _finish(self) -> None:
        try:
            path = self._write()
        except NoPlan as error:
            self.end(None, error.reason, error.where)
        except OSError as error:
            self.end(None, f"the disk refuses: {error.strerror or type(error).__name__}", lasting=False)
        else:
            self.end(path, "")

    def end(self, path: Path | None, reason: str, where: str = "", *, lasting: bool = True) -> None:
        """End it. Args: those of :meth:`~fxpasses.plans.recording.recording_step.CompilationRecorder.end`."""
        if not self._finished:
            self._finished, self.file = True, path
            if where:
                log.info("no plan: %s: %s", reason, where)
            if reason and self._trace.codes and lasting and self._refusal_lasts and self._in_memory is None:
                try:
                    write_refusal(self._folder(self._about), reason, self._about)
                except OSError as error:
                    log.info("why there is no plan is not kept: %s", error)
            self._done(path, reason)
        self._release_model()
        self._content, self._graphs, self._facts, self._reads, self._trace = {}, {}, {}, [], RecordedTrace()

    def _release_model(self) -> None:
        story, self._walk = self._walk.story, Walk()
        self._walk.story = story
        self._model = None
        for name in ("_functions", "_frames"):
            vars(self).pop(name, None)
        self._arguments, self._objects, self._outputs = [], [], []
        self._trace.clear()

    def _write(self, kind: str = "") -> Path | None:
        if self._in_memory is not None:
            if self._inputs.attributes or self._inputs.open:
                raise NoPlan("a symbolic number, and a program that cannot be written")
            folder = self._folder(self._about)
            check = native.build(_t.kernel_compiler(), folder.parent)
            if check is not None:
                native.use_library(functools.partial(load_library, native.ENTRY, check, folder))
            self._keep(self._plan_content({"changed": []}, None, False), self._frame_code, self._in_memory)
            return None
        kind = kind or ("forward" if "forward" in self._graphs else "inference")
        facts = plain_facts(
            self._facts["metadata"], self._without_gradient, self._shards, autocast=self._autocast
        ) | {"fixed": self._inputs.are_fixed}
        if self._number_of_outputs != facts["outputs"]:
            raise NoPlan("a graph whose outputs are rearranged")
        module = Module(fixed=self._inputs.are_fixed, operators=self._trace.operators)
        if kind == FORWARD_ALONE:
            self._content |= self._forward.check_repeatable(self._content, facts, self._trace, self._inputs)
        module.add("forward", self._graphs["inference" if kind == "inference" else "forward"])
        if kind == "forward":
            module.add("backward", self._graphs["backward"])
            self._inputs.fix_floats(self._given)
        asked = self._inputs.guard_arguments(module)
        if kind != "inference" and self._inputs.options:
            raise NoPlan("options of an optimizer, and a backward pass")  # may guard on their values
        code, kernels, externs, constants = module.sections()
        plan = self._plan_content(facts, asked, self._inputs.any_sizes)
        plan |= {"kind": kind, "externs": externs, "constants": constants}
        sections = {"code": code} | ({"frame": self._frame_code} if self._frame_code else {})
        sections |= {f"kernel {name}": data for name, data in kernels.items()}
        check = native.build(_t.kernel_compiler(), self._folder(plan["about"]).parent)
        if check is not None:
            sections["check"] = check
        return self._write_file(plan, sections)

    def _write_file(self, plan: dict[str, Any], sections: dict[str, bytes]) -> Path:
        last = plan["kind"] == FORWARD_ALONE
        return write_plan(self._folder(plan["about"]), plan, self._walk.story, sections, last=last)

    def _plan_content(self, facts: dict[str, Any], asked: Any, any_sizes: bool) -> dict[str, Any]:
        """What decides whether a plan is used, and how its graph is called."""
        return {
            **self._content,
            "facts": facts,
            "asked": asked,
            "numbers": sorted(self._inputs.attributes.values()),
            "reads": [list(read) for read in self._reads],
            "functions": [*torch_functions_in([*self._trace.codes, *self._trace.targets]), *self._lazy],
            "files": self._files,
            "about": self._abouts[any_sizes + 2 * bool(self._inputs.open)],
            "any_sizes": any_sizes,
            "open": self._inputs.open,
            "other_numbers": {k: repr(v) for k, v in self._given.items() if k not in self._inputs.open},
        }
