"""Importing the packages imports no torch; their names come when they are asked for."""

import importlib
import json
import subprocess
import sys

import pytest

_PROGRAM = """
import json, sys
before = set(sys.modules)
import {package}
print(json.dumps(sorted(set(sys.modules) - before)))
"""

_HEAVY = ("torch", "numpy", "sympy", "networkx", "rich")


@pytest.mark.parametrize("package", ["fake", "fxpasses", "fxpasses.testing.plugin"])
def test_importing_is_light(package):
    program = _PROGRAM.format(package=package)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = json.loads(done.stdout)
    assert package in loaded
    assert [name for name in loaded if name.startswith(_HEAVY)] == []


@pytest.mark.parametrize("package", ["fake", "fxpasses", "fxpasses.testing"])
def test_all_names_are_there(package):
    module = importlib.import_module(package)
    assert [name for name in module.__all__ if not hasattr(module, name)] == []
    assert set(module.__all__) <= set(dir(module))
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = module.no_such_name


def test_a_submodule_is_an_attribute():
    program = "import fxpasses; print(fxpasses.checking.__name__, callable(fxpasses.stats))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fxpasses.checking", "True"]


@pytest.mark.slow
def test_loaders_that_keep_no_text():
    """pytest rewrites the assertions of all that is installed together with a plugin: its loader has no ``get_source``."""
    program = """
import pytest
class Reads:
    def pytest_configure(self, config):
        pytest.register_assert_rewrite("fake", "fxpasses")
        import fake, fxpasses
        for package in (fake, fxpasses):
            assert not hasattr(package.__spec__.loader, "get_source"), package.__spec__.loader
            print(package.__name__, len([getattr(package, name) for name in package.__all__]))
pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:fxpasses", "-c", "/dev/null", "/dev/null/none"], plugins=[Reads()])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    for package in ("fake", "fxpasses"):
        names = len(importlib.import_module(package).__all__)
        assert f"{package} {names}" in done.stdout, done.stdout + done.stderr


def test_passes_are_listed_without_a_compiler():
    program = "import sys, fxpasses.passes.registry; print([n for n in sys.modules if n.startswith(('torch._dynamo', 'torch._inductor'))])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []
