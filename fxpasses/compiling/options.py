"""The options of the backend: ``torch.compile(model, backend="fxpasses", options={...})``."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, get_args

from torch import fx

from fake.error_text import short_repr
from fake.wrong_arguments import is_path
from fxpasses._torch import inductor_config, inductor_mode_options
from fxpasses.errors import OptionsError, did_you_mean, unknown_name
from fxpasses.pass_manager.pass_base import Pass
from fxpasses.pass_manager.specification import parse_pass
from fxpasses.passes import DEFAULT_PASSES, TUNED_PASSES, TunedPasses, default_passes
from fxpasses.passes.registry import active_passes, available_passes

Compiler = Literal["inductor", "eager"]
OnFailure = Literal["raise", "eager", "isolate"]
CheckLevel = Literal["structure", "values", "off"]
Partition = Literal["fxpasses", "torch"]
Ranks = Literal["check", "agree", "off"]


@dataclass(frozen=True)
class Options:
    """Options of one ``torch.compile(..., backend="fxpasses")``.

    Each field is a key of the ``options`` dictionary. The constructor checks types and values, :meth:`parse`
    checks names.

    Attributes:
        passes: the passes to run: :class:`~fxpasses.Pass` objects, or names of available passes with their
            options (``"fold_constants{max_bytes=1024}"``). ``"default"`` stands for the default pipeline, and
            ``[]`` runs no passes. ``"tuned"`` alone stands for the passes measured best (see
            :func:`fxpasses.tune`). Passes of enclosing :func:`fxpasses.use_passes` blocks are added. Passes
            run in this order if their contracts allow it.
        memory_budget: between 0.0 and 1.0: how much may be saved for the backward pass, as a fraction of what
            an unconstrained minimum cut would save. Less memory costs more recomputation. ``None`` uses
            torch's own setting (``torch._functorch.config.activation_memory_budget``, 1.0 unless changed).
        partition: who decides what is saved for the backward pass: ``"fxpasses"``, or the partitioner of
            ``"torch"`` with torch's settings for it.
        compiler: who compiles the partitioned graphs: ``"inductor"``, or ``"eager"`` to run them operator by
            operator, which shows whether Inductor or an earlier stage is at fault.
        inductor: Inductor's own options, with the names of ``torch._inductor.config``
            (``{"max_autotune": True, "triton.cudagraphs": True}``).
        mode: a mode string of ``torch.compile`` (``"reduce-overhead"``, ``"max-autotune"``, ...). It stands
            for the Inductor options that torch associates with it. ``inductor`` overrides individual ones.
        on_failure: ``"raise"`` an error that names the stage, run the graph in ``"eager"`` and count it in
            :func:`fxpasses.stats`, or ``"isolate"`` what Inductor cannot lower, so that only those calls run
            in eager. If another stage fails, ``"isolate"`` runs the whole graph in eager.
        check: what is checked after each pass: the ``"structure"`` of the graph, also its ``"values"`` on the
            inputs of the first calls and on others (see :mod:`fxpasses.checking`; slow), or nothing
            (``"off"``).
        report: a directory for the captured graphs as readable files, and as data for ``fxpasses report``, or
            ``None``.
        accelerate: whether Dynamo's and AOTAutograd's tracing uses ``fake``'s dispatch cache: the same graphs
            and guards in less time. Has no effect on a torch version that ``fake`` does not know.
        regions: which repeated layers are compiled once and called wherever they occur: with ``"auto"``,
            those that save more than they cost; with ``"always"``, every repeated subgraph; with a list of
            patterns, the modules whose paths match one (``["blocks.*"]``); with ``"off"``, none. See
            :func:`fxpasses.regions`.
        compiled_autograd: whether backward passes that go through this compiled code are captured as one
            graph each, including hooks and gradient accumulation, and compiled with the same options (see
            :mod:`compiled_autograd`). Those that cannot be captured run as they would without this option.
        ranks: whether the processes of a job ``"check"`` that all of them compiled the same collectives,
            before a compiled graph with collectives first runs. A rank that differs or does not answer is
            named (:class:`~fxpasses.errors.RankMismatchError`). With ``"agree"``, the first rank also decides
            what all ranks save for the backward pass.
        cache: where the first call looks for an earlier process's plan and stores its own: a directory,
            ``"off"``, or ``"auto"``, which is the directory in the environment variable
            ``FXPASSES_CACHE_DIR``, else a folder ``fxpasses`` in ``TORCHINDUCTOR_CACHE_DIR``, else one in the
            directory for temporary files.

    >>> Options.parse({"memory_budget": 0.5}).memory_budget
    0.5
    """

    passes: tuple[Pass, ...] = field(default_factory=default_passes)
    memory_budget: float | None = None
    partition: Partition = "fxpasses"
    compiler: Compiler = "inductor"
    inductor: Mapping[str, Any] = field(default_factory=dict)
    mode: str | None = None
    on_failure: OnFailure = "raise"
    check: CheckLevel = "structure"
    report: str | None = None
    accelerate: bool = True
    regions: Literal["auto", "off", "always"] | tuple[str, ...] = "auto"
    compiled_autograd: bool = False
    ranks: Ranks = "check"
    cache: str = "auto"

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))

    @classmethod
    def names(cls) -> list[str]:
        """The valid keys, in documentation order."""
        return [f.name for f in dataclasses.fields(cls)]

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None = None, mode: str | None = None) -> Options:
        """Create ``Options`` from the arguments of ``torch.compile``.

        Args:
            options: the ``options`` argument of ``torch.compile``.
            mode: its ``mode`` argument.

        Raises:
            OptionsError: if a name is unknown (lists the valid ones and the nearest), a type is wrong, a
                value is out of range, or two options contradict each other.
        """
        if not isinstance(options, Mapping | None):
            raise OptionsError("options", options, "names of options with their values")
        given = dict(options or {})
        for key, value in given.items():
            name = key if isinstance(key, str) else short_repr(key)
            if name not in cls.names():
                problem = " ".join(filter(None, [unknown_name("option", name, cls.names()), _hint(name)]))
                raise OptionsError(name, value, valid=cls.names(), problem=problem)
        if mode is not None:
            given.setdefault("mode", mode)
        parsed = cls(**given)
        if parsed.partition == "torch" and parsed.ranks == "agree":
            problem = "with ranks='agree' one rank decides what all save by the partition of fxpasses: leave out one of the two"
            raise OptionsError("partition", "torch", problem=problem)
        added = tuple(item for item in active_passes() if item not in parsed.passes)
        return dataclasses.replace(parsed, passes=(*parsed.passes, *added)) if added else parsed

    def of_region(self, gm: fx.GraphModule) -> Options:
        """The options for the graph of a region that is cut out of a graph compiled with these options."""
        return self

    def asked_for(self) -> tuple[Pass, ...]:
        """The passes that are reported to the user if they change nothing."""
        return self.passes

    def repro_directory(self) -> Path:
        """The directory for repro files."""
        return Path(self.report or ".") / "fxpasses_repros"

    def inductor_patches(self) -> dict[str, Any]:
        """The settings of ``torch._inductor.config`` that these options stand for."""
        provenance = (
            {"trace.provenance_tracking_level": 1} if self.report else {}
        )  # records which kernel computes which node
        return {**provenance, **(inductor_mode_options(self.mode) if self.mode else {}), **self.inductor}


def _hint(name: str) -> str:
    if name in _inductor_options():
        return f"{name!r} is an option of Inductor: write options={{'inductor': {{{name!r}: ...}}}}."
    return ""


def _inductor_options() -> dict[str, Any]:
    return inductor_config.get_config_copy()  # type: ignore[attr-defined]


def _check_passes(name: str, value: Any) -> tuple[Pass, ...]:
    if isinstance(value, TunedPasses) or (isinstance(value, str) and value == TUNED_PASSES):
        return default_passes()  # to begin with
    if isinstance(value, str) and did_you_mean(value, [TUNED_PASSES]):
        raise OptionsError.for_choice(name, value, [TUNED_PASSES])
    return check_listed_passes(name, value)


def check_listed_passes(name: str, value: Any) -> tuple[Pass, ...]:
    """Resolve a list of passes and pass names to passes.

    Args:
        name: the argument's name, as the user wrote it.
        value: its value.

    Raises:
        OptionsError: if it is not such a list, or names a pass that does not exist.
    """
    if isinstance(value, (str, Pass)) or not isinstance(value, Sequence):
        raise OptionsError(name, value, "a list of passes and pass names")
    chosen: list[Pass] = []
    for item in value:
        if isinstance(item, Pass):
            chosen.append(item)
        elif isinstance(item, str) and item == DEFAULT_PASSES:
            chosen.extend(default_passes())
        elif isinstance(item, str):
            chosen.append(parse_pass(item, available_passes()))
        elif isinstance(item, type) and issubclass(item, Pass):
            raise OptionsError(
                name, value, f"an instance: write {item.__name__}() instead of {item.__name__}"
            )
        else:
            raise OptionsError(name, value, "passes or pass names; wrap a function with fxpasses.graph_pass")
    return tuple(chosen)


def _check_fraction(name: str, value: Any) -> float | None:
    if value is None:
        return None
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 <= value <= 1:  # the comparison rejects NaN
        raise OptionsError(name, value, "a number from 0.0 to 1.0")
    return float(value)


def _check_choice(choices: tuple[str, ...]) -> Any:
    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in choices:
            raise OptionsError.for_choice(name, value, choices)
        return value

    return check


def _check_inductor(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise OptionsError(name, value, "a dictionary of Inductor options")
    valid = _inductor_options() if value else {}  # looked up only if needed, to avoid importing Inductor
    checked = {}
    for key, setting in value.items():
        key = str(key).replace("-", "_")
        if key not in valid:
            raise OptionsError(name, key, valid=valid, problem=unknown_name("Inductor option", key, valid))
        if key == "custom_partitioner_fn":
            raise OptionsError(
                name, key, "no partition function: fxpasses brings its own (see memory_budget)"
            )
        default = valid[key]
        if not _has_type_of(setting, default):
            raise OptionsError(f"{name}[{key!r}]", setting, f"a value of type {type(default).__name__}")
        checked[key] = setting
    return checked


def _has_type_of(setting: Any, default: Any) -> bool:
    """Whether a setting has the type of its default, if that type is a plain one."""
    if type(default) not in (bool, int, float, str) or setting is None:
        return True
    return isinstance(setting, (type(default), int) if type(default) is float else type(default))


def _check_mode(name: str, value: Any) -> str | None:
    if value is None:
        return None
    modes = inductor_mode_options()
    if not isinstance(value, str):
        raise OptionsError.for_choice(name, value, modes)
    if value not in modes:
        raise OptionsError(name, value, valid=modes, problem=unknown_name("mode", value, modes))
    return value


def _check_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise OptionsError(name, value, "True or False")
    return value


def check_regions(name: str, value: Any) -> Any:
    """Normalize a choice of regions for the search: a word, or a tuple of module path patterns.

    Args:
        name: the argument's name, as the user wrote it.
        value: its value.

    Raises:
        OptionsError: if it is neither.
    """
    words = ("auto", "off", "always")
    if isinstance(value, str) and value not in words:
        near = [f"did you mean {word!r}?" for word in get_close_matches(value.lower(), words, n=1)]
        hint = (*near, f"A pattern of module paths goes into a list: [{value!r}]." if value else "")[0]
        raise OptionsError(
            name,
            value,
            problem=f"option {name!r}: expected 'auto', 'off', 'always', or a list, got {short_repr(value)}. {hint}".rstrip(),
        )
    if isinstance(value, str):
        return value
    patterns = isinstance(value, Sequence) and not isinstance(value, bytes) and len(value) > 0
    if not patterns or not all(isinstance(v, str) and v for v in value):
        wanted = "'auto', 'off', 'always', or a list of module path patterns such as ['blocks.*']"
        raise OptionsError(name, value, wanted)
    return tuple(value)


def _check_directory(name: str, value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise OptionsError(name, value, "a directory name")
    try:
        Path(value).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # a null character in the name raises ValueError
        reason = getattr(error, "strerror", None) or error
        problem = f"option {name!r}: the directory {short_repr(os.fspath(value))} cannot be made: {reason}"
        raise OptionsError(name, value, problem=problem) from error
    return os.fspath(value)


def _check_cache(name: str, value: Any) -> str:
    if is_path(value):
        return str(os.fspath(value))
    raise OptionsError(name, value, "'auto', 'off' or a directory")


_CHECKS = {
    "passes": _check_passes,
    "memory_budget": _check_fraction,
    "partition": _check_choice(get_args(Partition)),
    "compiler": _check_choice(get_args(Compiler)),
    "inductor": _check_inductor,
    "mode": _check_mode,
    "on_failure": _check_choice(get_args(OnFailure)),
    "check": _check_choice(get_args(CheckLevel)),
    "report": _check_directory,
    "accelerate": _check_flag,
    "regions": check_regions,
    "compiled_autograd": _check_flag,
    "ranks": _check_choice(get_args(Ranks)),
    "cache": _check_cache,
}
