"""What this process of a job does, for the others: needs no torch, as it begins with ``import fxpasses``."""
