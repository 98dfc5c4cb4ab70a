"""Prove an exported file against the torch model it came from."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import onnx
import torch

from bnconvert.comparison.layerwise import all_values, module_layers, onnx_layers
from bnconvert.comparison.runners import (
    OnnxRunner,
    RuntimeLevel,
    TorchRunner,
    largest_difference,
    other_shape,
    relative_difference,
)
from bnconvert.errors import BnconvertError, VerificationError, first_line
from bnconvert.export.report import Check

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import nn

    from bnconvert.arguments import Arguments

TOLERANCE = 1e-4
"""Largest relative difference of a float32 file from the torch model."""

HALF_TOLERANCE = 2e-2
"""The same for a file with float16 weights."""

_ROUNDING_FACTOR = 10.0  # other orders of summation, not other formulas
_ROUNDING_LIMIT = 1e-2

_REPEATED = 1e-5
"""Largest relative difference of a model's outputs from those of another run."""


@dataclass(frozen=True)
class Case:
    """Arguments to run, and what the torch model gives for them.

    Attributes:
        arguments: In the dtypes that the file takes.
        size: Height and width of images where they differ from the example's.
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

    @property
    def words(self) -> str:
        """The case in words."""
        size = " and images of {}x{}".format(*self.size) if self.size else ""
        return f"batch size {self.arguments.batch}{size}"


def make_cases(model: nn.Module, variants: Sequence[Arguments], example: Arguments) -> list[Case]:
    """Run the torch model, in float32 and float64, on each of the arguments.

    Args:
        model: The prepared copy.
        variants: What to run.
        example: The caller's own arguments; a variant of another image size is marked so.

    Raises:
        BnconvertError: The model does not run on them, its own output is not finite, or another
            one each time.
    """
    exact = _Float64(model)
    cases = []
    for arguments in variants:
        size = arguments.image_size if arguments.image_size != example.image_size else None
        expected = _run(model, arguments, size, example)
        cases.append(Case(arguments, size, expected, exact.run(arguments)))
    _refuse_random(model, cases[0])
    return cases


def _refuse_random(model: nn.Module, case: Case) -> None:
    difference = largest_difference(TorchRunner(model).run(case.arguments), case.expected)
    if difference > _REPEATED:
        raise BnconvertError(
            f"model: {type(model).__name__} gives another output each time it runs on the same "
            f"inputs (relative difference {difference:.1e}); take the randomness out of its "
            "forward, as nothing can be proven about it"
        )


def _run(
    model: nn.Module, arguments: Arguments, size: tuple[int, int] | None, example: Arguments
) -> dict[str, torch.Tensor]:
    try:
        expected = TorchRunner(model).run(arguments)
    except BnconvertError:
        raise
    except Exception as error:
        where, what = "example_inputs", f"with batch size {arguments.batch}"
        advice = "pass inputs that it accepts"
        if size:
            where, what = "dynamic_size", "on images of {}x{}".format(*size)
            advice = "export without dynamic_size"
        elif arguments.batch != example.batch and _runs(model, example):
            where, advice = "dynamic_batch", "export with dynamic_batch=False"
        raise BnconvertError(
            f"{where}: {type(model).__name__} does not run {what}: {first_line(error)}; {advice}"
        ) from error
    if not expected:
        raise BnconvertError(
            f"model: {type(model).__name__} returns no tensor; export one that does"
        )
    bad = [name for name, value in expected.items() if not bool(value.isfinite().all())]
    if bad:
        raise BnconvertError(
            f"{', '.join(bad)}: the model's own output is not finite on the example inputs; "
            "nothing can be proven about its export"
        )
    return expected


def _runs(model: nn.Module, arguments: Arguments) -> bool:
    try:
        TorchRunner(model).run(arguments)
    except Exception:
        return False
    return True


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


def tolerance_of(
    cases: Sequence[Case], tolerance: float | None, dtype: torch.dtype | None
) -> float:
    """Return the largest difference to accept.

    A tolerance that the user gave is taken as it is. The default gives way, within reason, where
    float32 itself is further than that from float64.
    """
    if tolerance is not None:
        return tolerance
    if dtype is torch.float16:
        return HALF_TOLERANCE
    rounding = max(case.rounding or 0.0 for case in cases)
    return max(TOLERANCE, min(_ROUNDING_FACTOR * rounding, _ROUNDING_LIMIT))


def largest_values(path: Path, cases: Sequence[Case]) -> dict[str, float]:
    """Return the largest absolute value of each value in a file, over all cases."""
    largest: dict[str, float] = {}
    for case in cases:
        values = all_values(path, case.arguments, RuntimeLevel.DISABLE_ALL)
        for name, value in values.items():
            if value.numel() and value.is_floating_point():
                top = value.abs().max().item()
                top = math.inf if math.isnan(top) else top
                largest[name] = max(top, largest.get(name, 0.0))
    return largest


def verify(
    path: Path, model: nn.Module, cases: Sequence[Case], tolerance: float
) -> tuple[Check, ...]:
    """Check a file's structure and its numbers.

    Args:
        path: The model file; external data beside it.
        model: The prepared copy, asked for its layers when the numbers differ.
        cases: What to run and what to expect.
        tolerance: Largest accepted relative difference.

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
            check = _check(runner, level, case)
            if not check.difference <= tolerance:
                place = _first_diverging(path, model, case, tolerance)
                raise VerificationError(_failure(check, case, tolerance, place))
            checks.append(check)
    return tuple(checks)


def _check(runner: OnnxRunner, level: RuntimeLevel, case: Case) -> Check:
    try:
        values = runner.run(case.arguments)
    except BnconvertError as error:
        raise VerificationError(f"{error} (with {case.words}, {level})") from error
    shapes = other_shape(values, case.expected)
    if shapes:
        raise VerificationError(
            f"export: with {case.words} {shapes}, as the torch model gives it; the forward has "
            "fixed a size of the example; take it from the input's shape, or export with "
            "dynamic_batch=False and without dynamic_size; nothing was written"
        )
    return Check(
        batch=case.arguments.batch or 0,
        size=case.size,
        level=level,
        difference=largest_difference(values, case.expected),
        from_float64=None if case.exact is None else largest_difference(values, case.exact),
        rounding=case.rounding,
    )


def _first_diverging(path: Path, model: nn.Module, case: Case, tolerance: float) -> str:
    """Return the name of the first layer whose output differs, in the order of execution."""
    expected = module_layers(model, case.arguments)
    values = onnx_layers(path, case.arguments)
    for name, value in expected.items():
        if name in values and not relative_difference(values[name], value) <= tolerance:
            return f"the first layer that differs is {name}"
    return "no single layer differs when looked at alone"


def _failure(check: Check, case: Case, tolerance: float, place: str) -> str:
    rounding = "" if check.rounding is None else f" (rounding explains {check.rounding:.1e})"
    return (
        f"export: the file differs by {check.difference:.1e}{rounding} from the torch model with "
        f"{case.words} at {check.level}, accepted is {tolerance:.1e}; {place}; nothing was written"
    )
