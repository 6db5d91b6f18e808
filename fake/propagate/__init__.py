"""Propagation of fake tensors over FX graphs: incremental."""

from fake.propagate.prop import FakeTensorProp

__all__ = ["FakeTensorProp"]
