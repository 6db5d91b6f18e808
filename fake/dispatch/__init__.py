"""Dispatch on a cache miss: a list of steps, tried in order."""
