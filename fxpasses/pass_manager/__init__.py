"""Passes and their contracts, the order in which they run, running them, and the record of a run."""
