"""Fake tensors: their metadata, the tensor class, and conversion from tensors with data."""
