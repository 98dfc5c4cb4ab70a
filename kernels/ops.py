"""Synchronised batch normalization of a tensor, with its gradient: what the layers call.

It is made of four operators, see `operators`: `global_sums` and `normalize_` forward,
`backward_sums` and `backward_input` backward. None of them waits for the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bnconvert.kernels import operators
from bnconvert.kernels.nvrtc import KernelError
from bnconvert.kernels.selection import choose
from bnconvert.kernels.variants import ACTIVATIONS


def synchronized_batch_norm(
    input: Tensor,  # noqa: A002 (torch's name)
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
    group: str,
    *,
    residual: Tensor | None = None,
    activation: str = "none",
    negative_slope: float = 0.0,
) -> Tensor:
    """Normalize with the statistics of the batch of all ranks and update the running ones.

    Every rank of the group has to call this; a rank may hold any number of values, also none.

    Args:
        input: Shape (N, C, *).
        weight: Shape (C,), or None.
        bias: Shape (C,), or None.
        running_mean: Updated in place, shape (C,), or None.
        running_var: Updated in place with the unbiased variance, shape (C,), or None.
        num_batches_tracked: Incremented in place, or None.
        momentum: Weight of this batch in the running statistics; None for the cumulative average.
        eps: Added to the variance.
        group: Name of the process group in torch's registry; "" is the default group.
        residual: Added to the result before the activation, of the shape of `input`.
        activation: Applied last: "none", "relu", "leaky_relu" or "silu".
        negative_slope: Slope below zero, of "leaky_relu".

    Returns:
        The result, in the dtype and layout of the input.

    Raises:
        ValueError: The activation is another one, or the residual has another shape.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    input = dense(input)  # noqa: A001
    if residual is not None:
        if residual.shape != input.shape:
            raise ValueError(
                f"the residual has shape {tuple(residual.shape)}, the input {tuple(input.shape)}"
            )
        residual = laid_out_like(residual.to(input.dtype), input)
    ops = operators.namespace
    with torch.no_grad():
        source = input.detach()
        sums = ops.global_sums(source, group)
        output, statistics = ops.normalize_(
            source,
            None if residual is None else residual.detach(),
            None if weight is None else weight.detach(),
            None if bias is None else bias.detach(),
            sums,
            running_mean,
            running_var,
            num_batches_tracked,
            momentum,
            eps,
            activation,
            negative_slope,
        )
    result: Tensor = _Normalize.apply(
        input, residual, weight, bias, output, statistics, activation, negative_slope, group
    )
    return result


class _Normalize(torch.autograd.Function):
    """Gives an output that is computed already the gradient of synchronised normalization."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # noqa: A002
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        output: Tensor,
        statistics: Tensor,
        activation: str,
        negative_slope: float,
        group: str,
    ) -> Tensor:
        # Marked as changed, so that autograd returns this tensor and not a view of it: activations
        # that come after may work in place.
        ctx.mark_dirty(output)
        # Without an activation, the gradient before it does not depend on what was added.
        kept = None if activation == "none" else residual
        ctx.save_for_backward(input, kept, weight, bias, statistics)
        ctx.activation = (activation, negative_slope)
        ctx.group = group
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, residual, weight, bias, statistics = ctx.saved_tensors  # noqa: A001
        for_input, for_residual, for_weight, for_bias = ctx.needs_input_grad[:4]
        ops = operators.namespace
        grad_output = laid_out_like(grad_output.to(input.dtype), input)
        tensors = (grad_output, input, residual, weight, bias, statistics)
        behind = for_input or (for_residual and residual is not None)
        group = ctx.group if behind else None
        sums, grad_weight, grad_bias = ops.backward_sums(*tensors, *ctx.activation, group)
        grad_input = None
        grad_residual = grad_output
        if behind:
            grad_input, before_activation = ops.backward_input(*tensors, sums, *ctx.activation)
            grad_residual = grad_output if residual is None else before_activation
        return (
            grad_input if for_input else None,
            grad_residual if for_residual else None,
            grad_weight if for_weight else None,
            grad_bias if for_bias else None,
            *[None] * 5,
        )


def dense(input: Tensor) -> Tensor:  # noqa: A002
    """Return the input in a layout that the kernels know: contiguous or channels last."""
    if input.is_contiguous() or _is_channels_last(input):
        return input
    return input.contiguous()


def laid_out_like(grad_output: Tensor, input: Tensor) -> Tensor:  # noqa: A002
    """Return the gradient in the layout of the input, copied only where needed."""
    if grad_output.stride() == input.stride():
        return grad_output
    if _is_channels_last(input) and not input.is_contiguous():
        return grad_output.contiguous(memory_format=_channels_last(input))
    return grad_output.contiguous()


def _channels_last(input: Tensor) -> torch.memory_format:  # noqa: A002
    return torch.channels_last if input.dim() == 4 else torch.channels_last_3d


def _is_channels_last(input: Tensor) -> bool:  # noqa: A002
    return input.dim() in (4, 5) and input.is_contiguous(memory_format=_channels_last(input))


def fuses_activations(device_type: str) -> bool:
    """Whether the kernels of a kind of device apply an activation in the pass that normalizes."""
    return choose(torch.device(device_type)).kernels == "own"


# As in `comm`: a constant to torch.compile.
fuses_activations._dynamo_marked_constant = True  # type: ignore[attr-defined]


def selection() -> dict[str, str]:
    """Return, for each kind of device, which kernels run there and why."""
    chosen = {"CPU": _chosen("cpu"), "CUDA": "none: there is no CUDA device"}
    if torch.cuda.is_available():
        chosen["CUDA"] = _chosen("cuda")
    return chosen


def _chosen(device_type: str) -> str:
    try:
        choice = choose(torch.device(device_type))
    except KernelError as error:
        return f"none: {error}"
    return f"{choice.kernels}: {choice.reason}"
