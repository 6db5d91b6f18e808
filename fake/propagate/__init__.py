"""Propagation of fake tensors over FX graphs: incremental, and quick about layers that repeat."""

from fake.propagate.prop import FakeTensorProp

__all__ = ["FakeTensorProp"]
