"""Building blocks of the models: each receives [T, H] and the step's batch, returns [T, H]."""
