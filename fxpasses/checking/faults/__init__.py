"""A fault that was found: the match site and node to blame, the smallest graph, and a file that shows it."""
