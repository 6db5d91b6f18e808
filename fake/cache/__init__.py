"""The dispatch cache: keys of calls, recipes for their outputs, and where these are kept (memory, disk)."""
