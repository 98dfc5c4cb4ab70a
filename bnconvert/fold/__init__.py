"""Exact folding of eval-mode BatchNorm into the layers around it, with proof.

`fold_batchnorm` changes a module tree in place, `fold_exported` returns a folded exported program;
`plan_fold_batchnorm` and `plan_fold_exported` return a plan with `.report` and `.apply()` instead.
"""

from __future__ import annotations

from bnconvert.fold.batchnorm import fold_batchnorm, plan_fold_batchnorm
from bnconvert.fold.exported import ExportedPlan, fold_exported, plan_fold_exported
from bnconvert.fold.report import FoldReport

__all__ = [
    "ExportedPlan",
    "FoldReport",
    "fold_batchnorm",
    "fold_exported",
    "plan_fold_batchnorm",
    "plan_fold_exported",
]
