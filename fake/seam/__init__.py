"""The seam between this project and torch: private names, and what is put into torch while it is needed."""
