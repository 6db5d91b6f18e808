"""Support for packages that keep their own list of backend names."""
