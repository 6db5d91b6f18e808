"""For packages that name backends from a list of their own."""
