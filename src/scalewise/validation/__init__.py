"""Checks of a run before it starts: rules between configs, the machine, trusted imports."""
