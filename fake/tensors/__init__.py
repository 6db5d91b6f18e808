"""Fake tensors: metadata, the tensor, conversion from tensors with data."""
