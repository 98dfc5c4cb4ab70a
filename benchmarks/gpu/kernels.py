"""Our four kernels and torch's, alone: numbers against float64, and bandwidth."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu.timing import copies, device_seconds
from bnconvert.kernels import native, selection
from bnconvert.kernels.native import Activation
from bnconvert.kernels.variants import SCALARS, all_variants, widths
from bnconvert.testing import TOLERANCES

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.gpu.results import Results

EPS = 1e-5
BATCH = 128
RESNET50 = (
    (64, 112),
    (64, 56),
    (256, 56),
    (128, 28),
    (512, 28),
    (256, 14),
    (1024, 14),
    (512, 7),
    (2048, 7),
)
"""Channels and side of the normalized tensors, by size."""

LARGE_BYTES = 32 << 20
GOALS = {
    "bandwidth": 0.85,
    "stats": 1.5,
    "relu": 1.3,
}


def numerics(results: Results) -> None:
    """Compare every variant with float64 on the device."""
    driver = own_driver()
    torch.manual_seed(0)
    launched = set()
    worst: dict[str, float] = {}
    for dtype in SCALARS:
        for channels_last in (True, False):
            for width in widths(dtype):
                shape = (6, 5 * width, 9, 9) if channels_last else (6, 7, 5, width)
                if results.seconds_left < 60:
                    results.skip("numerics", "no time left")
                    return
                for name in ("none", "relu", "leaky_relu", "silu"):
                    for residual in (False, True):
                        case = f"{dtype} {'NHWC' if channels_last else 'NCHW'} width {width}"
                        error = largest_error(driver, shape, dtype, channels_last, name, residual)
                        worst[case] = max(worst.get(case, 0.0), error)
                        launched.add((dtype, channels_last, width, name, residual))
    for case, error in worst.items():
        results.check(f"numerics {case}", error <= 1.0, f"{error:.2f} of the tolerance")
    results.fact("variants", f"{len(all_variants())}, in {len(launched)} training steps")


def own_driver() -> Any:
    """Return the driver of our kernels on the current device."""
    device = torch.device("cuda", torch.cuda.current_device())
    choice = selection.choose(device)
    if choice.kernels != "own":
        raise RuntimeError(f"our kernels do not run here: {choice.reason}")
    return selection.drivers[device]


def first_launch(results: Results) -> None:
    """Keep the time from nothing to the result of one kernel: compiling or finding it, loading."""
    start = time.perf_counter()
    native.local_sums(own_driver(), torch.randn(8, 64, 8, 8, device="cuda"))
    torch.cuda.synchronize()
    results.fact("first launch in s", round(time.perf_counter() - start, 2))


def largest_error(
    driver: Any,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    channels_last: bool,
    name: str,
    residual: bool,
) -> float:
    """Return the largest difference of a step, in tolerances of the dtype; NaN as infinity."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    tensors = [
        torch.randn(shape, device="cuda").to(dtype).contiguous(memory_format=layout)
        for _ in range(3)
    ]
    x, grad, added = tensors
    weight, bias = torch.randn(2, shape[1], device="cuda").unbind()
    weight, bias = weight.contiguous(), bias.contiguous()
    activation = Activation(name, 0.125)
    kept = added if residual else None
    sums = native.local_sums(driver, x)
    output, statistics = native.normalize_(
        driver, x, kept, weight, bias, sums, None, None, None, 0.1, EPS, activation
    )
    rest = (x, kept, weight, bias, statistics)
    reduced, grad_weight, grad_bias = native.backward_sums(driver, grad, *rest, activation)
    grad_input, grad_residual = native.backward_input(driver, grad, *rest, reduced, activation)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    z = F.batch_norm(leaves[0], None, None, leaves[1], leaves[2], True, 0.1, EPS)
    leaves.append(added.double().requires_grad_())
    if residual:
        z = z + leaves[3]
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "none": lambda t: t,
        "relu": F.relu,
        "leaky_relu": lambda t: F.leaky_relu(t, 0.125),
        "silu": F.silu,
    }
    expected = known[name](z)
    exact = torch.autograd.grad(expected, leaves, grad.double(), materialize_grads=True)
    rows = x.numel() / shape[1]
    pairs = (
        (output, expected, 1.0),
        (grad_input, exact[0], 1.0),
        (grad_weight, exact[1], rows**0.5),
        (grad_bias, exact[2], rows**0.5),
        *(((grad_residual, exact[3], 1.0),) if grad_residual.numel() else ()),
    )
    return max(_in_tolerances(*pair) for pair in pairs)


def _in_tolerances(actual: Tensor, expected: Tensor, scale: float) -> float:
    tolerance = TOLERANCES[actual.dtype]
    allowed = tolerance.atol * scale + tolerance.rtol * expected.abs()
    ratio = ((actual.double() - expected).abs() / allowed).max().item()
    return ratio if ratio == ratio else float("inf")


@dataclass
class Tensors:
    """One layer's tensors."""

    x: Tensor
    grad: Tensor
    weight: Tensor
    bias: Tensor
    mean: Tensor
    invstd: Tensor
    sums: Tensor
    statistics: Tensor
    reduced: Tensor
    count: Tensor


def make(shape: tuple[int, ...], dtype: torch.dtype, layout: torch.memory_format) -> Tensors:
    """Return random tensors of a layer and the statistics that go with them."""
    x, grad = (
        torch.randn(shape, device="cuda", dtype=dtype).contiguous(memory_format=layout)
        for _ in range(2)
    )
    channels = shape[1]
    weight, bias = (torch.randn(channels, device="cuda") for _ in range(2))
    mean, invstd = torch.batch_norm_stats(x, EPS)
    driver = own_driver()
    sums = native.local_sums(driver, x)
    _, statistics = native.normalize_(
        driver, x, None, weight, bias, sums, None, None, None, 0.1, EPS, Activation()
    )
    count = torch.tensor([x.numel() // channels], device="cuda", dtype=torch.int32)
    reduced = torch.randn(2 * channels, device="cuda")
    return Tensors(x, grad, weight, bias, mean, invstd, sums, statistics, reduced, count)


class Pass(NamedTuple):
    """One pass over the tensors of a layer."""

    tensors: int  # that it has to move
    ours: Callable[[], object]
    torch: Callable[[], object]


def passes(t: Tensors, relu: bool) -> dict[str, Pass]:
    """Return the passes by kernel."""
    driver = own_driver()
    activation = Activation("relu") if relu else Activation()
    rest = (t.x, None, t.weight, t.bias, t.statistics)
    sum_dy, sum_dy_xmu = t.reduced.chunk(2)
    threshold = torch.ops.aten.threshold_backward

    def torch_normalize() -> Tensor:
        out = torch.batch_norm_elemt(t.x, t.weight, t.bias, t.mean, t.invstd, EPS)
        return out.relu_() if relu else out

    def torch_grad() -> Tensor:
        return threshold(t.grad, t.x, 0.0) if relu else t.grad

    return {
        "stats": Pass(
            1,
            lambda: native.local_sums(driver, t.x),
            lambda: torch.batch_norm_stats(t.x, EPS),
        ),
        "normalize": Pass(
            2,
            lambda: native.normalize_(
                driver, t.x, None, t.weight, t.bias, t.sums, None, None, None, 0.1, EPS, activation
            ),
            torch_normalize,
        ),
        "backward_reduce": Pass(
            2,
            lambda: native.backward_sums(driver, t.grad, *rest, activation),
            lambda: torch.batch_norm_backward_reduce(
                torch_grad(), t.x, t.mean, t.invstd, t.weight, True, True, True
            ),
        ),
        "backward_input": Pass(
            3,
            lambda: native.backward_input(driver, t.grad, *rest, t.reduced, activation),
            # With ReLU, torch's mask is computed once, in the pass before.
            lambda: torch.batch_norm_backward_elemt(
                t.grad, t.x, t.mean, t.invstd, t.weight, sum_dy, sum_dy_xmu, t.count
            ),
        ),
    }


def bandwidth(results: Results) -> None:
    """Time the four passes of ResNet-50's layers, ours and torch's, with and without ReLU."""
    copy = float(results.data["facts"]["copy bandwidth in GB/s"])
    for dtype in (torch.bfloat16, torch.float32):
        for layout in (torch.channels_last, torch.contiguous_format):
            for channels, side in RESNET50:
                if results.seconds_left < 150:
                    results.skip("bandwidth of the other layers", "no time left")
                    return
                _layer(results, (BATCH, channels, side, side), dtype, layout, copy)
    _goals(results)


def _layer(
    results: Results,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    layout: torch.memory_format,
    copy: float,
) -> None:
    size = torch.Size(shape).numel() * dtype.itemsize
    sets = [make(shape, dtype, layout) for _ in range(copies(size))]
    place = {
        "shape": "x".join(map(str, shape)),
        "dtype": str(dtype).removeprefix("torch."),
        "layout": "NHWC" if layout == torch.channels_last else "NCHW",
        "MB": round(size / 1e6, 1),
    }
    for relu in (False, True):
        kinds = [passes(t, relu) for t in sets]
        for name in kinds[0]:
            if relu and name == "stats":
                continue
            moved = kinds[0][name].tensors * size
            ours = device_seconds([kind[name].ours for kind in kinds])
            theirs = device_seconds([kind[name].torch for kind in kinds])
            results.row(
                "bandwidth",
                **place,
                kernel=name,
                relu=relu,
                GBps=round(moved / ours / 1e9),
                share=round(moved / ours / 1e9 / copy, 3),
                us=round(1e6 * ours, 1),
                torch_us=round(1e6 * theirs, 1),
                speedup=round(theirs / ours, 2),
            )
    calls = [_functional(t) for t in sets]
    results.row("F.batch_norm", **place, us=round(1e6 * device_seconds(calls), 1))


def _functional(t: Tensors) -> Callable[[], object]:
    leaf = t.x.detach().requires_grad_()
    weight = t.weight.detach().requires_grad_()
    bias = t.bias.detach().requires_grad_()

    def step() -> object:
        out = F.batch_norm(leaf, None, None, weight, bias, True, 0.1, EPS)
        return torch.autograd.grad(out, (leaf, weight, bias), t.grad)

    return step


def _goals(results: Results) -> None:
    """Say whether the goals on layers above 32 MB are met."""
    rows = [row for row in results.data["rows"]["bandwidth"] if row["MB"] * 1e6 > LARGE_BYTES]
    plain = [row for row in rows if not row["relu"]]
    for kernel in ("stats", "normalize", "backward_reduce", "backward_input"):
        least = min(row["share"] for row in plain if row["kernel"] == kernel)
        results.check(
            f"goal: {kernel} >= {GOALS['bandwidth']:.0%} of the copy bandwidth above 32 MB",
            least >= GOALS["bandwidth"],
            f"{least:.0%} at least",
        )
    stats = [r["speedup"] for r in plain if r["kernel"] == "stats" and r["dtype"] == "bfloat16"]
    results.check(
        f"goal: stats >= {GOALS['stats']}x torch's in bfloat16",
        min(stats) >= GOALS["stats"],
        f"{min(stats)}x at least",
    )
    both: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        if row["relu"] or row["kernel"] == "stats":
            place = both.setdefault((row["shape"], row["dtype"], row["layout"]), [0.0, 0.0])
            place[0] += row["us"]
            place[1] += row["torch_us"]
    ratios = [theirs / ours for ours, theirs in both.values()]
    results.check(
        f"goal: BN+ReLU forward and backward >= {GOALS['relu']}x torch's separate kernels",
        min(ratios) >= GOALS["relu"],
        f"{min(ratios):.2f}x at least",
    )
