"""Incremental propagation of fake tensors over FX graphs."""

from fake.propagate.prop import FakeTensorProp

__all__ = ["FakeTensorProp"]
