"""What is in force with this torch, compiler and settings; why other parts are not, and what to do."""

from __future__ import annotations

import os
import platform
import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import metadata

import torch

import fake
from compiled_autograd._torch import hook_problem
from fake.seam.patches import LEDGER, When
from fxpasses import _torch
from fxpasses.backend import PATCHES
from fxpasses.dynamo import _torch as dynamo

_INSTALL = "install a release of torch that is known: constraints.txt and constraints-2.15.txt name two"


@dataclass(frozen=True)
class Finding:
    """The state of one part: in force, or off.

    Attributes:
        name: the name of the part.
        problem: why it is off, or "" if it is on.
        detail: more about a part that is on, such as a path or a number, or "".
        cost: the effect of its being off.
        advice: what to do about it.
        replaces: the names of torch that it patches, if any.
    """

    name: str
    problem: str = ""
    detail: str = ""
    cost: str = ""
    advice: str = ""
    replaces: tuple[str, ...] = ()

    @property
    def on(self) -> bool:
        """Whether the part is in force."""
        return not self.problem

    def __str__(self) -> str:
        if self.on and self.replaces:
            return f"on   {self.name}: {', '.join(self.replaces)} (without: {self.cost})"
        if self.on:
            return f"on   {self.name}" + (f": {self.detail}" if self.detail else "")
        rest = [
            f"     {title}: {text}" for title, text in (("costs", self.cost), ("do", self.advice)) if text
        ]
        names = f": {', '.join(self.replaces)}" if self.replaces else ""
        return "\n".join([f"OFF  {self.name}{names}: {self.problem}", *rest])


def versions() -> dict[str, str]:
    """Return the versions that decide what works."""
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("fxpasses", "triton", "sympy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu only"
    return found


def examine() -> list[Finding]:
    """Examine everything that may be off without an error."""
    return [*map(_run_check, _CHECKS), *patches()]


def _run_check(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except fake.MissingTorchNameError as missing:
        what = check.__name__.strip("_").replace("_", " ")
        return Finding(what, str(missing), cost="what needs that name raises the same error", advice=_INSTALL)


def patches() -> list[Finding]:
    """Return the findings of the ledger of patches: what is in torch, when, and what does not fit."""
    groups: dict[tuple[When, str, str], list[str]] = {}
    for entry in LEDGER.entries:
        now = ", now" if LEDGER.is_in_force(entry) else ""
        groups.setdefault((entry.when, entry.lost, entry.problem()), []).append(f"{entry.name}{now}")
    return [
        Finding(
            f"put into torch {when.value}",
            problem,
            cost=lost,
            advice=_INSTALL if "known to fit" in problem or "no such attribute" in problem else "",
            replaces=tuple(names),
        )
        for (when, lost, problem), names in groups.items()
    ]


def abbreviated(findings: Iterable[Finding]) -> list[Finding]:
    """Return the same findings, with patches that are in force counted instead of named."""
    shown: list[Finding] = []
    counts: Counter[str] = Counter()
    for finding in findings:
        if finding.on and finding.replaces:
            counts[finding.name] += len(finding.replaces)
        else:
            shown.append(finding)
    return [*shown, *(Finding(name, detail=f"{n} of its names") for name, n in counts.items())]


def _acceleration() -> Finding:
    try:
        with fake.accelerate():
            problem = ""
    except (fake.UnsupportedTorchVersionError, fake.AccelerateError) as error:
        problem = str(error)
    return Finding(
        "tracing on fake's dispatch cache (fake.accelerate), with lean symbols",
        problem,
        cost="Dynamo and AOTAutograd take about half as long again; graphs and results are the same",
        advice=_INSTALL,
    )


def _copies() -> Finding:
    problem = ""
    if not dynamo.CAN_REPLAY:
        problem = "Dynamo does not say of its guards how values are compared"
    elif any(patch.problem() for patch in PATCHES):
        problem = next(patch.problem() for patch in PATCHES if patch.problem())
    elif not _acceleration().on:
        problem = "they need fake.accelerate"
    return Finding(
        "copies of the traces of repeated modules",
        problem,
        cost="Dynamo traces every layer anew: its time grows with their number; graphs and results are the same",
        advice=_INSTALL,
    )


def _engine() -> Finding:
    return Finding(
        "capture of backward passes (compiled_autograd)",
        hook_problem() or "",
        cost="compiled_autograd.enable() leaves backward passes in eager, and warns",
        advice=_INSTALL,
    )


def _compiler() -> Finding:
    found, problem = _torch.cpp_compiler()
    return Finding(
        "C++ compiler",
        problem,
        f"{found}, {_torch.compile_threads()} compile threads",
        cost='options={"compiler": "inductor"} fails on a CPU',
        advice="install g++ or clang++, or name one in the environment variable CXX",
    )


def _compile_caches() -> Finding:
    directory = _torch.compile_cache_directory()
    off = [name for name, is_on in _torch.compile_caches().items() if not is_on]
    used = shutil.disk_usage(directory if os.path.isdir(directory) else os.sep)
    return Finding(
        "caches of compiled graphs",
        f"off by torch's settings: {', '.join(off)}" if off else "",
        f"{directory}, {used.free / 1e9:.0f} GB free on that disk",
        cost="every process compiles its graphs anew",
        advice="unset TORCHINDUCTOR_FORCE_DISABLE_CACHES, TORCHINDUCTOR_FX_GRAPH_CACHE and TORCHINDUCTOR_AUTOGRAD_CACHE",
    )


def _fake_cache() -> Finding:
    directory = os.environ.get("FAKE_DISPATCH_CACHE", "")
    return Finding(
        "dispatch cache of fake tensors on disk",
        "" if directory else "nobody asked for it",
        directory,
        cost="the first tracing of each process fills it anew",
        advice="name a directory in the environment variable FAKE_DISPATCH_CACHE, or call fake.enable_disk_cache",
    )


_CHECKS: tuple[Callable[[], Finding], ...] = (
    _acceleration,
    _copies,
    _engine,
    _compiler,
    _compile_caches,
    _fake_cache,
)
