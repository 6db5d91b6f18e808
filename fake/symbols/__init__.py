"""Symbolic sizes that cost little: what ``fake.accelerate`` puts in place of torch's hot methods."""
