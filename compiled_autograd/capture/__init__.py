"""Capture: record what C++ reports about a backward pass, and turn it into an FX graph."""
