"""Prove an exported file against the torch model it came from."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx
import torch

from bnconvert.errors import BnconvertError, VerificationError
from bnconvert.export.report import Check
from bnconvert.runners import (
    OnnxRunner,
    RuntimeLevel,
    TorchRunner,
    first_line,
    largest_difference,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from bnconvert.arguments import Arguments

TOLERANCE = {torch.float32: 1e-4}
"""Largest relative difference from the torch model, by the dtype of the file's weights."""

_ROUNDING_FACTOR = 10.0  # other orders of summation, not other formulas
_ROUNDING_LIMIT = 1e-2


@dataclass(frozen=True)
class Case:
    """Arguments to run, and what the torch model gives for them.

    Attributes:
        arguments: In the dtypes that the file takes.
        size: Height and width where they differ from the example's.
        expected: Outputs in float32.
        exact: Outputs of the float64 model; None where it does not run.
    """

    arguments: Arguments
    size: tuple[int, int] | None
    expected: dict[str, torch.Tensor]
    exact: dict[str, torch.Tensor] | None

    @property
    def rounding(self) -> float | None:
        """Difference of the float32 model from the float64 one."""
        return None if self.exact is None else largest_difference(self.expected, self.exact)

    def limit(self, tolerance: float | None, default: float) -> float:
        """Return the largest difference to accept.

        A tolerance that the user gave is taken as it is. The default gives way, within reason,
        where float32 itself is further than that from float64.
        """
        if tolerance is not None:
            return tolerance
        rounding = min(_ROUNDING_FACTOR * (self.rounding or 0.0), _ROUNDING_LIMIT)
        return max(default, rounding)


def make_cases(model: nn.Module, all_arguments: Sequence[Arguments]) -> list[Case]:
    """Run the torch model, in float32 and float64, on each of the arguments.

    Raises:
        BnconvertError: The model does not run on them, or its own output is not finite.
    """
    exact = _Float64(model)
    cases = []
    for arguments in all_arguments:
        try:
            expected = TorchRunner(model).run(arguments)
        except Exception as error:
            raise BnconvertError(
                f"example_inputs: {type(model).__name__} does not run with batch size "
                f"{arguments.batch}: {first_line(error)}"
            ) from error
        bad = [name for name, value in expected.items() if not bool(value.isfinite().all())]
        if bad:
            raise BnconvertError(
                f"{', '.join(bad)}: the model's own output is not finite on these inputs; "
                "nothing can be proven about its export"
            )
        cases.append(Case(arguments, None, expected, exact.run(arguments)))
    return cases


class _Float64:
    """The model in float64, for as long as it runs so."""

    def __init__(self, model: nn.Module) -> None:
        self._runner: TorchRunner | None = TorchRunner(copy.deepcopy(model).double())

    def run(self, arguments: Arguments) -> dict[str, torch.Tensor] | None:
        if self._runner is None:
            return None
        try:
            return self._runner.run(arguments.to(torch.float64))
        except (RuntimeError, TypeError, ValueError):  # a dtype is written into its forward
            self._runner = None
            return None


def verify(path: Path, cases: Sequence[Case], tolerance: float | None) -> tuple[Check, ...]:
    """Check a file's structure and its numbers.

    Args:
        path: The model file; external data beside it.
        cases: What to run and what to expect.
        tolerance: Largest accepted relative difference; None is `TOLERANCE`.

    Raises:
        VerificationError: The file is not valid, onnxruntime does not run it, or it differs.
    """
    try:
        onnx.checker.check_model(str(path), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise VerificationError(f"onnx.checker: {first_line(error)}") from error
    checks = []
    for level in RuntimeLevel:
        runner = OnnxRunner(path, level)
        for case in cases:
            checks.append(_check(runner, level, case))
            limit = case.limit(tolerance, TOLERANCE[torch.float32])
            if not checks[-1].difference <= limit:
                raise VerificationError(_failure(checks[-1], limit))
    return tuple(checks)


def _check(runner: OnnxRunner, level: RuntimeLevel, case: Case) -> Check:
    values = runner.run(case.arguments)
    return Check(
        batch=case.arguments.batch or 0,
        size=case.size,
        level=level,
        difference=largest_difference(values, case.expected),
        from_float64=None if case.exact is None else largest_difference(values, case.exact),
        rounding=case.rounding,
    )


def _failure(check: Check, limit: float) -> str:
    rounding = "" if check.rounding is None else f", where rounding explains {check.rounding:.1e}"
    return (
        f"export: the file differs by {check.difference:.1e} from the torch model at {check.level} "
        f"with batch size {check.batch}{rounding}; accepted is {limit:.1e}, nothing was written"
    )
