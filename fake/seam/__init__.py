"""The seam to torch: private names, in modules named after torch's own,
and what is put into torch while needed."""
