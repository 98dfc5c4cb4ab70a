"""Kernels of synchronised batch normalization and the operators built on them."""
