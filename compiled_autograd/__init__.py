"""The backward pass as one graph."""

__all__: list[str] = []
