"""What a compilation is made of: options, observers, compilers of the partitioned graphs, and its history."""
