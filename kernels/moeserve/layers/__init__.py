"""Layers of the models: parameters and forward, each with the batch as an argument."""
