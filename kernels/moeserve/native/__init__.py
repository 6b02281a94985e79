"""Kernels in C for CPUs, compiled for this machine by its own compiler at the first start."""
