"""An OpenAI-compatible server on MoE kernels."""

__version__ = "0.1.0"
