"""The experts' backends: one file each, found by name through `registry.py`."""
