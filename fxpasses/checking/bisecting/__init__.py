"""Bisection of a script that fails: which stage, pass or match site it takes, by running it repeatedly."""
