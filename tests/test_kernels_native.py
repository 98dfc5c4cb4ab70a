"""The kernel sources, run on the CPU by the shim, against float64 arithmetic."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from bnconvert.kernels import native
from bnconvert.kernels.native import Activation
from bnconvert.kernels.variants import ACTIVATIONS, SCALARS, Variant, all_variants, widths
from tests.kernel_support import (
    SLOPE,
    Layer,
    assert_close,
    check,
    make_input,
    make_layer,
    run_float64,
    run_native,
)
from tests.shim.driver import COMPILER, ShimDriver, ShimError, small_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")


@pytest.fixture(autouse=True)
def several_blocks() -> Iterator[None]:
    torch.manual_seed(0)
    with small_blocks():
        yield


LAYOUTS = [
    (dtype, channels_last, width)
    for dtype in SCALARS
    for channels_last in (True, False)
    for width in widths(dtype)
]


@pytest.mark.parametrize(("dtype", "channels_last", "width"), LAYOUTS)
def test_every_variant_agrees_with_float64(
    dtype: torch.dtype, channels_last: bool, width: int
) -> None:
    shape = (4, 5 * width, 3, 3) if channels_last else (4, 3, 5, width)
    if channels_last and width == 1:
        shape = (4, 5, 3, 3)
    driver = ShimDriver(multiprocessors=2)
    for name, residual in itertools.product(ACTIVATIONS, (False, True)):
        check(
            driver,
            [make_input(shape, dtype, channels_last)],
            make_layer(shape[1], dtype),
            Activation(name, SLOPE),
            residual,
        )
    wanted = {
        v
        for v in all_variants()
        if (v.dtype, v.channels_last, v.width) == (dtype, channels_last, width)
    }
    assert set(driver.launched) == wanted


@pytest.mark.parametrize("channels", [1, 3, 65, 100, 1000])
@pytest.mark.parametrize("shape", [(6,), (3, 49), (2, 7, 7), (2, 1, 1), (1, 4, 4)])
def test_any_number_of_channels_and_positions(channels: int, shape: tuple[int, ...]) -> None:
    rows, *spatial = shape
    layouts = (False, True) if len(spatial) == 2 else (False,)
    if channels == 1000 and max(spatial, default=1) > 1:
        rows = 1
    for channels_last in layouts:
        x = make_input((rows, channels, *spatial), channels_last=channels_last)
        check(ShimDriver(), [x], make_layer(channels), Activation("relu"))


def test_three_dimensional_input_in_both_layouts() -> None:
    for channels_last in (False, True):
        x = make_input((2, 6, 2, 3, 5), torch.bfloat16, channels_last)
        check(ShimDriver(), [x], make_layer(6), Activation("silu"))


@pytest.mark.parametrize("channels_last", [False, True])
def test_unequal_and_empty_ranks_together_are_one_batch(channels_last: bool) -> None:
    inputs = [
        make_input((n, 20, 3, 5), torch.float32, channels_last, mean)
        for n, mean in ((3, -4.0), (0, 0.0), (1, 9.0), (2, 1.0))
    ]
    check(ShimDriver(), inputs, make_layer(20), Activation("leaky_relu", SLOPE), residual=True)


def test_rank_without_values_updates_its_running_statistics_alike() -> None:
    inputs = [make_input((0, 5, 3, 3)), make_input((4, 5, 3, 3))]
    check(ShimDriver(), inputs, make_layer(5))


def test_one_value_per_channel_on_each_rank() -> None:
    check(ShimDriver(), [make_input((1, 7)), make_input((1, 7))], make_layer(7))


def test_single_value_keeps_running_var_and_counts_the_batch() -> None:
    layer = make_layer(4)
    before = [t.clone() for t in layer if t is not None]
    x = make_input((1, 4))
    grad = torch.randn(1, 4)
    result = run_native(ShimDriver(), [x], [grad], None, layer, Activation())
    assert layer.running_mean is not None
    torch.testing.assert_close(result.outputs[0][0], before[1])
    torch.testing.assert_close(layer.running_mean, before[2] + 0.1 * (x[0] - before[2]))
    assert layer.running_var is not None
    assert layer.running_var.equal(before[3])
    assert layer.num_batches_tracked == 4
    assert result.grad_inputs[0].abs().max() < 1e-5  # dy - sum_dy, each rounded


def test_no_value_on_any_rank_changes_nothing() -> None:
    layer = make_layer(4)
    before = [t.clone() for t in layer if t is not None]
    empty = make_input((0, 4, 2, 2))
    result = run_native(ShimDriver(), [empty, empty], [empty, empty], None, layer, Activation())
    assert result.outputs[0].shape == result.grad_inputs[0].shape == empty.shape
    assert all(a is not None and a.equal(b) for a, b in zip(layer, before, strict=True))
    assert not result.grad_weights[0].any()
    assert not result.grad_biases[0].any()


@pytest.mark.parametrize("splits", [1, 40])
def test_mean_far_above_the_deviation_keeps_its_digits(splits: int) -> None:
    x = (1000.0 + 0.01 * torch.randn(16, 6, 8, 8)).float()
    for layout in (x, x.contiguous(memory_format=torch.channels_last)):
        layer = make_layer(6)
        assert layer.running_var is not None
        layer.running_var.fill_(1e-4)
        sums = native.local_sums(ShimDriver(splits), layout)
        mean = sums[:6] / sums[-1]
        var = sums[6:12] / sums[-1] - mean.square()
        exact = layout.double().var((0, 2, 3), unbiased=False)
        torch.testing.assert_close(mean, layout.double().mean((0, 2, 3)), rtol=1e-9, atol=0.0)
        torch.testing.assert_close(var, exact, rtol=5e-5, atol=0.0)
        grad = torch.empty_like(layout).normal_()
        expected, _ = run_float64([layout], [grad], None, layer, Activation("relu"))
        actual = run_native(ShimDriver(splits), [layout], [grad], None, layer, Activation("relu"))
        # eps is above the variance here: the output is 0.3 at most.
        assert_close(actual.outputs[0], expected.outputs[0], torch.float32, "output")
        assert_close(actual.grad_inputs[0], expected.grad_inputs[0], torch.float32, "grad", 10.0)


def test_constant_channel_has_exactly_no_variance() -> None:
    x = torch.full((8, 3, 5, 5), 0.1)
    layer = make_layer(3)
    result = run_native(ShimDriver(4), [x], [torch.randn(x.shape)], None, layer, Activation())
    assert layer.bias is not None
    torch.testing.assert_close(result.outputs[0], layer.bias.view(1, 3, 1, 1).expand(x.shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_parameters_and_buffers_of_the_inputs_dtype(dtype: torch.dtype) -> None:
    layer = make_layer(12, dtype)
    layer = layer._replace(
        running_mean=layer.running_mean.to(dtype),  # type: ignore[union-attr]
        running_var=layer.running_var.to(dtype),  # type: ignore[union-attr]
    )
    check(ShimDriver(), [make_input((3, 12, 4, 4), dtype)], layer)


def test_layer_without_parameters_or_buffers() -> None:
    check(ShimDriver(), [make_input((3, 8, 4, 4))], Layer(None, None, None, None, None))


def test_weight_without_bias() -> None:
    layer = make_layer(8)._replace(bias=None)
    check(ShimDriver(), [make_input((3, 8, 4, 4))], layer, Activation("relu"))


def test_cumulative_average_counts_the_batches_before() -> None:
    layer = make_layer(40)
    driver = ShimDriver(2)
    for _ in range(3):
        check(driver, [make_input((3, 40, 4, 4))], layer, momentum=None)
    assert layer.num_batches_tracked == 6


def test_misaligned_memory_is_read_in_narrower_accesses() -> None:
    storage = torch.randn(2 * 16 * 4 * 4 + 2).to(torch.bfloat16)
    x = storage[2:].view(2, 16, 4, 4)
    driver = ShimDriver()
    check(driver, [x], make_layer(16))
    assert {v.width for v in driver.launched} == {2}


@pytest.mark.parametrize("name", ["none", "relu", "leaky_relu", "silu"])
def test_nan_and_infinity_spread_as_in_torch(name: str) -> None:
    x = make_input((4, 4, 3, 3))
    x[0, 1, 0, 0] = float("nan")
    x[0, 2, 0, 0] = float("inf")
    layer = make_layer(4)
    activation = Activation(name, SLOPE)
    grad = torch.randn(x.shape)
    expected, _ = run_float64([x], [grad], None, layer, activation)
    actual = run_native(ShimDriver(), [x], [grad], None, layer, activation)
    assert actual.outputs[0].isnan().equal(expected.outputs[0].isnan())
    assert actual.grad_inputs[0].isnan().any((0, 2, 3)).tolist() == [False, True, True, False]


@pytest.mark.parametrize("name", ["silu", "leaky_relu", "relu"])
def test_activation_of_large_values(name: str) -> None:
    layer = make_layer(4)
    layer = layer._replace(
        weight=torch.full((4,), 50.0), bias=torch.tensor([-100.0, 100.0, 0.0, 3.0])
    )
    check(ShimDriver(), [make_input((4, 4, 3, 3))], layer, Activation(name, SLOPE))


@pytest.mark.parametrize("channels_last", [False, True])
def test_any_order_of_threads_and_blocks_gives_the_same_bits(channels_last: bool) -> None:
    x = make_input((6, 20, 9, 8), torch.bfloat16, channels_last)
    grad = torch.empty_like(x).normal_()
    results = []
    for seed in (1, 2, 3):
        layer = Layer(torch.ones(20), torch.ones(20), torch.zeros(20), torch.ones(20), None)
        driver = ShimDriver(multiprocessors=20, seed=seed)
        step = run_native(driver, [x], [grad], None, layer, Activation("silu"))
        results.append([*itertools.chain(*step), *(t for t in layer if t is not None)])
    for other in results[1:]:
        assert all(a.equal(b) for a, b in zip(results[0], other, strict=True))


def test_arguments_of_another_size_are_refused() -> None:
    driver = ShimDriver()
    variant = Variant("stats", torch.float32, True, 4)
    with pytest.raises(ShimError, match="88 bytes given, 96 expected"):
        driver.launch(variant, (1, 1), (1, 1), 1024, b"\0" * 88)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"input": torch.zeros(2, 3).double()}, "not float64"),
        ({"input": torch.zeros(1, 1, 1).expand(1, 3, 2**31)}, "at most 2147483647 positions"),
        ({"weight": torch.ones(3).half()}, "not float16"),
        ({"bias": torch.ones(3).bfloat16()}, "not bfloat16"),
        ({"running_var": torch.ones(3).double()}, "of one dtype"),
        ({"weight": torch.ones(6)[::2]}, "contiguous"),
        ({}, ""),
    ],
)
def test_unsupported_tensors_are_named(tensors: dict[str, Tensor], reason: str) -> None:
    arguments = {
        "input": torch.zeros(2, 3),
        "weight": torch.ones(3),
        "bias": torch.ones(3),
        "running_mean": torch.ones(3),
        "running_var": torch.ones(3),
    }
    actual = native.unsupported(**(arguments | tensors))
    assert reason in actual
    assert bool(actual) == bool(reason)
