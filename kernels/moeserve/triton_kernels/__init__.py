"""Device code in Triton: what runs on the accelerator, without policy.

Each file holds one kernel family and the function that launches it. Which backend runs when is
`moe/policy.py`; which tile sizes are used is `moe/tuning.py`.
"""
