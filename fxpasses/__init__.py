"""Graphs, passes and compilers between eager PyTorch and Inductor."""

__all__: list[str] = []
