"""bnconvert: BatchNorm to synchronised BatchNorm and back, exact folding, export with proof.

Public names are imported on first use, so that `import bnconvert` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bnconvert.checkpoint import convert_checkpoint, load_checkpoint, save_checkpoint
    from bnconvert.comparison import compare
    from bnconvert.convert import (
        convert_sync_batchnorm,
        plan_convert_sync_batchnorm,
        plan_revert_sync_batchnorm,
        revert_sync_batchnorm,
    )
    from bnconvert.errors import BnconvertError
    from bnconvert.export import export_onnx
    from bnconvert.fold import (
        fold_batchnorm,
        fold_exported,
        plan_fold_batchnorm,
        plan_fold_exported,
    )
    from bnconvert.freeze import (
        freeze_batchnorm,
        plan_freeze_batchnorm,
        plan_unfreeze_batchnorm,
        unfreeze_batchnorm,
    )
    from bnconvert.inspection import inspect_batchnorm
    from bnconvert.layers import (
        FrozenBatchNorm1d,
        FrozenBatchNorm2d,
        FrozenBatchNorm3d,
        SyncBatchNorm1d,
        SyncBatchNorm2d,
        SyncBatchNorm3d,
        is_synchronized,
    )
    from bnconvert.layers.timm_act import FrozenBatchNormAct2d, SyncBatchNormAct2d
    from bnconvert.models import load_model, save_model
    from bnconvert.plan import Plan
    from bnconvert.ranks import verify_ranks
    from bnconvert.recalibration import recalibrate_batchnorm
    from bnconvert.report import LayerReport, Outcome, Report

__version__ = "0.1.0"

_MODULE_OF = {
    "BnconvertError": "errors",
    "FrozenBatchNorm1d": "layers",
    "FrozenBatchNorm2d": "layers",
    "FrozenBatchNorm3d": "layers",
    "FrozenBatchNormAct2d": "layers.timm_act",
    "LayerReport": "report",
    "Outcome": "report",
    "Plan": "plan",
    "Report": "report",
    "SyncBatchNorm1d": "layers",
    "SyncBatchNorm2d": "layers",
    "SyncBatchNorm3d": "layers",
    "SyncBatchNormAct2d": "layers.timm_act",
    "compare": "comparison",
    "convert_checkpoint": "checkpoint",
    "convert_sync_batchnorm": "convert",
    "export_onnx": "export",
    "fold_batchnorm": "fold",
    "fold_exported": "fold",
    "freeze_batchnorm": "freeze",
    "inspect_batchnorm": "inspection",
    "is_synchronized": "layers",
    "load_checkpoint": "checkpoint",
    "load_model": "models",
    "plan_convert_sync_batchnorm": "convert",
    "plan_fold_batchnorm": "fold",
    "plan_fold_exported": "fold",
    "plan_freeze_batchnorm": "freeze",
    "plan_revert_sync_batchnorm": "convert",
    "plan_unfreeze_batchnorm": "freeze",
    "recalibrate_batchnorm": "recalibration",
    "revert_sync_batchnorm": "convert",
    "save_checkpoint": "checkpoint",
    "save_model": "models",
    "unfreeze_batchnorm": "freeze",
    "verify_ranks": "ranks",
}

__all__ = [
    "BnconvertError",
    "FrozenBatchNorm1d",
    "FrozenBatchNorm2d",
    "FrozenBatchNorm3d",
    "FrozenBatchNormAct2d",
    "LayerReport",
    "Outcome",
    "Plan",
    "Report",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "SyncBatchNormAct2d",
    "__version__",
    "compare",
    "convert_checkpoint",
    "convert_sync_batchnorm",
    "export_onnx",
    "fold_batchnorm",
    "fold_exported",
    "freeze_batchnorm",
    "inspect_batchnorm",
    "is_synchronized",
    "load_checkpoint",
    "load_model",
    "plan_convert_sync_batchnorm",
    "plan_fold_batchnorm",
    "plan_fold_exported",
    "plan_freeze_batchnorm",
    "plan_revert_sync_batchnorm",
    "plan_unfreeze_batchnorm",
    "recalibrate_batchnorm",
    "revert_sync_batchnorm",
    "save_checkpoint",
    "save_model",
    "unfreeze_batchnorm",
    "verify_ranks",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'bnconvert' has no attribute {name!r}")
    module = importlib.import_module(f"bnconvert.{_MODULE_OF[name]}")
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
