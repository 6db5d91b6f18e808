"""Plan files: what a plan is on disk, and many of them as one portable file."""
