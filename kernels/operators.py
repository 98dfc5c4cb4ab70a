"""The operators of synchronised batch normalization, in torch's `bnconvert` namespace.

Each has a fake kernel, so that a training step compiles in one graph, and none waits for the
device. Sums are added over the ranks by the operator that takes them: nothing changes what it
returns, so checkpointing may keep it. `selection` chooses whether our kernels run, those that torch
ships, or ATen operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bnconvert.kernels import activation as activations
from bnconvert.kernels import aten_cuda, comm, native, reference
from bnconvert.kernels.recomputation import is_recomputation
from bnconvert.kernels.selection import choose, driver_for

if TYPE_CHECKING:
    from collections.abc import Callable

namespace = torch.ops.bnconvert
"""The operators, ready to be called."""

_library = torch.library.Library("bnconvert", "DEF")  # type: ignore[no-untyped-call]
_define: Callable[[str], object] = _library.define
_define("global_sums(Tensor input, str group) -> Tensor")
_define(
    "normalize_(Tensor input, Tensor? residual, Tensor? weight, Tensor? bias, Tensor sums, "
    "Tensor(a!)? running_mean, Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, "
    "float? momentum, float eps, str activation, float negative_slope) "
    "-> (Tensor output, Tensor statistics)"
)
_define(
    "backward_sums(Tensor grad_output, Tensor input, Tensor? residual, Tensor? weight, "
    "Tensor? bias, Tensor statistics, str activation, float negative_slope, str? group) "
    "-> (Tensor sums, Tensor grad_weight, Tensor grad_bias)"
)
_define(
    "backward_input(Tensor grad_output, Tensor input, Tensor? residual, Tensor? weight, "
    "Tensor? bias, Tensor statistics, Tensor sums, str activation, float negative_slope) "
    "-> (Tensor grad_input, Tensor grad_residual)"
)


def _torch_kernels(input: Tensor) -> Any:  # noqa: A002
    """Return the module whose functions run where our kernels do not."""
    return aten_cuda if choose(input.device).kernels != "reference" and input.is_cuda else reference


def _global_sums(input: Tensor, group: str) -> Tensor:  # noqa: A002
    driver = driver_for(input, None, None)
    sums: Tensor
    if driver is not None:
        sums = native.local_sums(driver, input)
    else:
        sums = _torch_kernels(input).local_sums(input)
    comm.all_reduce_(sums, group)
    return sums


def _normalize_(
    input: Tensor,  # noqa: A002
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    sums: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    activation: str,
    negative_slope: float,
) -> tuple[Tensor, Tensor]:
    driver = driver_for(input, weight, bias, running_mean, running_var)
    running: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)
    if not is_recomputation():
        running = (running_mean, running_var, num_batches_tracked)
    if driver is not None:
        fused = native.Activation(activation, negative_slope)
        return native.normalize_(
            driver, input, residual, weight, bias, sums, *running, momentum, eps, fused
        )
    statistics = reference.finalize(sums)
    mean, var, count = reference.parts(statistics)
    reference.update_running_stats(mean, var, count, *running, momentum)
    invstd = var.add_(eps).rsqrt_()
    output = _torch_kernels(input).normalize(input, weight, bias, mean, invstd)
    return activations.apply(output, residual, activation, negative_slope), statistics


def _backward_sums(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    activation: str,
    negative_slope: float,
    group: str | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sums, added over the ranks of the group if there is one, and local gradients."""
    driver = driver_for(input, weight, bias)
    if driver is not None:
        fused = native.Activation(activation, negative_slope)
        sums, grad_weight, grad_bias = native.backward_sums(
            driver, grad_output, input, residual, weight, bias, statistics, fused
        )
    else:
        grad_output = _before_activation(
            grad_output, input, residual, weight, bias, statistics, activation, negative_slope
        )
        mean, invstd = _moments(statistics, input.dtype)
        sums = _torch_kernels(input).backward_sums(grad_output, input, mean, invstd)
        grad_bias, grad_weight = sums.chunk(2)
        grad_weight = _parameter_gradient(grad_weight, weight)
        grad_bias = _parameter_gradient(grad_bias, bias)
    if group is not None:
        comm.all_reduce_(sums, group)
    return sums, grad_weight, grad_bias


def _backward_input(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    sums: Tensor,
    activation: str,
    negative_slope: float,
) -> tuple[Tensor, Tensor]:
    driver = driver_for(input, weight, bias)
    if driver is not None:
        fused = native.Activation(activation, negative_slope)
        return native.backward_input(
            driver, grad_output, input, residual, weight, bias, statistics, sums, fused
        )
    before = _before_activation(
        grad_output, input, residual, weight, bias, statistics, activation, negative_slope
    )
    mean, invstd = _moments(statistics, input.dtype)
    count = statistics[-1:]
    kernels = _torch_kernels(input)
    grad_input = kernels.backward_input(before, input, weight, mean, invstd, sums, count)
    if residual is None or activation == "none":
        return grad_input, input.new_empty(0)
    return grad_input, before


def _before_activation(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    activation: str,
    negative_slope: float,
) -> Tensor:
    """Return the gradient before the activation, whose input is computed again."""
    if activation == "none":
        return grad_output
    mean, invstd, _ = reference.parts(statistics)
    before = _torch_kernels(input).normalize(input, weight, bias, mean, invstd)
    before = activations.apply(before, residual, "none", 0.0)
    return activations.gradient(grad_output, before, activation, negative_slope)


def _moments(statistics: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the mean and invstd of the batch in the dtype of statistics."""
    mean, invstd, _ = reference.parts(statistics.to(reference.statistics_dtype(dtype)))
    return mean, invstd


def _parameter_gradient(sums: Tensor, parameter: Tensor | None) -> Tensor:
    """Return this rank's sums as a gradient; they are not to change with the reduced ones."""
    return sums.new_empty(0) if parameter is None else sums.to(parameter.dtype, copy=True)


def _fake_global_sums(input: Tensor, group: str) -> Tensor:  # noqa: A002
    return input.new_empty(2 * input.shape[1] + 1, dtype=torch.float64)


def _fake_normalize_(input: Tensor, *others: Any) -> tuple[Tensor, Tensor]:  # noqa: A002
    return torch.empty_like(input), _fake_global_sums(input, "")


def _fake_backward_sums(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = reference.statistics_dtype(input.dtype)
    sums = input.new_empty(2 * input.shape[1], dtype=dtype)
    grad_weight, grad_bias = (
        sums.new_empty(0) if t is None else torch.empty_like(t) for t in (weight, bias)
    )
    return sums, grad_weight, grad_bias


def _fake_backward_input(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    statistics: Tensor,
    sums: Tensor,
    activation: str,
    negative_slope: float,
) -> tuple[Tensor, Tensor]:
    if residual is None or activation == "none":
        return torch.empty_like(input), input.new_empty(0)
    return torch.empty_like(input), torch.empty_like(input)


for _name, _kernel, _fake in (
    ("global_sums", _global_sums, _fake_global_sums),
    ("normalize_", _normalize_, _fake_normalize_),
    ("backward_sums", _backward_sums, _fake_backward_sums),
    ("backward_input", _backward_input, _fake_backward_input),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"bnconvert::{_name}", _fake, lib=_library)
