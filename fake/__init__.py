"""What a tensor would be, without computing it."""

__all__: list[str] = []
