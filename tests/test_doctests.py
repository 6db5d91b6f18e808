"""The examples in docstrings run."""

import doctest
import importlib
import pkgutil

import pytest
import torch

import benchmarks.conformance
import compiled_autograd
import fake
import fxpasses


def modules():
    for package in (fake, compiled_autograd, fxpasses, benchmarks.conformance):
        yield package.__name__
        for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not found.name.endswith("__main__"):
                yield found.name


@pytest.mark.parametrize("name", list(modules()))
def test_examples_in_docstrings(name):
    torch._dynamo.reset()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(name)):
        if test.examples:  # to run none looks after all source files that were ever read
            runner.run(test)
    assert runner.failures == 0
