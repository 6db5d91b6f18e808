"""How captured graphs are compiled and run."""
