"""Operators of synchronised batch normalization, and the one place that chooses their kernels.

`synchronized_batch_norm` is what the layers call. It is made of five operators in the `bnconvert`
namespace: `local_sums`, `all_reduce_` and `normalize_` forward; `backward_sums`, `all_reduce_` and
`backward_input` backward. Each has a fake kernel, so that a training step compiles in one graph,
and none of them waits for the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bnconvert.kernels import aten_cuda, comm, reference

if TYPE_CHECKING:
    from collections.abc import Callable

_library = torch.library.Library("bnconvert", "DEF")  # type: ignore[no-untyped-call]
_define: Callable[[str], object] = _library.define
_define("local_sums(Tensor input) -> Tensor")
_define("all_reduce_(Tensor(a!) buffer, str group) -> ()")
_define(
    "normalize_(Tensor input, Tensor? weight, Tensor? bias, Tensor sums, Tensor(a!)? running_mean, "
    "Tensor(b!)? running_var, Tensor(c!)? num_batches_tracked, float? momentum, float eps) "
    "-> (Tensor output, Tensor mean, Tensor invstd, Tensor count)"
)
_define("backward_sums(Tensor grad_output, Tensor input, Tensor mean, Tensor invstd) -> Tensor")
_define(
    "backward_input(Tensor grad_output, Tensor input, Tensor? weight, Tensor mean, Tensor invstd, "
    "Tensor sums, Tensor count) -> Tensor"
)


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

    Returns:
        The normalized input, in its dtype and layout.
    """
    input = dense(input)  # noqa: A001
    ops = torch.ops.bnconvert
    with torch.no_grad():
        source = input.detach()
        sums = ops.local_sums(source)
        ops.all_reduce_(sums, group)
        output, mean, invstd, count = ops.normalize_(
            source,
            None if weight is None else weight.detach(),
            None if bias is None else bias.detach(),
            sums,
            running_mean,
            running_var,
            num_batches_tracked,
            momentum,
            eps,
        )
    result: Tensor = _Normalize.apply(input, weight, bias, output, mean, invstd, count, group)
    return result


class _Normalize(torch.autograd.Function):
    """Gives an output that is computed already the gradient of synchronised normalization."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,  # noqa: A002
        weight: Tensor | None,
        bias: Tensor | None,
        output: Tensor,
        mean: Tensor,
        invstd: Tensor,
        count: Tensor,
        group: str,
    ) -> Tensor:
        # Marked as changed, so that autograd returns this tensor and not a view of it: activations
        # that come after may work in place.
        ctx.mark_dirty(output)
        ctx.save_for_backward(input, weight, mean, invstd, count)
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.group = group
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, invstd, count = ctx.saved_tensors  # noqa: A001
        ops = torch.ops.bnconvert
        grad_output = laid_out_like(grad_output, input)
        sums = ops.backward_sums(grad_output, input, mean, invstd)
        grad_bias, grad_weight = sums.chunk(2)
        grad_weight = grad_weight.to(weight.dtype, copy=True) if ctx.needs_input_grad[1] else None
        grad_bias = grad_bias.to(ctx.bias_dtype, copy=True) if ctx.needs_input_grad[2] else None
        grad_input = None
        if ctx.needs_input_grad[0]:
            ops.all_reduce_(sums, ctx.group)
            grad_input = ops.backward_input(grad_output, input, weight, mean, invstd, sums, count)
        return grad_input, grad_weight, grad_bias, None, None, None, None, None


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


def _backend(input: Tensor) -> Any:  # noqa: A002
    """Return the module whose functions run on this tensor: the order of fallback, said once."""
    return aten_cuda if input.is_cuda else reference


def selection() -> dict[str, str]:
    """Return, for each kind of device, which kernels would run there and why."""
    there = torch.cuda.is_available()
    return {
        "CPU": "reference: ATen operators",
        "CUDA": "aten_cuda: the kernels of torch" if there else "none: there is no CUDA device",
    }


def _local_sums(input: Tensor) -> Tensor:  # noqa: A002
    sums: Tensor = _backend(input).local_sums(input)
    return sums


def _normalize_(
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    bias: Tensor | None,
    sums: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    mean, var, count = reference.finalize(sums, input.dtype)
    reference.update_running_stats(
        mean, var, count, running_mean, running_var, num_batches_tracked, momentum
    )
    dtype = reference.statistics_dtype(input.dtype)
    output = _backend(input).normalize(input, weight, bias, mean, var, eps)
    return output, mean.to(dtype), (var + eps).rsqrt().to(dtype), count.clone()


def _backward_sums(grad_output: Tensor, input: Tensor, mean: Tensor, invstd: Tensor) -> Tensor:  # noqa: A002
    sums: Tensor = _backend(input).backward_sums(grad_output, input, mean, invstd)
    return sums


def _backward_input(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor,
    count: Tensor,
) -> Tensor:
    grad_input: Tensor = _backend(input).backward_input(
        grad_output, input, weight, mean, invstd, sums, count
    )
    return grad_input


def _fake_local_sums(input: Tensor) -> Tensor:  # noqa: A002
    return input.new_empty(2 * input.shape[1] + 1, dtype=torch.float64)


def _fake_normalize_(
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    bias: Tensor | None,
    sums: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    num_batches_tracked: Tensor | None,
    momentum: float | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    channels = input.new_empty(input.shape[1], dtype=reference.statistics_dtype(input.dtype))
    count = input.new_empty(1, dtype=torch.float64)
    return torch.empty_like(input), channels, torch.empty_like(channels), count


def _fake_backward_sums(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    mean: Tensor,
    invstd: Tensor,
) -> Tensor:
    return mean.new_empty(2 * input.shape[1])


def _fake_backward_input(
    grad_output: Tensor,
    input: Tensor,  # noqa: A002
    weight: Tensor | None,
    mean: Tensor,
    invstd: Tensor,
    sums: Tensor,
    count: Tensor,
) -> Tensor:
    return torch.empty_like(input)


for _name, _kernel, _fake in (
    ("local_sums", _local_sums, _fake_local_sums),
    ("all_reduce_", comm.all_reduce_, lambda buffer, group: None),
    ("normalize_", _normalize_, _fake_normalize_),
    ("backward_sums", _backward_sums, _fake_backward_sums),
    ("backward_input", _backward_input, _fake_backward_input),
):
    _library.impl(_name, _kernel, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"bnconvert::{_name}", _fake, lib=_library)
