"""Accuracy evaluation of MoE servers: a YAML becomes a verdict."""

__version__ = "0.1.0"
