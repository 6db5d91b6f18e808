"""What a pass is and promises, in which order passes run, running them, and the record of a run."""
