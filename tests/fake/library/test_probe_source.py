"""Whatever probe prints parses, is accepted by register_fake, and answers the sample or says that it does not know."""

from __future__ import annotations

import ast
import enum
import random

import pytest
import torch

from fake.library import custom_op, probe
from fake.library.errors import ProbeError
from fake.library.opcheck.sample_calls import Call, attempt
from tests.fake.library.support import fresh_name

x = torch.arange(6.0).reshape(2, 3)
#: Schema type → a value for the sample, and defaults (as schemas write them).
ARGUMENTS = {
    "Tensor": (x, []),
    "Tensor?": (None, ["None"]),
    "Tensor[]": ([x, x + 1], []),
    "int": (3, ["3", "-1"]),
    "SymInt": (2, ["2"]),
    "float": (2.0, ["2.0", "0.5", "1e-6"]),
    "bool": (True, ["False", "True"]),
    "str": ("mean", ['"mean"', "'a b'"]),
    "int[]": ([1, 2], ["[1, 2]", "[]"]),
    "Scalar": (1.5, ["1.5", "2"]),
    "float?": (None, ["None"]),
    "ScalarType": (torch.float64, []),
    "ScalarType?": (None, ["None"]),
    "Device": (torch.device("cpu"), []),
}


def random_operator(seed):
    """An operator with random parameters, and a sample."""
    choose = random.Random(seed)
    names = [f"a{i}" for i in range(choose.randrange(1, 5))]
    keyword_only = choose.randrange(len(names) + 1)
    parts, python, args, kwargs, defaulted = ["Tensor x"], ["x"], [x], {}, False
    for place, name in enumerate(names):
        if place == keyword_only:
            parts.append("*")
            python.append("*")
            defaulted = False
        kinds = list(ARGUMENTS) if place < keyword_only else [k for k in ARGUMENTS if "Tensor" not in k]
        kind = choose.choice(kinds)
        value, defaults = ARGUMENTS[kind]
        if defaulted and not defaults:
            kind, (value, defaults) = "float", ARGUMENTS["float"]
        default = choose.choice(defaults) if defaults and (defaulted or choose.random() < 0.5) else None
        defaulted = default is not None
        parts.append(f"{kind} {name}" + (f"={default}" if default else ""))
        python.append(
            name + (f"={default}" if default and choose.random() < 0.7 and "None" not in python else "")
        )
        if default is None and place < keyword_only:
            args.append(value)
        elif default is None:
            kwargs[name] = value
    # Python's defaults must be a tail; where the random choice is none, the schema's are enough.
    head = ", ".join(p.split("=")[0] for p in python)
    namespace: dict = {}
    exec(f"def kernel({head}): return x * 2", namespace)
    op = custom_op(
        fresh_name("printed"), namespace["kernel"], mutates_args=(), schema=f"({', '.join(parts)}) -> Tensor"
    )
    return op, tuple(args), kwargs


@pytest.mark.parametrize("budget", [0, 3, 25])
@pytest.mark.parametrize("first", range(0, 24, 8))
def test_source_is_accepted(budget, first):
    for seed in range(first, first + 8):
        op, args, kwargs = random_operator(seed)
        rule = probe(op, [(args, kwargs)], budget=budget, isolate=False)
        ast.parse(str(rule))
        namespace: dict = {}
        exec(rule.source, namespace)
        op.register_fake(namespace["fake_kernel"])
        with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fakes = torch.utils._pytree.tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
            answer = attempt(op.__call__, Call(*fakes))
        if answer.error is None:
            assert answer.value.shape == (2, 3)
        else:
            assert budget < 25, (op.schema, rule.source)
            assert "no sample decides" in str(answer.error)


class Rounding(enum.Enum):
    DOWN = 1
    UP = 2


def test_defaults_that_are_not_plain():
    def kernel(
        x: torch.Tensor, rounding: Rounding = Rounding.DOWN, dtype: torch.dtype = torch.float64
    ) -> torch.Tensor:
        return (x.floor() if rounding is Rounding.DOWN else x.ceil()).to(dtype)

    op = custom_op(fresh_name(), kernel, mutates_args=())
    rule = probe(op, [(x,), (x, Rounding.UP, torch.float32), (x, Rounding.UP)])
    namespace: dict = {}
    exec(rule.source, namespace)
    op.register_fake(namespace["fake_kernel"])
    assert "rounding=Rounding.DOWN, dtype=torch.float64" in rule.source


def test_default_is_the_operators():
    op = custom_op(
        fresh_name(),
        lambda x, by=2.0, *, n=1: x * by,
        mutates_args=(),
        schema="(Tensor x, float by=2.0, *, int n=1) -> Tensor",
    )
    assert "def fake_kernel(x, by=2.0, *, n=1):" in probe(op, [(x,)]).source
    with pytest.raises(ProbeError, match="at least 0"):
        probe(op, [(x,)], budget=-1)
