"""Tensors that a plan depends on: their facts, parts, views and memory, and the check that they are the same ones."""
