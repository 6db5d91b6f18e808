"""Random calls against one cache: fresh, cached and eager say the same.

All examples share the cache of the process, so that each call meets entries of calls that differ from it in a little:
a dtype, a stride, an offset, a number's type, a flag of the thread. What is compared is all metadata, aliasing
included, and whether a call is refused.
"""

import contextlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings, strategies as st

import fake
from benchmarks.conformance.observe import observe

DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64,
)  # fmt: skip
SHAPES = ((), (1,), (3,), (4, 3), (3, 4), (1, 3), (4, 1), (2, 3, 4), (0, 3), (2, 4, 5, 6))
NUMBERS = (0, 0.0, -0.0, 1, 1.0, True, False, 2, -1, 2.5, float("nan"), float("inf"), 1j, 300)


@dataclass(frozen=True)
class Spec:
    """A tensor to be made: twice from one spec gives two tensors that no operator can tell apart."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str

    def make(self) -> torch.Tensor:
        t = torch.ones(self.shape, dtype=self.dtype)
        match self.kind:
            case "transposed" if t.dim() > 1:
                return t.transpose(0, -1)
            case "expanded" if t.dim() and t.shape[0]:
                return t[:1].expand(t.shape)
            case "offset" if t.numel():
                return torch.ones(t.numel() + 2, dtype=self.dtype)[2:].view(self.shape)
            case "gaps" if t.dim():
                return torch.stack([t, t], -1)[..., 0]
            case "conjugate" if t.is_complex():
                return t.conj()
            case "negative" if t.is_complex():
                return t.conj().imag
            case "gradient" if t.is_floating_point() or t.is_complex():
                return t.requires_grad_()
            case "inference":
                with torch.inference_mode():
                    return t.clone()
            case "channels last" if t.dim() == 4:
                return t.to(memory_format=torch.channels_last)
        return t


KINDS = (
    "plain", "plain", "transposed", "expanded", "offset", "gaps", "conjugate", "negative", "gradient", "inference",
    "channels last",
)  # fmt: skip
SPECS = st.builds(Spec, st.sampled_from(SHAPES), st.sampled_from(DTYPES), st.sampled_from(KINDS))


def _function(name: str, *taken: int) -> Callable[..., Any]:
    """``torch``'s function of a name, given some of the tensors, the number and the dimension."""
    function = getattr(torch, name)
    return lambda *given: function(*(given[place] for place in taken))


def _in_place(name: str) -> Callable[..., Any]:
    return lambda a, b, n, d: (getattr(a, name)(b), a)


OPERATORS: dict[str, Callable[[torch.Tensor, torch.Tensor, Any, int], Any]] = {
    **{name: _function(name, 0, 1) for name in ("add", "mul", "eq", "maximum", "matmul")},
    **{f"{name} a number": _function(name, 0, 2) for name in ("add", "mul", "div", "pow", "fmod")},
    **{name: _function(name, 0) for name in ("neg", "exp", "abs", "isnan", "conj", "clone")},
    **{name: _function(name, 0, 3) for name in ("sum", "cumsum", "softmax", "argmax")},
    **{name: _in_place(name) for name in ("add_", "mul_", "copy_", "lt_", "floor_divide_", "atan2_")},
    "twice": lambda a, b, n, d: torch.add(a, a),
    "in place by itself": lambda a, b, n, d: (a.mul_(a), a),
    "in place by a number": lambda a, b, n, d: (a.add_(n), a),
    "fill_": lambda a, b, n, d: (a.fill_(n), a),
    "out": lambda a, b, n, d: (torch.add(a, a, out=b), b),
    "out is the input": lambda a, b, n, d: (torch.mul(a, b, out=a), a),
    "out is a neighbour": lambda a, b, n, d: torch.add(a[:-1], 1, out=a[1:]),
    "a view in place": lambda a, b, n, d: (a[1:].add_(1), a),
    "transpose": lambda a, b, n, d: a.transpose(0, d),
    "view": lambda a, b, n, d: a.view(-1),
    "reshape": lambda a, b, n, d: a.reshape(-1),
    "view of another dtype": lambda a, b, n, d: a.view(torch.uint8),
    "as_strided": lambda a, b, n, d: a.as_strided((2, 2), (1, 2), d if d > 0 else None),
    "split": lambda a, b, n, d: a.split(2, d),
    "expand": lambda a, b, n, d: a.expand(2, *a.shape),
    "clamp": lambda a, b, n, d: a.clamp(n),
    "where": lambda a, b, n, d: torch.where(b > 0, a, n),
    "full": lambda a, b, n, d: torch.full((2, 3), n),
    "full_like": lambda a, b, n, d: torch.full_like(a, n),
    "to": lambda a, b, n, d: a.to(b.dtype, copy=d > 0),
    "cat": lambda a, b, n, d: torch.cat([a, b], d),
    "stack": lambda a, b, n, d: torch.stack([a, b], d),
    "contiguous": lambda a, b, n, d: a.contiguous(memory_format=torch.channels_last),
    "index_select": lambda a, b, n, d: a.index_select(d, torch.zeros(2, dtype=torch.int64)),
    "addmm": lambda a, b, n, d: torch.addmm(a, b, b, alpha=n),
    "linear": lambda a, b, n, d: torch.nn.functional.linear(a, b),
    "empty": lambda a, b, n, d: torch.empty(a.shape),
}


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


STATES: dict[str, Callable[[], Any]] = {
    "none": contextlib.nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "double": lambda: default_dtype(torch.float64),
    "autocast bfloat16": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast half": lambda: torch.autocast("cpu", torch.float16),
    "deterministic": deterministic,
}


def run(operator: str, tensors: tuple[torch.Tensor, torch.Tensor], number: Any, dim: int, state: str) -> Any:
    """What is seen of a call's results and arguments, or the error that it raised."""
    try:
        with warnings.catch_warnings(), STATES[state]():
            warnings.simplefilter("ignore")
            results = OPERATORS[operator](*tensors, number, dim)
    except Exception as error:  # noqa: BLE001 - refusals are compared, too
        return error
    return observe((results, tensors), tensors)


def comparable(outcome: Any) -> Any:
    return type(outcome) if isinstance(outcome, Exception) else outcome


MODES = fake.FakeTensorMode(), fake.FakeTensorMode()
MODES[1].cache_enabled = False


@pytest.mark.slow
@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much]
)
@given(
    operator=st.sampled_from(sorted(OPERATORS)),
    specs=st.tuples(SPECS, SPECS),
    number=st.sampled_from(NUMBERS),
    dim=st.sampled_from((0, 1, -1, 2)),
    state=st.sampled_from(sorted(STATES)),
)
def test_fresh_cached_and_eager_agree(operator, specs, number, dim, state):
    eager = run(operator, tuple(spec.make() for spec in specs), number, dim, state)
    seen = []
    for mode in (MODES[0], MODES[0], MODES[1]):
        given_tensors = tuple(mode.from_tensor(spec.make()) for spec in specs)
        with mode:
            seen.append(run(operator, given_tensors, number, dim, state))
    cold, warm, uncached = map(comparable, seen)
    assert cold == warm == uncached
    assume(not isinstance(seen[0], fake.DataDependentOutputException))
    if isinstance(eager, Exception) or isinstance(seen[0], Exception):
        assert isinstance(eager, Exception), f"eager takes what the mode refuses: {seen[0]!r}"
    else:
        assert seen[0] == eager
