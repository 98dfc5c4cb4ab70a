"""Layers run by the kernel sources on the CPU and by float64 arithmetic, and their comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bnconvert.kernels import native
from bnconvert.kernels.native import Activation
from bnconvert.testing import TOLERANCES

if TYPE_CHECKING:
    from tests.shim.driver import ShimDriver


EPS = 1e-3
SLOPE = 0.125
PLAIN = Activation()


class Layer(NamedTuple):
    """Parameters and buffers of a layer, with random values that hide no mistake."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None


def make_layer(channels: int, dtype: torch.dtype = torch.float32) -> Layer:
    weight = torch.randn(channels)
    weight[::5] = 0.0
    return Layer(
        weight.to(dtype),
        torch.randn(channels).to(dtype),
        torch.randn(channels),
        torch.rand(channels) + 0.3,
        torch.tensor(3),
    )


class Results(NamedTuple):
    """What a training step gives, per rank where it differs."""

    outputs: list[Tensor]
    grad_inputs: list[Tensor]
    grad_residuals: list[Tensor]
    grad_weights: list[Tensor]
    grad_biases: list[Tensor]


def run_native(
    driver: ShimDriver,
    inputs: list[Tensor],
    grads: list[Tensor],
    residuals: list[Tensor] | None,
    layer: Layer,
    activation: Activation,
    momentum: float | None = 0.1,
) -> Results:
    """Train one step on some ranks; the first one's running statistics are those of `layer`."""
    added: list[Tensor | None] = [None] * len(inputs) if residuals is None else [*residuals]
    sums = torch.stack([native.local_sums(driver, x) for x in inputs]).sum(0)
    results = Results([], [], [], [], [])
    kept = []
    for rank, (x, residual) in enumerate(zip(inputs, added, strict=True)):
        running = layer[2:] if rank == 0 else [t if t is None else t.clone() for t in layer[2:]]
        output, statistics = native.normalize_(
            driver,
            x,
            residual,
            layer.weight,
            layer.bias,
            sums,
            running[0],
            running[1],
            running[2],
            momentum,
            EPS,
            activation,
        )
        results.outputs.append(output)
        kept.append(statistics)
    backward = []
    for x, grad, residual, statistics in zip(inputs, grads, added, kept, strict=True):
        rank_sums, grad_weight, grad_bias = native.backward_sums(
            driver, grad, x, residual, layer.weight, layer.bias, statistics, activation
        )
        backward.append(rank_sums)
        results.grad_weights.append(grad_weight)
        results.grad_biases.append(grad_bias)
    reduced = torch.stack(backward).sum(0)
    for x, grad, residual, statistics in zip(inputs, grads, added, kept, strict=True):
        grad_input, grad_residual = native.backward_input(
            driver, grad, x, residual, layer.weight, layer.bias, statistics, reduced, activation
        )
        results.grad_inputs.append(grad_input)
        without = activation.name == "none"
        results.grad_residuals.append(grad if without else grad_residual)
    return results


def activate(z: Tensor, activation: Activation) -> Tensor:
    return {
        "none": lambda: z,
        "relu": lambda: F.relu(z),
        "leaky_relu": lambda: F.leaky_relu(z, activation.negative_slope),
        "silu": lambda: F.silu(z),
    }[activation.name]()


def run_float64(
    inputs: list[Tensor],
    grads: list[Tensor],
    residuals: list[Tensor] | None,
    layer: Layer,
    activation: Activation,
    momentum: float | None = 0.1,
) -> tuple[Results, Layer]:
    """The same step on the concatenated batch, by torch in float64."""
    x = torch.cat(inputs).double().requires_grad_()
    residual = (
        torch.zeros_like(x) if residuals is None else torch.cat(residuals).double()
    ).detach()
    residual.requires_grad_()
    channels = x.shape[1]
    weight = (torch.ones(channels) if layer.weight is None else layer.weight).double()
    bias = (torch.zeros(channels) if layer.bias is None else layer.bias).double()
    weight.requires_grad_()
    bias.requires_grad_()
    mean, var, count = (None if t is None else t.clone() for t in layer[2:])
    mean, var = (None if t is None else t.double() for t in (mean, var))
    if count is not None:
        count += 1
        momentum = 1.0 / count.item() if momentum is None else momentum
    z = F.batch_norm(x, mean, var, weight, bias, True, momentum or 0.0, EPS)
    output = activate(z + residual, activation)
    sizes = [len(t) for t in inputs]
    outputs = [t.detach() for t in torch.split(output, sizes)]
    grad_weights, grad_biases = [], []
    for index in range(len(sizes)):
        masked = [g if i == index else torch.zeros_like(g) for i, g in enumerate(grads)]
        pair = torch.autograd.grad(
            output, (weight, bias), torch.cat(masked).double(), retain_graph=True
        )
        grad_weights.append(pair[0])
        grad_biases.append(pair[1])
    grad_x, grad_residual = torch.autograd.grad(output, (x, residual), torch.cat(grads).double())
    results = Results(
        outputs,
        list(torch.split(grad_x, sizes)),
        list(torch.split(grad_residual, sizes)),
        grad_weights,
        grad_biases,
    )
    return results, Layer(layer.weight, layer.bias, mean, var, count)


def check(
    driver: ShimDriver,
    inputs: list[Tensor],
    layer: Layer,
    activation: Activation = PLAIN,
    residual: bool = False,
    momentum: float | None = 0.1,
) -> None:
    """Compare a step of the kernels with float64, in everything that it gives."""
    dtype = inputs[0].dtype
    grads = [torch.empty_like(x).normal_() for x in inputs]
    residuals = [torch.empty_like(x).normal_() for x in inputs] if residual else None
    expected, after = run_float64(inputs, grads, residuals, layer, activation, momentum)
    actual = run_native(driver, inputs, grads, residuals, layer, activation, momentum)
    for name in ("outputs", "grad_inputs", *(("grad_residuals",) if residual else ())):
        for rank, pair in enumerate(
            zip(getattr(actual, name), getattr(expected, name), strict=True)
        ):
            assert pair[0].dtype == dtype
            assert pair[0].stride() == inputs[rank].stride()
            assert_close(*pair, dtype, f"{name} of rank {rank}")
    rows = max(1, sum(x[:, 0].numel() for x in inputs))
    for name, parameter in (("grad_weights", layer.weight), ("grad_biases", layer.bias)):
        if parameter is not None:
            for pair in zip(getattr(actual, name), getattr(expected, name), strict=True):
                assert pair[0].dtype == parameter.dtype
                assert_close(pair[0], pair[1], parameter.dtype, name, scale=rows**0.5)
    for running, reference in zip(layer[2:4], after[2:4], strict=True):
        if running is not None and reference is not None:
            assert_close(running, reference, running.dtype, "running statistics")
    assert layer.num_batches_tracked == after.num_batches_tracked


def assert_close(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, what: str, scale: float = 1.0
) -> None:
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(
        actual.double(),
        expected.double(),
        rtol=tolerance.rtol,
        atol=tolerance.atol * scale,
        msg=lambda text: f"{what}: {text}",
    )


def make_input(
    shape: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
    mean: float = 1.0,
) -> Tensor:
    x = (torch.randn(shape) * 2 + mean).to(dtype)
    if not channels_last:
        return x
    return x.contiguous(
        memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    )
