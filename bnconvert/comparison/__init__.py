"""Comparing models, torch modules and ONNX files: by output, by layer, on images."""

from bnconvert.comparison.compare import Comparison, Difference, compare

__all__ = ["Comparison", "Difference", "compare"]
