"""What this process tells other ranks of its job. Needs no torch, as it starts with ``import fxpasses``."""
