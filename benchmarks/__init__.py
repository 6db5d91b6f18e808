"""Benchmarks behind the claims about speed, one per file: ratios against torch, interleaved in one process.

Run one with ``python -m benchmarks NAME``; ``python -m benchmarks`` lists them.
"""
