"""Run graphs for a comparison: on which inputs, in which precision, and as several processes."""
