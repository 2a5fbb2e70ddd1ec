"""Pallas kernels for NVIDIA GPUs, compiled by Mosaic GPU."""
