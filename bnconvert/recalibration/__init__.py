"""Measuring running statistics anew on data."""

from bnconvert.recalibration.recalibrate import recalibrate_batchnorm

__all__ = ["recalibrate_batchnorm"]
