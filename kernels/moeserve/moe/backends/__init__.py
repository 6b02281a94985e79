"""The experts' backends, one file each: a module here with a `BACKEND` is found by its name.

`registry.py` finds them, `base.py` is what each has to be, and `policy.py` says which is preferred.
"""
