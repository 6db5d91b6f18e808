"""Operators and calls of them in every state that the dispatcher treats differently."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fake.library import custom_op
from tests.fake.library.support import fresh_name

log: list[str] = []


def make_scale():
    @custom_op(fresh_name("scale"), mutates_args=())
    def scale(x: Tensor, by: float = 2.0) -> Tensor:
        log.append(f"grad_mode={torch.is_grad_enabled()} {type(x).__name__}")
        return x.detach().clone() * by

    @scale.register_fake
    def _(x, by=2.0):
        return torch.empty_like(x)

    def setup_context(ctx, inputs, output):
        log.append(f"setup {ctx.needs_input_grad}")
        ctx.save_for_backward(inputs[0], output)
        ctx.by = inputs[1]

    def backward(ctx, grad):
        x, output = ctx.saved_tensors
        log.append(f"backward {ctx.needs_input_grad}")
        assert torch.equal(x * ctx.by, output)
        return grad * ctx.by, None

    scale.register_autograd(backward, setup_context=setup_context)
    scale.register_vmap(lambda info, in_dims, x, by: (scale(x, by), in_dims[0]))
    scale.register_autocast("cpu", torch.bfloat16)
    return scale


def make_add_into():
    @custom_op(fresh_name("add_into"), mutates_args=("out",))
    def add_into(out: Tensor, x: Tensor, scale: int = 1) -> None:
        out.add_(x, alpha=scale)

    return add_into


def make_join():
    @custom_op(fresh_name("join"), mutates_args=())
    def join(
        first: Tensor, rest: list[Tensor], bias: Tensor | None = None, dims: list[int] | None = None
    ) -> Tensor:
        assert type(rest) is list
        assert dims is None or type(dims) is list
        out = torch.cat([first, *rest])
        return out + bias if bias is not None else out

    join.register_autograd(
        lambda ctx, grad: (grad[:2], [None] * ctx.n, None, None), setup_context=_join_context
    )
    return join


def _join_context(ctx, inputs, output):
    ctx.n = len(inputs[1])


def make_keyword():
    @custom_op(fresh_name("keyword"), mutates_args=())
    def keyword(
        x: Tensor, *, power: int = 2, mode: str = "plain", dtype: torch.dtype = torch.float32
    ) -> Tensor:
        return (x.detach() ** power).to(dtype)

    def setup_context(ctx, inputs, keyword_only_inputs, output):
        log.append(str(sorted(keyword_only_inputs.items(), key=str)))
        ctx.save_for_backward(inputs[0])
        ctx.power = keyword_only_inputs["power"]

    keyword.register_autograd(
        lambda ctx, grad: grad * ctx.power * ctx.saved_tensors[0] ** (ctx.power - 1),
        setup_context=setup_context,
    )
    return keyword


def make_pair():
    @custom_op(fresh_name("pair"), mutates_args=())
    def pair(x: Tensor, flag: bool) -> tuple[Tensor, Tensor]:
        return x.detach().sin(), x.detach().cos()

    pair.register_autograd(
        lambda ctx, a, b: (a * ctx.saved_tensors[0].cos() - b * ctx.saved_tensors[0].sin(), None),
        setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
    )
    return pair


MAKERS = {m.__name__[5:]: m for m in (make_scale, make_add_into, make_join, make_keyword, make_pair)}
OPS = {name: make() for name, make in MAKERS.items()}


def describe(value: Any) -> Any:
    """Everything that can be observed of a result."""
    if isinstance(value, Tensor):
        node = type(value.grad_fn).__name__.split("_op_")[0].rstrip("0123456789") if value.grad_fn else None
        node = None if node is None else node[:24]
        try:
            data = value.detach().resolve_conj().resolve_neg().to_dense().tolist()
        except (RuntimeError, NotImplementedError):
            data = "no data"
        return (
            type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad, node, value.is_leaf,
            value.is_inference(), str(value.device), data,
        )  # fmt: skip
    if isinstance(value, (tuple, list)):
        return type(value).__name__, [describe(v) for v in value]
    return value


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        log.append("torch_function")
        return super().__torch_function__(func, types, args, kwargs or {})


class LoggingFunctionMode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        log.append(f"function_mode {len(args)} {sorted(kwargs or {})}")
        return func(*args, **(kwargs or {}))


class LoggingDispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        log.append(f"dispatch_mode {func.name().split('::')[0]}")
        return func(*args, **(kwargs or {}))


def t(*values: float, grad: bool = False, dtype=torch.float32) -> Tensor:
    return torch.tensor(values or (1.0, 2.0), dtype=dtype, requires_grad=grad)


def with_backward(call, *args, **kwargs):
    out = call(*args, **kwargs)
    outs = out if isinstance(out, tuple) else (out,)
    torch.autograd.backward(
        [o for o in outs if o.requires_grad], [torch.ones_like(o) for o in outs if o.requires_grad]
    )
    return out, [a.grad for a in args if isinstance(a, Tensor)]


def version_after(call, *args):
    before = [a._version for a in args if isinstance(a, Tensor)]
    result = call(*args)
    return result, before, [a._version for a in args if isinstance(a, Tensor)], args


def in_thread(fn):
    box: list[Any] = []
    thread = threading.Thread(target=lambda: box.append(fn()))
    thread.start()
    thread.join()
    return box[0]


def under(context, fn):
    with context:
        return fn()


def profiled(call, *args):
    with torch.profiler.profile() as profile:
        call(*args)
    return sorted({e.name.rsplit("_", 1)[0] for e in profile.events() if "fake_library_tests" in e.name})


def saved_hooks(call):
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x, lambda x: x):
        out = call(t(grad=True), 3.0)
    out.sum().backward()
    return packed


def double_backward(call):
    x = t(grad=True)
    (grad,) = torch.autograd.grad(call(x, 3.0).sum(), x, create_graph=True)
    return grad


def dual(call):
    with forward_ad.dual_level():
        out = call(forward_ad.make_dual(t(), t(5.0, 6.0)), 3.0)
        return out, forward_ad.unpack_dual(out).tangent


def anomaly(call):
    with torch.autograd.detect_anomaly(check_nan=False):
        return with_backward(call, t(grad=True), 3.0)


def mutated_view(call):
    base = torch.zeros(4)
    call(base[:2], t())
    return base, base._version


def mutate_saved(call):
    """The version bump makes the backward of an earlier operation notice."""
    x = t(grad=True)
    saved = x * 1
    y = saved.sin()
    with torch.no_grad():
        call(saved.detach(), t())
    return y.sum().backward()


SCENARIOS = {
    "plain": ("scale", lambda c: c(t(), 3.0)),
    "default argument": ("scale", lambda c: c(t())),
    "keyword argument": ("scale", lambda c: c(t(), by=3.0)),
    "all by keyword": ("scale", lambda c: c(by=3.0, x=t())),
    "int for float": ("scale", lambda c: c(t(), 3)),
    "bool for float": ("scale", lambda c: c(t(), True)),
    "tensor for float": ("scale", lambda c: c(t(), torch.tensor(3.0))),
    "nan": ("scale", lambda c: c(t(), float("inf"))),
    "missing": ("scale", lambda c: c()),
    "too many": ("scale", lambda c: c(t(), 1.0, 2.0)),
    "unknown keyword": ("scale", lambda c: c(t(), other=2.0)),
    "not a tensor": ("scale", lambda c: c(3, 1.0)),
    "None for tensor": ("scale", lambda c: c(None, 1.0)),
    "numpy scalar": ("scale", lambda c: c(t(), __import__("numpy").float64(3.0))),
    "parameter": ("scale", lambda c: c(torch.nn.Parameter(t()), 3.0)),
    "frozen parameter": ("scale", lambda c: c(torch.nn.Parameter(t(), requires_grad=False), 3.0)),
    "requires grad": ("scale", lambda c: with_backward(c, t(grad=True), 3.0)),
    "non-leaf": ("scale", lambda c: with_backward(c, t(grad=True) * 2, 3.0)),
    "view that requires grad": ("scale", lambda c: c(t(1, 2, 3, 4, grad=True)[1:3], 3.0)),
    "no_grad": ("scale", lambda c: under(torch.no_grad(), lambda: c(t(grad=True), 3.0))),
    "inference mode": ("scale", lambda c: under(torch.inference_mode(), lambda: c(t(), 3.0))),
    "inference tensor outside": ("scale", lambda c: c(under(torch.inference_mode(), t), 3.0)),
    "autocast": ("scale", lambda c: under(torch.autocast("cpu"), lambda: c(t(), 3.0))),
    "autocast with grad": ("scale", lambda c: under(torch.autocast("cpu"), lambda: c(t(grad=True), 3.0))),
    "function mode": ("scale", lambda c: under(LoggingFunctionMode(), lambda: c(t(), 3.0))),
    "default device": ("scale", lambda c: under(torch.device("cpu"), lambda: c(t(), 3.0))),
    "dispatch mode": ("scale", lambda c: under(LoggingDispatchMode(), lambda: c(t(), 3.0))),
    "subclass": ("scale", lambda c: c(t().as_subclass(Subclass), 3.0)),
    "vmap": ("scale", lambda c: torch.vmap(lambda x: c(x, 3.0))(torch.ones(2, 3))),
    "vmap of grad": ("scale", lambda c: torch.vmap(torch.func.grad(lambda x: c(x, 3.0).sum()))(torch.ones(2, 3))),
    "functorch grad": ("scale", lambda c: torch.func.grad(lambda x: c(x, 3.0).sum())(t())),
    "functorch jvp": ("scale", lambda c: torch.func.jvp(lambda x: c(x, 3.0), (t(),), (t(),))),
    "forward AD": ("scale", dual),
    "conj": ("scale", lambda c: c(torch.tensor([1 + 2j]).conj(), 3.0)),
    "neg": ("scale", lambda c: c(torch.tensor([1 + 2j]).conj().imag, 3.0)),
    "sparse": ("scale", lambda c: c(t(0, 1).to_sparse(), 3.0)),
    "meta": ("scale", lambda c: c(torch.empty(3, device="meta"), 3.0)),
    "zero tensor": ("scale", lambda c: c(torch._efficientzerotensor(3), 3.0)),
    "in a thread": ("scale", lambda c: in_thread(lambda: c(t(grad=True), 3.0))),
    "profiler": ("scale", lambda c: profiled(c, t(), 3.0)),
    "profiler with grad": ("scale", lambda c: profiled(c, t(grad=True), 3.0)),
    "saved tensor hooks": ("scale", saved_hooks),
    "double backward": ("scale", double_backward),
    "anomaly mode": ("scale", anomaly),
    "fake mode": ("scale", lambda c: under(torch._subclasses.FakeTensorMode(), lambda: c(torch.ones(3), 3.0))),
    "make_fx": (
        "scale", lambda c: str(torch.fx.experimental.proxy_tensor.make_fx(lambda x: c(x, 3.0))(t()).code).count("scale")
    ),
    "compile": ("scale", lambda c: torch.compile(lambda x: c(x, 3.0) + 1, backend="eager", fullgraph=True)(t())),
    "mutation": ("add_into", lambda c: version_after(c, t(), t(3, 4))),
    "mutation, default": ("add_into", lambda c: version_after(c, t(), t(3, 4), 5)),
    "mutation of a view": ("add_into", mutated_view),
    "mutation seen by backward": ("add_into", mutate_saved),
    "mutation with grad": ("add_into", lambda c: version_after(c, t(), t(grad=True))),
    "mutation of a leaf": ("add_into", lambda c: version_after(c, t(grad=True), t())),
    "mutation in no_grad": ("add_into", lambda c: under(torch.no_grad(), lambda: version_after(c, t(grad=True), t()))),
    "mutation in inference mode": ("add_into", lambda c: under(torch.inference_mode(), lambda: c(t(), t()))),
    "mutation with error": ("add_into", lambda c: version_after(c, t(), t(1, 2, 3))),
    "list": ("join", lambda c: c(t(), [t(), t()])),
    "tuple for list": ("join", lambda c: c(t(), (t(), t()))),
    "empty list": ("join", lambda c: c(t(), [])),
    "list of others": ("join", lambda c: c(t(), [t(), 3])),
    "list with grad": ("join", lambda c: with_backward(c, t(grad=True), [t(), t()])),
    "grad in the list": ("join", lambda c: c(t(), [t(grad=True), t()])),
    "list with meta": ("join", lambda c: c(t(), [torch.empty(2, device="meta")])),
    "optional given": ("join", lambda c: c(t(), [t()], t(1, 2, 3, 4))),
    "optional with grad": ("join", lambda c: c(t(), [], t(grad=True))),
    "ints": ("join", lambda c: c(t(), [t()], None, [1, 2])),
    "ints as tuple": ("join", lambda c: c(t(), [t()], None, (1, 2))),
    "ints as size": ("join", lambda c: c(t(), [t()], None, torch.Size([1, 2]))),
    "int for ints": ("join", lambda c: c(t(), [t()], None, 1)),
    "big ints": ("join", lambda c: c(t(), [t()], None, [2**70])),
    "keyword only": ("keyword", lambda c: c(t(), power=3, mode="x", dtype=torch.float64)),
    "keyword only defaults": ("keyword", lambda c: c(t())),
    "keyword only by position": ("keyword", lambda c: c(t(), 3)),
    "keyword only with grad": ("keyword", lambda c: with_backward(c, t(grad=True), power=3)),
    "big int": ("keyword", lambda c: c(t(), power=2**70)),
    "str for dtype": ("keyword", lambda c: c(t(), dtype="float32")),
    "int for str": ("keyword", lambda c: c(t(), mode=3)),
    "two outputs": ("pair", lambda c: c(t(), True)),
    "two outputs with grad": ("pair", lambda c: with_backward(c, t(grad=True), False)),
    "int for bool": ("pair", lambda c: c(t(), 1)),
}  # fmt: skip
