"""The command line, with one file for each command. None of them imports torch before it runs."""
