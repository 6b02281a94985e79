"""Runs a model: weights in, forward passes of one batch each, tokens out."""
