"""Speed claims, one file each: ratios against torch, measured interleaved in one process.

Run one with ``python -m benchmarks NAME``; ``python -m benchmarks`` lists them.
"""
