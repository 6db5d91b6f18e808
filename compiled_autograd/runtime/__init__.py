"""What runs while a captured backward pass runs: hooks, accumulation, queries about it."""
