"""Run-time support for captured backward passes: hooks, accumulation, queries."""
