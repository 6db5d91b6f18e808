"""Messages name the user's line as the place of a registration, whatever was called to register."""

from __future__ import annotations

import _thread
import contextlib
import queue
import textwrap
import warnings

import pytest
import torch

import fake.library
from fake.library import custom_op, destroy, scoped_library
from fake.library.legacy import CustomOp
from tests.fake.library.support import NAMESPACE, fresh_name, overload_of

#: Ways to define an operator, each with the call on the first line that the message must name.
WAYS = {
    "Library": "lib = Library(NS, 'FRAGMENT')\nlib.define(NAME + '(Tensor x) -> Tensor')",
    "subclass": "class Own(Library): pass\nlib = Own(NS, 'FRAGMENT')\nlib.define(NAME + '(Tensor x) -> Tensor')",
    "scoped_library": "lib = stack.enter_context(scoped_library(NS, 'FRAGMENT'))\nlib.define(NAME + '(Tensor x) -> Tensor')",
    "define": "define(NS + '::' + NAME, '(Tensor x) -> Tensor')",
    "custom_op": "import torch\ndef kernel(x: torch.Tensor) -> torch.Tensor: return x.clone()\n"
    "custom_op(NS + '::' + NAME, kernel, mutates_args=())",
    "decorator": "import torch\n@custom_op(NS + '::' + NAME, mutates_args=())\n"
    "def kernel(x: torch.Tensor) -> torch.Tensor: return x.clone()",
}


def run_at_bottom(text, filename, namespace):
    """Execute as a script is: with no frame below. Returns the exception or None."""
    outcome: queue.Queue = queue.Queue()
    run = f"try:\n{textwrap.indent(text, '    ')}\n    report(None)\nexcept BaseException as error:\n    report(error)\n"
    _thread.start_new_thread(exec, (compile(run, filename, "exec"), {**namespace, "report": outcome.put}))
    return outcome.get(timeout=60)


@pytest.mark.parametrize("way", WAYS)
def test_dispatchers_messages(way):
    name = fresh_name().split("::")[1]
    with contextlib.ExitStack() as stack:
        names = {**vars(fake.library), "stack": stack, "NS": NAMESPACE, "NAME": name}
        assert run_at_bottom(WAYS[way], "first_user.py", names) is None
        with scoped_library(NAMESPACE, "FRAGMENT") as again, pytest.raises(RuntimeError) as caught:
            again.define(f"{name}(Tensor x) -> Tensor")
    line = next(i for i, text in enumerate(WAYS[way].splitlines(), 2) if "NS" in text)
    message = str(caught.value)
    assert f"Original registration: registered at first_user.py:{line}" in message
    assert f"Duplicate registration: registered at {__file__}:" in message


def test_all_of_legacy_at_the_top_of_a_script():
    name = fresh_name()
    script = f"""\
import torch
from fake.library import legacy
legacy.custom_op({name!r}, "(Tensor x) -> Tensor")
@legacy.impl({name!r})
def _(x):
    return x.sin()
@legacy.impl_fake({name!r})
def _(x):
    return torch.empty_like(x)
@legacy.impl_save_for_backward({name!r})
def _(inputs, output):
    return inputs.x
@legacy.impl_backward({name!r})
def _(ctx, saved, grad):
    return {{"x": grad * saved.cos()}}
"""
    assert run_at_bottom(script, "script.py", {}) is None
    op = CustomOp.alive[name]
    places = [op._impls[kind].location for kind in ("cpu", "cuda", "save_for_backward", "backward")]
    assert places == ["script.py:5", "script.py:5", "script.py:11", "script.py:14"]
    x = torch.randn(3, requires_grad=True)
    op(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    twice = f"from fake.library import legacy\n\nlegacy.impl({name!r}, func=lambda x: x)\n"
    assert "registered from Python at script.py:5" in str(run_at_bottom(twice, "other.py", {}))
    fake = f"from fake.library import register_fake\nregister_fake({name!r}, lambda x: x, allow_override=False)\n"
    assert "script.py:8" in str(run_at_bottom(fake, "other.py", {}))
    op._destroy()


@pytest.mark.parametrize("form", ["function", "decorator"])
def test_warnings(form):
    name = fresh_name()

    def kernel(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            if form == "function":
                custom_op(name, kernel, mutates_args=())
            else:
                custom_op(name, mutates_args=())(kernel)
        fake.library.register_fake(overload_of(name), lambda x: x)
        with scoped_library(NAMESPACE, "FRAGMENT") as lib:
            lib.define(f"{name.split('::')[1]}_b(Tensor x) -> Tensor")
            fake.library.impl(f"{name}_b", "cpu", lambda y: y.clone())
    assert [(w.filename, type(w.message).__name__) for w in caught] == [
        (__file__, "OpReplacedWarning"),
        (__file__, "SignatureWarning"),
    ]
    destroy(name)
