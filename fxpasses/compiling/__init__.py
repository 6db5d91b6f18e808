"""Parts of a compilation: options, observers, compilers of the partitioned graphs, and the history of compilations."""
