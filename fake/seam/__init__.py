"""The seam between this project and torch: private names, in modules called after torch's own, and what is put into torch while it is needed."""
