"""A program for separate processes: it compiles a small model, or changes it and says if the plan was used.

``python adversary.py DIRECTORY OUTPUT compile`` writes a plan. With ``check``, it makes the changes one after
the other.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

FOLDER = Path(sys.argv[1])
HELPER = """
import contextvars
import os
import torch
SCALE = 2.0
class State:
    def __init__(self):
        self.active, self.variable = None, contextvars.ContextVar("state", default=None)
STATE = State()
def shifted(x):
    STATE.active = True  # set, and set back, as models of transformers do
    x = x + len(os.environ.get("ADVERSARY", ""))
    STATE.active = None
    return x
TABLE = {{"shift": 0.5}}
def twice(x, by=1.0):
    return x * {factor} * by
"""
MODEL = """
import abc
import collections
import enum
import functools
import logging
import types
import torch
from torch import nn
from torch.nn import functional as F
import {helper} as helpers

BIAS = 1.0

class Meta(type):
    unit = 1.0
class Level(enum.Enum):
    LOW = 1
Level.LOW.factor = 1.0
class Slots:
    __slots__ = ("first", "second")
class Kind(abc.ABC):
    pass
HELD = {{"k": 1.0}}
LOGGER = logging.getLogger("adversary")
class Config(metaclass=Meta):
    def __init__(self):
        self.eps, self.sizes = 1e-5, [3, 4]
        self.order, self.level, self.slots = collections.OrderedDict(a=1.0, b=2.0), Level.LOW, Slots()
        self.held, self.names, self.kind = types.MappingProxyType(HELD), frozenset(("sin", "cos", "tan")), Kind
        self.made, self.logger = functools.partial(max, 1.0), LOGGER

class Block(nn.Module):
    def __init__(self, made):
        super().__init__()
        self.lin, self.config, self.power, self.made = nn.Linear(4, 4), Config(), 1.0, made
    def forward(self, x):
        y = F.silu(self.lin(x)) ** self.power + self.config.eps * self.config.sizes[0] + self.made(x)
        y = y * next(iter(self.config.order.values())) * type(self.config).unit if "sin" in self.config.names else x
        y = y * self.config.level.factor * self.config.held["k"]
        return helpers.shifted(helpers.twice(y)) * helpers.SCALE + helpers.TABLE["shift"] + BIAS

class Model(nn.Module):
    limit = 3.0
    def __init__(self, offset):
        super().__init__()
        self.blocks = nn.ModuleList(Block(lambda x: x + offset) for _ in range(2))
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.blocks[0].lin.weight
        self.drop = nn.Dropout(0.0)
    def forward(self, x, flag=False):
        for block in self.blocks:
            x = block(x)
        x = self.drop(self.last(x)).clamp(-self.limit, self.limit)
        return (x.cos() if flag else x.sin()), {{"training": self.training}}
"""


def build(change: str):
    """The model, changed, and its call."""
    import importlib

    text = HELPER.format(factor="3.0" if change == "source of a helper" else "2.0")
    (FOLDER / "sources").mkdir(exist_ok=True)
    (FOLDER / "sources" / "adversary_helper.py").write_text(text)
    model_text = MODEL.format(helper="adversary_helper")
    if change == "source of a method":
        model_text = model_text.replace("x.cos() if flag else x.sin()", "x.cos() if flag else x.tan()")
    (FOLDER / "sources" / "adversary_model.py").write_text(model_text)
    for name in ("adversary_helper", "adversary_model"):
        sys.modules.pop(name, None)
    sys.dont_write_bytecode = True
    importlib.invalidate_caches()
    helpers, models = importlib.import_module("adversary_helper"), importlib.import_module("adversary_model")
    torch.manual_seed(0)
    model = models.Model(0.5 if change == "a closed-over number" else 0.25)
    if change in CHANGES:
        CHANGES[change](model, helpers, models)
    return model


def _hook(module, args, output):
    return output * 2 if isinstance(output, torch.Tensor) else None


def _pre_hook(module, args):
    return (args[0] + 1,)


def _another_class(model, helpers, models):
    class Dropout(nn.Module):
        def forward(self, x):
            return x * 0.5

    Dropout.__module__, Dropout.__qualname__ = nn.Dropout.__module__, "Dropout"
    model.drop = Dropout()


def _patched(model, helpers, models):
    models.F = type(sys)("torch.nn.functional")
    models.F.silu = lambda x: x * 0.1


CHANGES = {
    "nothing": lambda m, h, g: None,
    "source of a helper": lambda m, h, g: None,
    "source of a method": lambda m, h, g: None,
    "a closed-over number": lambda m, h, g: None,
    "a global of the helper": lambda m, h, g: setattr(h, "SCALE", 3.0),
    "a global of the model": lambda m, h, g: setattr(g, "BIAS", 2.0),
    "an entry of a table": lambda m, h, g: h.TABLE.update(shift=0.75),
    "what was set before it is set back": lambda m, h, g: setattr(h.STATE, "active", 1),
    "more that is set back": lambda m, h, g: setattr(h.STATE, "other", 1),
    "a variable of the context": lambda m, h, g: h.STATE.variable.set(2),
    "a default of the helper": lambda m, h, g: setattr(h.twice, "__defaults__", (1.5,)),
    "another helper": lambda m, h, g: setattr(h, "twice", lambda x, by=1.0: x * by),
    "a replaced module of functions": _patched,
    "an attribute of a class": lambda m, h, g: setattr(type(m), "limit", 0.1),
    "an attribute that shadows it": lambda m, h, g: setattr(m, "limit", 0.1),
    "an attribute at depth": lambda m, h, g: setattr(m.blocks[1].config, "eps", 1e-1),
    "all attributes of an object": lambda m, h, g: setattr(m.blocks[1].config, "__dict__", vars(m.blocks[1].config) | {"eps": 0.1}),
    "an item of a list": lambda m, h, g: m.blocks[0].config.sizes.__setitem__(0, 30_000),
    "a number on a block": lambda m, h, g: setattr(m.blocks[1], "power", 2.0),
    "a function on a block": lambda m, h, g: setattr(m.blocks[1], "made", torch.exp),
    "a forward of one block": lambda m, h, g: setattr(m.blocks[1], "forward", lambda x: x + 1),
    "a forward of the class": lambda m, h, g: setattr(g.Block, "forward", lambda self, x: x + 1),
    "a forward of torch's class": lambda m, h, g: setattr(m.last, "__class__", type("Linear", (nn.Linear,), {"forward": lambda s, x: x - 1})),
    "a hook": lambda m, h, g: m.blocks[0].register_forward_hook(_hook),
    "a hook before": lambda m, h, g: m.blocks[0].lin.register_forward_pre_hook(_pre_hook),
    "the training flag": lambda m, h, g: m.eval(),
    "a flag at depth": lambda m, h, g: setattr(m.drop, "p", 1.0),
    "another class of the same name": _another_class,
    "one block less": lambda m, h, g: m.blocks.pop(1),
    "blocks exchanged": lambda m, h, g: (setattr(m.blocks[0], "power", 2.0), m.blocks.insert(0, m.blocks.pop(1))),
    "a block shared": lambda m, h, g: m.blocks.__setitem__(1, m.blocks[0]),
    "a tied pair untied": lambda m, h, g: setattr(m.last, "weight", nn.Parameter(m.last.weight.detach() * 2)),
    "a weight's strides": lambda m, h, g: setattr(m.blocks[1].lin, "weight", nn.Parameter(m.blocks[1].lin.weight.detach().t().contiguous().t())),
    "a weight's dtype": lambda m, h, g: m.double(),
    "a frozen weight": lambda m, h, g: m.blocks[0].lin.bias.requires_grad_(False),
    "other values of weights": lambda m, h, g: m.blocks[0].lin.bias.data.add_(1.0),
    "other memory of weights": lambda m, h, g: [setattr(p, "data", p.data * 2) for p in m.parameters()],
    "a default of forward": lambda m, h, g: setattr(g.Model.forward, "__defaults__", (True,)),
    "a property in the place of a number": lambda m, h, g: setattr(g.Model, "limit", property(lambda self: 0.1)),
    "a property that hides an attribute": lambda m, h, g: setattr(g.Config, "eps", property(lambda self: 0.1, lambda self, value: None)),
    "another class of an object": lambda m, h, g: setattr(m.blocks[1].config, "__class__", _config_like(g.Config)),
    "a number of another type": lambda m, h, g: setattr(m.blocks[1], "power", 1),
    "an object shared by two": lambda m, h, g: setattr(m.blocks[1], "config", m.blocks[0].config),
    "a buffer": lambda m, h, g: m.blocks[0].register_buffer("more", torch.ones(2)),
    "a hook on gradients": lambda m, h, g: m.blocks[1].register_full_backward_hook(lambda module, before, after: (before[0] * 2,)),
    "a hook on a parameter": lambda m, h, g: m.blocks[0].lin.bias.register_hook(lambda gradient: gradient * 2),
    "a parametrization": lambda m, h, g: nn.utils.parametrizations.weight_norm(m.blocks[1].lin),
    "no gradients of the model": lambda m, h, g: m.requires_grad_(False),
    "a view of a larger weight": lambda m, h, g: setattr(m.blocks[1].lin, "weight", nn.Parameter(torch.ones(8, 4)[4:])),
    "weights that share memory": lambda m, h, g: setattr(m.blocks[1].lin, "weight", nn.Parameter(m.blocks[0].lin.weight.data)),
    "a method that nobody calls": lambda m, h, g: setattr(g.Block, "other", lambda self: 1),
    "an attribute of a metaclass": lambda m, h, g: setattr(g.Meta, "unit", 2.0),
    "an attribute of a member of an enumeration": lambda m, h, g: setattr(g.Level.LOW, "factor", 2.0),
    "a slot that was empty": lambda m, h, g: setattr(m.blocks[0].config.slots, "first", 2.0),
    "the order of an ordered dictionary": lambda m, h, g: m.blocks[0].config.order.move_to_end("a"),
    "what a proxy stands for": lambda m, h, g: g.HELD.update(k=2.0),
    "a keyword of a partial": lambda m, h, g: m.blocks[0].config.made.keywords.update(key=abs),
    "a class registered with an abstract one": lambda m, h, g: g.Kind.register(g.Config),
    "the name of a class": lambda m, h, g: setattr(g.Config, "__name__", "Other"),
    "the name of a function": lambda m, h, g: setattr(h.twice, "__name__", "other"),
    "a bias removed": lambda m, h, g: setattr(m.blocks[0].lin, "bias", None),
}  # fmt: skip
"""What is changed between processes; the first and ``other values of weights`` change nothing that a plan depends on."""


_WHEN_BUILT = ("source of a helper", "source of a method", "a closed-over number")
"""Changes that :func:`build` makes itself: there are none of them later."""

CALLS = {
    "another size": lambda x: {"x": x[:2]},
    "other strides": lambda x: {"x": x.t().contiguous().t()},
    "another place in its memory": lambda x: {"x": torch.cat([x[:1], x])[1:]},
    "a gradient of the input": lambda x: {"x": x.requires_grad_()},
    "another flag": lambda x: {"x": x, "flag": True},
    "a flag of another type": lambda x: {"x": x, "flag": 0},
    "an option": lambda x: {"x": x, "options": {"memory_budget": 0.5}},
    "other passes": lambda x: {"x": x, "options": {"passes": []}},
    "an option of Inductor": lambda x: {"x": x, "options": {"inductor": {"epilogue_fusion": False}}},
    "no gradients": lambda x: {"x": x, "around": torch.no_grad()},
    "inference mode": lambda x: {"x": x, "around": torch.inference_mode()},
    "autocast": lambda x: {"x": x, "around": torch.autocast("cpu", dtype=torch.bfloat16)},
    "a function mode": lambda x: {"x": x, "around": torch.device("cpu")},
    "deterministic algorithms": lambda x: {"x": x, "around": _set(torch.use_deterministic_algorithms, True, False)},
    "another number of threads": lambda x: {"x": x, "around": _set(torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads())},
    "another default dtype": lambda x: {"x": x, "around": _set(torch.set_default_dtype, torch.float64, torch.float32)},
    "hooks on saved tensors": lambda x: {"x": x, "around": torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)},
    "hooks on all modules": lambda x: {"x": x, "around": _hooks_on_all()},
    "precision of matmuls": lambda x: {"x": x, "around": _set(_matmul_precision, "bf16", "none")},
    "cuDNN is measured": lambda x: {"x": x, "around": _set(_benchmark, True, False)},
    "without oneDNN": lambda x: {"x": x, "around": _set(torch._C._set_mkldnn_enabled, False, True)},
    "anomaly detection": lambda x: {"x": x, "around": torch.autograd.set_detect_anomaly(True)},
    "memory shared by the input and a weight": lambda x: {"x": _of_model[-1].last.weight.detach()[:3]},
    "an environment variable that is read": lambda x: {"x": x, "around": _variable("ADVERSARY", "abc")},
    "by name": lambda x: {"x": x, "flag": False},
    "an environment variable": lambda x: {"x": x, "around": _variable("TORCHINDUCTOR_FREEZING", "1")},
    "a function of torch that a layer calls": lambda x: {"x": x, "around": _attribute(nn.functional, "linear", lambda x, w, b=None: x @ w.t())},
    "a method of tensors": lambda x: {"x": x, "around": _attribute(torch.Tensor, "clamp", lambda x, *limits: x * 2)},
    "another method of tensors": lambda x: {"x": x, "around": _attribute(torch.Tensor, "sin", torch.Tensor.tanh)},
    "an operator of tensors": lambda x: {"x": x, "around": _attribute(torch.Tensor, "__add__", lambda x, y: x.sub(y))},
}  # fmt: skip
"""What is changed in the call."""


def _config_like(config):
    """A class of the same name whose objects have another number."""
    return type(
        "Config",
        (config,),
        {"eps": property(lambda self: 0.1, lambda self, value: None), "__module__": config.__module__},
    )


def _matmul_precision(value):
    torch.backends.mkldnn.matmul.fp32_precision = value


def _benchmark(value):
    torch.backends.cudnn.benchmark = value


_of_model = []
"""The model that is called, for calls that are given a part of it."""


@contextlib.contextmanager
def _set(function, value, before):
    function(value)
    try:
        yield
    finally:
        function(before)


@contextlib.contextmanager
def _attribute(owner, name, value):
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name) if before is None else setattr(owner, name, before)


@contextlib.contextmanager
def _hooks_on_all():
    handle = nn.modules.module.register_module_forward_hook(_hook)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def _variable(name, value):
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def results_of(call, model, x, flags, around):
    """What a call gives: its output, gradients and the rest."""
    with around:
        out, extra = call(x, **flags)
    if out.requires_grad:
        out.float().sum().backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    x.grad = None
    return [out.detach(), *(g for g in gradients if g is not None)], extra


def run(change: str, late: bool):
    """Make a change, before the first call or after it, and compare the compiled model with eager.

    Returns:
        Whether both agree, and whether the last call used a plan, compiled (or ran in eager instead), or looked for none.
    """
    model = build("nothing" if late else change)
    _of_model[:] = [model]
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)).to(next(model.parameters()).dtype)
    how = CALLS[change](x) if change in CALLS else {"x": x}
    x, around, options = how.pop("x"), how.pop("around", None), how.pop("options", {})
    compiled = fxpasses.compile(model, cache=str(FOLDER / "plans"), **({"regions": "off"} | options))
    if late:
        compiled(torch.randn(3, 4))
        CHANGES[change](model, sys.modules["adversary_helper"], sys.modules["adversary_model"])
        x = x.to(next(model.parameters()).dtype)
    if around is None:
        around = contextlib.nullcontext()
    before = fxpasses.stats()
    runs = len(_compiled)
    got, extra = results_of(compiled, model, x, how, around)
    ran_plan = len(_compiled) == runs
    around = CALLS[change](x).get("around") if change in CALLS else None
    eager, expected = results_of(model, model, x, how, around or contextlib.nullcontext())
    same = len(got) == len(eager) and all(
        torch.allclose(a, b, atol=1e-4) for a, b in zip(got, eager, strict=True)
    )
    return {
        "change": change,
        "late": late,
        "same": same and extra == expected,
        "plan": ran_plan,
        "loaded": fxpasses.stats().plans_used - before.plans_used,
        "compilers": [name for name in ("torch._dynamo", "torch._inductor", "sympy") if name in sys.modules],
    }


_compiled = []


def _in_eager(self, *args, **kwargs):
    """Stands for a compilation, which takes seconds: that there is one is what is asked."""
    _compiled.append(1)
    return self.model(*args, **kwargs)


def _record_in_eager(self, signature, tensors, objects, shelf, abouts, args, kwargs, changed):
    return _in_eager(self, *args, **kwargs)


if __name__ == "__main__":
    import fxpasses
    from fxpasses.plans.compile import Compiled

    sys.path.insert(0, str(FOLDER / "sources"))
    if sys.argv[3] == "compile":
        model = build("nothing")
        fxpasses.compile(model, cache=str(FOLDER / "plans"), regions="off")(torch.randn(3, 4))[
            0
        ].sum().backward()
        stats = fxpasses.stats()
        Path(sys.argv[2]).write_text(json.dumps([stats.plans_written, stats.plans_refused]))
    else:
        Compiled._record = _record_in_eager
        Compiled._compiled = property(lambda self: lambda *args, **kwargs: _in_eager(self, *args, **kwargs))
        late = [name for name in CHANGES if name not in _WHEN_BUILT]
        found = [run(name, False) for name in (*CHANGES, *CALLS)] + [run(name, True) for name in late]
        Path(sys.argv[2]).write_text(json.dumps(found))
