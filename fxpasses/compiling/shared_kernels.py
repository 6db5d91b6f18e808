"""Compile the C++ kernels of one graph in one translation unit.

Inductor gives every fused CPU kernel its own source file and its own run of the C++ compiler. Most of such a
run (0.4 s of 0.5 s) is the same every time: reading the precompiled header, instantiating its templates,
linking. The code that Inductor generates for our graphs imports :class:`AsyncCompile` from here instead. It
collects the kernels until the generated module waits for them, and compiles them together. What runs is the
same code, compiled with the same flags by the same torch function and cached in the same place.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fxpasses import _torch
from fxpasses.compiling import _torch_inductor

_HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>"
_DEFINITION = re.compile(r'extern\s+"C"\s+void\s+kernel\s*\(')
_SPLIT = 40_000
"""Number of kernel characters above which a second compiler process pays off, if a core is free for it."""
_MAX_KERNELS = 64
"""Maximum number of kernels per unit."""

_BINDING = """
#include <Python.h>

static void* (*data_pointer)(PyObject*) = nullptr;

static int64_t integer(PyObject* value) {
    const long long number = PyLong_AsLongLong(value);
    if (number == -1 && PyErr_Occurred()) throw 0;
    return number;
}
static uintptr_t address(PyObject* value) {
    void* number = PyLong_AsVoidPtr(value);
    if (number == nullptr && PyErr_Occurred()) throw 0;
    return reinterpret_cast<uintptr_t>(number);
}
static double floating(PyObject* value) {
    const double number = PyFloat_AsDouble(value);
    if (number == -1.0 && PyErr_Occurred()) throw 0;
    return number;
}
static PyObject* failed() {
    try {
        throw;
    } catch (std::exception const& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    } catch (...) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "unhandled error");
    }
    return nullptr;
}

FUNCTIONS
static PyMethodDef methods[] = {
METHODS    {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "ENTRY", nullptr, -1, methods};

PyMODINIT_FUNC PyInit_ENTRY(void) {
    const char* given = std::getenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR");
    if (given == nullptr) {
        PyErr_SetString(PyExc_RuntimeError, "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR is not set");
        return nullptr;
    }
    data_pointer = reinterpret_cast<decltype(data_pointer)>(std::strtoull(given, nullptr, 10));
    PyObject* module = PyModule_Create(&definition);
#ifdef Py_GIL_DISABLED
    if (module != nullptr) PyUnstable_Module_SetGIL(module, Py_MOD_GIL_NOT_USED);
#endif
    return module;
}
"""
"""Python bindings for a unit's kernels, without templates, which would cost a tenth of a second. Inductor's
own bindings read a tensor's memory by a function. Torch sets the variable to its address when it loads a
unit."""

_FUNCTION = """static PyObject* call_{number}(PyObject*, PyObject* const* values, Py_ssize_t count) {{
    try {{
        if (count != {count}) throw std::runtime_error("expected {count} arguments");
        kernel_{number}({arguments});
    }} catch (...) {{
        return failed();
    }}
    Py_RETURN_NONE;
}}
"""
_METHOD = """    {{"kernel_{number}", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(call_{number})), METH_FASTCALL, ""}},
"""
_READ = {"float": "floating", "double": "floating", "uintptr_t": "address"} | dict.fromkeys(
    ("int64_t", "int32_t", "int", "long", "bool"), "integer"
)
"""For each argument type, the C++ function that reads it."""


@dataclass(frozen=True)
class Kernel:
    """A kernel that is not compiled yet. Generated code holds it until it waits."""

    argtypes: list[str]
    source: str


_Slot = tuple[dict[str, Any], str, Kernel]
"""The globals of a generated module, one of their names, and the kernel that the name will stand for."""


class AsyncCompile(_torch.AsyncCompile):
    """Inductor's kernel compiler, but the C++ kernels of one generated module are compiled together."""

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        """Return a placeholder for :meth:`wait` to fill, or torch's kernel if it must be compiled alone."""
        if not is_lone_function(source_code) or None in map(_argument, argtypes, range(len(argtypes))):
            submit = self.submit if _torch.compile_threads() > 1 else None
            return _torch_inductor.load_cpp_kernel(argtypes, source_code, submit)
        return Kernel(argtypes, source_code)

    def wait(self, scope: dict[str, Any]) -> None:
        """Compile the pending kernels, and replace their placeholders.

        Inside of :func:`one_unit`, that happens at the end of its block.
        """
        kernels = {name: value for name, value in scope.items() if isinstance(value, Kernel)}
        slots = [(scope, name, kernel) for name, kernel in kernels.items()]
        collected = getattr(_pending, "slots", None)
        if collected is not None:
            collected += slots
        else:
            _compile_slots(slots)
        super().wait(scope)


_pending = threading.local()


@contextlib.contextmanager
def one_unit() -> Iterator[None]:
    """Compile the C++ kernels of all graphs that this thread compiles in the block together, at its end.

    None of the graphs may run earlier. A nested block is a unit of its own.
    """
    outer = getattr(_pending, "slots", None)
    slots: list[_Slot] = []
    _pending.slots = slots
    try:
        yield
    finally:
        _pending.slots = outer
    with _torch_inductor.cache_for_code():
        _compile_slots(slots)


def _compile_slots(slots: Sequence[_Slot]) -> None:
    """Compile the kernels of some slots, and store them there."""
    threads = _torch.compile_threads()
    if len(slots) == 1:
        ((scope, name, kernel),) = slots
        scope[name] = _torch_inductor.load_cpp_kernel(kernel.argtypes, kernel.source, None)
        return
    units = _units(slots, threads)
    submit = AsyncCompile.submit if len(units) > 1 else None
    started = [_torch_inductor.load_cpp(shared_source([k for _, _, k in unit]), submit) for unit in units]
    for unit, load in zip(units, started, strict=True):
        module = load()
        for number, (scope, name, _) in enumerate(unit):
            scope[name] = getattr(module, f"kernel_{number}")


def is_lone_function(source: str) -> bool:
    """Whether a kernel's source is Inductor's header plus one function, so that it can share a unit.

    >>> is_lone_function('#include <torch/csrc/inductor/cpp_prefix.h>\\nextern "C" void kernel(float* x) { x[0] = 1; }')
    True
    >>> is_lone_function('int helper() { return 1; }\\nextern "C" void kernel(float* x) { x[0] = helper(); }')
    False
    """
    body = source.replace(_HEADER, "", 1).strip()
    if _DEFINITION.match(body) is None or any(line.lstrip().startswith("#inc") for line in body.splitlines()):
        return False
    return "#define" not in body and body.endswith("}") and _closes_at_end(body)


def _closes_at_end(body: str) -> bool:
    """Whether the first brace of a text is closed by its last character and not earlier."""
    depth = 0
    for brace in re.finditer(r"[{}]", body):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.end() == len(body)
    return False


def _argument(argtype: str, number: int) -> str | None:
    """C++ code that reads an argument of a type, or ``None`` for an unknown type."""
    plain = argtype.replace("const ", "").strip()
    if plain.endswith("*"):
        return f"static_cast<{plain}>(data_pointer(values[{number}]))"
    if plain in _READ:
        return f"static_cast<{plain}>({_READ[plain]}(values[{number}]))"
    return None


def shared_source(kernels: Sequence[Kernel]) -> str:
    """Write some kernels as one translation unit: a Python module with ``kernel_0``, ``kernel_1``, ..."""
    bodies, functions, methods = [], [], []
    for number, kernel in enumerate(kernels):
        body = kernel.source.replace(_HEADER, "", 1).strip()
        bodies.append(_DEFINITION.sub(f'extern "C" void kernel_{number}(', body, count=1))
        arguments = ", ".join(str(_argument(t, i)) for i, t in enumerate(kernel.argtypes))
        count = len(kernel.argtypes)
        functions.append(_FUNCTION.format(number=number, count=count, arguments=arguments))
        methods.append(_METHOD.format(number=number))
    binding = _BINDING.replace("FUNCTIONS", "".join(functions), 1).replace("METHODS", "".join(methods), 1)
    return "\n\n".join([_HEADER, *bodies, binding.replace("ENTRY", _torch_inductor.CPP_ENTRY)])


def _units(slots: Sequence[_Slot], threads: int) -> list[list[_Slot]]:
    """Divide the slots into units of about equal size: one for each thread that pays off."""
    size = sum(len(kernel.source) for _, _, kernel in slots)
    number = max(min(threads, 1 + size // _SPLIT), -(-len(slots) // _MAX_KERNELS))
    units: list[list[_Slot]] = []
    filled = 0
    for slot in slots:
        if not units or filled >= size / number * len(units) or len(units[-1]) >= _MAX_KERNELS:
            units.append([])
        units[-1].append(slot)
        filled += len(slot[2].source)
    return units


def use_shared_units(code: str) -> str:
    """Make generated code import its kernel compiler from this module.

    >>> use_shared_units("from torch._inductor.async_compile import AsyncCompile")
    'from fxpasses.compiling.shared_kernels import AsyncCompile'
    """
    return re.sub(
        rf"(?m)^from {re.escape(_torch.AsyncCompile.__module__)} import AsyncCompile$",
        f"from {__name__} import AsyncCompile",
        code,
    )
