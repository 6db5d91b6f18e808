"""Building blocks of a compilation: options, observers, compilers of partitioned graphs, and history."""
