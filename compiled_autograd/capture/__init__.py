"""From what C++ tells of a backward pass to an FX graph."""
