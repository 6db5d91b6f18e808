"""C++ kernels of one graph in one unit: the same results, fewer runs of the compiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._inductor import cpu_vec_isa
from torch._inductor.codecache import CppPythonBindingsCodeCache
from torch._inductor.cpp_builder import is_gcc

from fxpasses import _torch
from fxpasses.compiling import _torch_inductor, shared_kernels as kernels
from fxpasses.compiling.shared_kernels import Kernel, is_lone_function, shared_source, use_shared_units
from tests import children

HEADER = "#include <torch/csrc/inductor/cpp_prefix.h>\n"
ADD = (
    HEADER
    + 'extern "C"  void  kernel(const float* x, float* y, const int64_t n)\n{ for (int i = 0; i < n; i++) { y[i] += x[i]; } }'
)
SCALE = (
    HEADER
    + 'extern "C"  void  kernel(float* y, const int64_t n, const double by)\n{ for (int i = 0; i < n; i++) { y[i] *= by; } }'
)
REFUSE = HEADER + 'extern "C"  void  kernel(float* y)\n{ throw std::runtime_error("no such index"); }'
WITH_HELPER = (
    HEADER + 'static float helper() { return 2; }\nextern "C"  void  kernel(float* y)\n{ y[0] = helper(); }'
)


def wait(compiler: kernels.AsyncCompile, **started: Any) -> dict[str, Any]:
    scope = dict(started)
    compiler.wait(scope)
    return scope


@pytest.fixture(params=[1, 2], ids=["alone", "threads"])
def threads(request: pytest.FixtureRequest) -> Any:
    with _torch.inductor_config.patch(compile_threads=request.param):
        yield request.param


def test_kernels_of_a_unit_take_tensors_and_numbers(threads: int) -> None:
    compiler = kernels.AsyncCompile()
    scope = wait(
        compiler,
        add=compiler.cpp_pybinding(["const float*", "float*", "const int64_t"], ADD),
        scale=compiler.cpp_pybinding(["float*", "const int64_t", "const double"], SCALE),
        other=7,
    )
    x, y = torch.arange(5.0), torch.ones(5)
    scope["add"](x, y, 5)
    scope["scale"](y, 4, 0.5)
    assert y.tolist() == [0.5, 1.0, 1.5, 2.0, 5.0]
    assert scope["other"] == 7
    assert scope["add"].__self__ is scope["scale"].__self__  # one module


def test_local_arrays_of_kernels_do_not_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    # GCC 12.2 gives a tile that is still to be transposed the memory of what is gathered for its next row.
    flags: list[tuple[str, ...]] = []
    load = CppPythonBindingsCodeCache.load_async

    def recorded(*args: Any, extra_flags: tuple[str, ...] = (), **kwargs: Any) -> Any:
        flags.append(tuple(extra_flags))
        return load(*args, extra_flags=extra_flags, **kwargs)

    monkeypatch.setattr(CppPythonBindingsCodeCache, "load_async", recorded)
    compiler = kernels.AsyncCompile()
    sources = {"one": ADD, "two": SCALE, "three": WITH_HELPER}
    types = {
        "one": ["const float*", "float*", "const int64_t"],
        "two": ["float*", "const int64_t", "const double"],
    }
    for chosen in (["one"], ["one", "two"], ["three"]):  # a unit of one, a unit, and what stays on its own
        wait(compiler, **{k: compiler.cpp_pybinding(types.get(k, ["float*"]), sources[k]) for k in chosen})
    assert flags == [("-fstack-reuse=none",) if is_gcc() else ()] * 3


def test_errors_of_kernels_and_of_callers_are_python_errors() -> None:
    compiler = kernels.AsyncCompile()
    scope = wait(
        compiler,
        add=compiler.cpp_pybinding(["const float*", "float*", "const int64_t"], ADD),
        refuse=compiler.cpp_pybinding(["float*"], REFUSE),
    )
    with pytest.raises(RuntimeError, match="no such index"):
        scope["refuse"](torch.ones(1))
    with pytest.raises(RuntimeError, match="expected 3 arguments"):
        scope["add"](torch.ones(1))
    with pytest.raises(TypeError):
        scope["add"](torch.ones(1), torch.ones(1), "many")
    with pytest.raises(OverflowError):
        scope["add"](torch.ones(1), torch.ones(1), 2**70)


def test_a_source_with_more_than_one_function_stays_on_its_own() -> None:
    compiler = kernels.AsyncCompile()
    assert not isinstance(compiler.cpp_pybinding(["float*"], WITH_HELPER), Kernel)
    for source in (
        WITH_HELPER,
        ADD + "\nint more;",
        "#include <vector>\n" + ADD,
        ADD.replace("y[i]", "[](){}, y[i]") + "}",
    ):
        assert not is_lone_function(source)


def test_types_that_are_not_known_stay_on_their_own() -> None:
    source = HEADER + 'extern "C"  void  kernel(float* y, char flag)\n{ y[0] = flag; }'
    with pytest.raises(Exception, match="parse_arg"):  # torch's own binding does not know it either
        kernels.AsyncCompile().cpp_pybinding(["float*", "char"], source)


def test_units_share_the_work_of_threads_and_keep_every_kernel() -> None:
    large: list[Any] = [({}, f"k{i}", Kernel(["float*"], "x" * 10_000)) for i in range(9)]
    for threads in (1, 2, 3, 8):
        units = kernels._units(large, threads)
        assert [place for unit in units for place in unit] == large
        assert len(units) == min(threads, 3)
    many: list[Any] = [({}, f"k{i}", Kernel(["float*"], "x")) for i in range(200)]
    assert max(map(len, kernels._units(many, 1))) <= 64
    assert kernels._units([], 2) == []


def test_modules_that_are_loaded_together_share_a_unit() -> None:
    with kernels.one_unit():
        first, second = kernels.AsyncCompile(), kernels.AsyncCompile()
        one = wait(first, add=first.cpp_pybinding(["const float*", "float*", "const int64_t"], ADD))
        two = wait(second, add=second.cpp_pybinding(["float*", "const int64_t", "const double"], SCALE))
        assert isinstance(one["add"], Kernel)
    assert one["add"].__self__ is two["add"].__self__
    y = torch.ones(2)
    one["add"](y, y, 2)
    two["add"](y, 2, 3.0)
    assert y.tolist() == [6.0, 6.0]


def test_a_unit_holds_each_body_once() -> None:
    text = shared_source(
        [Kernel(["const float*", "float*", "const int64_t"], ADD), Kernel(["float*"], REFUSE)]
    )
    assert text.count("cpp_prefix.h") == 1
    assert text.count("kernel_0(") == text.count("kernel_1(") == 2


def test_only_the_import_of_generated_code_changes() -> None:
    code = "import torch\nfrom torch._inductor.async_compile import AsyncCompile\nasync_compile = AsyncCompile()\n"
    assert (
        use_shared_units(code).splitlines()[1] == "from fxpasses.compiling.shared_kernels import AsyncCompile"
    )
    assert use_shared_units(code).splitlines()[::2] == code.splitlines()[::2]


SCRIPT = """
import torch, sys
from fxpasses.backend import fxpasses
from torch._inductor import cpp_builder
runs = []
build = cpp_builder.CppBuilder.build
cpp_builder.CppBuilder.build = lambda self: (runs.append(self.get_target_file_path()), build(self))[1]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 8), torch.nn.GELU())
x = torch.randn(6, 8)
compiled = torch.compile(model, backend=sys.argv[1] if sys.argv[1] == "inductor" else fxpasses, dynamic=True)
compiled(x).square().sum().backward()
got = [p.grad.clone() for p in model.parameters()]
model.zero_grad()
model(x).square().sum().backward()
assert all(torch.allclose(a, p.grad, atol=1e-5) for a, p in zip(got, model.parameters()))
print(sum(path.endswith(".main.so") for path in runs))
"""


@pytest.mark.slow
def test_a_graph_compiles_one_unit_and_a_second_process_none(tmp_path: Path) -> None:
    def runs(backend: str, cache: str, run: Callable = children.run) -> int:
        environment = {
            **os.environ,
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / cache),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        environment.pop("TORCHINDUCTOR_FORCE_DISABLE_CACHES", None)
        done = run("-c", SCRIPT, backend, env=environment)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert runs("fxpasses", "ours") == 2  # forward and backward
    assert runs("fxpasses", "ours", children.run_fresh) == 0
    assert runs("inductor", "torch") > 2  # torch's own code is as it was


class InstructionSet:
    def __init__(self, flags, works, asked):
        self.flags, self.works, self.asked = flags, works, asked

    def __str__(self):
        return self.flags

    def __bool__(self):
        self.asked.append(self.flags)
        return self.works

    def bit_width(self):
        return 128


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_only_the_widest_instruction_set_that_works_is_tried(monkeypatch, machine):
    asked = []
    known = [("avx9", False), ("avx8", True), ("avx7 and", True), ("avx6", True)]
    monkeypatch.setattr(
        _torch_inductor, "supported_vec_isa_list", [InstructionSet(*one, asked) for one in known]
    )
    monkeypatch.setattr(_torch_inductor, "x86_isa_checker", lambda: ["avx9", "avx8", "avx7", "avx6"])
    monkeypatch.setattr(cpu_vec_isa, "valid_vec_isa_list", lambda: [InstructionSet("torch's", True, asked)])
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    with _torch_inductor.one_instruction_set():
        taken = str(cpu_vec_isa.pick_vec_isa())
        with _torch.inductor_config.patch({"cpp.simdlen": 128}):
            assert str(cpu_vec_isa.pick_vec_isa()) == "torch's"
    assert (taken, asked) == (("avx8", ["avx9", "avx8"]) if machine == "x86_64" else ("torch's", []))
    assert str(cpu_vec_isa.pick_vec_isa()) == "torch's"
