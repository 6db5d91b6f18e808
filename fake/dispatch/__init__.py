"""Dispatch on a cache miss: the list of steps."""
