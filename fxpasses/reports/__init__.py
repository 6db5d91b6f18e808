"""Reports on a compilation: text files, the same as JSON, and one page for a browser."""
