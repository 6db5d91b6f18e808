"""The command line: one file a command; none of them imports torch before it runs."""
