"""Export to ONNX: folded, verified in onnxruntime, one file."""

from bnconvert.export.exporter import export_onnx
from bnconvert.export.onnx_fold import OnnxFoldReport, fold_onnx
from bnconvert.export.report import Check, ExportReport

__all__ = ["Check", "ExportReport", "OnnxFoldReport", "export_onnx", "fold_onnx"]
