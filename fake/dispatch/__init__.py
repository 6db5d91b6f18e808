"""Dispatch on a cache miss: a list of steps, tried in order.

``steps`` has the list. ``constants`` and ``refusals`` have some of the steps: numbers known during tracing, and
eager's errors. ``communication`` recognizes collectives.
"""
