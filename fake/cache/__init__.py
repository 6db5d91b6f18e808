"""The dispatch cache: what decides an answer (key), how to rebuild it (recipe), where it is kept (store, disk)."""
