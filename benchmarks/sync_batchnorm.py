"""Speed of the CPU path of synchronised batch normalization: forward and backward.

One process, one thread: our operators against `F.batch_norm` and against the usual composition of
mean and variance. Two gloo ranks: the layer against a naive synchronised one in the style of
detectron2, which averages the means and mean squares of the ranks with a differentiable all-reduce.
Medians of interleaved runs; ratios of the same run. What ran before fills the caches and decides
how memory is allocated: so each ratio is taken from the two that it compares alone, in both orders,
and a depthwise convolution runs before each, as in a network.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bnconvert import SyncBatchNorm2d
from bnconvert.kernels import reference
from bnconvert.report import format_table
from bnconvert.testing import run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable

SHAPES = (
    (8, 64, 56, 56),
    (8, 128, 28, 28),
    (8, 256, 14, 14),
    (8, 512, 7, 7),
    (2, 32, 112, 112),
    (16, 96, 14, 14),
    (4, 24, 56, 56),
    (32, 1280, 7, 7),
)


def ours(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> None:
    """Forward and backward as the operators run them in one rank, the collectives left out."""
    with torch._C._AutoDispatchBelowAutograd():  # the state in which torch calls an operator
        moments = reference.finalize(reference.local_sums(x))
        mean, var, count = reference.parts(moments)
        reference.normalize(x, weight, bias, mean, var.add_(1e-5).rsqrt_())
        mean, invstd, _ = reference.parts(moments.float())
        sums = reference.backward_sums(grad, x, mean, invstd)
        reference.backward_input(grad, x, weight, mean, invstd, sums, count)


def stock(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> None:
    """Forward and backward of torch's own batch normalization."""
    leaf = x.detach().requires_grad_()
    F.batch_norm(leaf, None, None, weight, bias, True, 0.1, 1e-5).backward(grad)


def composition(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> None:
    """Forward and backward of mean and variance written with tensor operations."""
    leaf = x.detach().requires_grad_()
    mean = leaf.mean((0, 2, 3), keepdim=True)
    var = (leaf * leaf).mean((0, 2, 3), keepdim=True) - mean * mean
    scale = (var + 1e-5).rsqrt() * weight.view(1, -1, 1, 1)
    (leaf * scale + (bias.view(1, -1, 1, 1) - mean * scale)).backward(grad)


def medians(
    candidates: dict[str, Callable[[], None]],
    rounds: int,
    before: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Return the median CPU seconds of each candidate, run in turn, in this order and reversed.

    Args:
        candidates: What is measured, by name.
        rounds: How often each is measured.
        before: Runs before each of them.
    """
    times: dict[str, list[float]] = {name: [] for name in candidates}
    order = list(candidates)
    for turn in range(rounds + 1):
        for name in order if turn % 2 else reversed(order):
            before()
            start = time.thread_time()
            candidates[name]()
            if turn:  # the first turn warms up
                times[name].append(time.thread_time() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def tensors(shape: tuple[int, ...], layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return input, weight, bias and output gradient."""
    memory = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    x = torch.randn(shape).contiguous(memory_format=memory)
    weight = torch.randn(shape[1], requires_grad=True)
    bias = torch.randn(shape[1], requires_grad=True)
    return x, weight, bias, torch.randn(shape).contiguous(memory_format=memory)


def single_process(rounds: int) -> list[dict[str, Any]]:
    """Measure every shape and layout in this process."""
    rows = []
    for shape in SHAPES:
        for layout in ("NCHW", "channels_last"):
            args = tensors(shape, layout)
            x, weight, bias, grad = (tensor.detach() for tensor in args)
            kernel = torch.randn(shape[1], 1, 3, 3)
            convolution = functools.partial(F.conv2d, x, kernel, padding=1, groups=shape[1])
            our_run = functools.partial(ours, x, weight, bias, grad)
            row = {"shape": list(shape), "layout": layout}
            for name, peer in (("F.batch_norm", stock), ("composition", composition)):
                pair = {"ours": our_run, name: functools.partial(peer, *args)}
                found = medians(pair, rounds, convolution)
                row |= {name: found[name], f"ours beside {name}": found["ours"]}
            rows.append(row)
    return rows


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values)
        return values

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class NaiveSync(nn.BatchNorm2d):
    """Averages mean and mean of squares over ranks with a differentiable all-reduce."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        """Normalize with statistics averaged over ranks."""
        mean = input.mean((0, 2, 3))
        squares = (input * input).mean((0, 2, 3))
        both = _AllReduceSum.apply(torch.cat((mean, squares))) / dist.get_world_size()
        mean, squares = both.chunk(2)
        var = squares - mean * mean
        scale = self.weight * (var + self.eps).rsqrt()
        shift = self.bias - mean * scale
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var, self.momentum)
        return input * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


def two_ranks(rank: int, rounds: int) -> list[dict[str, Any]]:
    """Measure whole layers on two gloo ranks; run in every rank."""
    torch.set_num_threads(1)
    rows = []
    for shape in SHAPES:
        x, _, _, grad = tensors(shape, "NCHW")
        layers = {"ours": SyncBatchNorm2d(shape[1]), "naive": NaiveSync(shape[1])}

        def run(layer: nn.Module, x: Tensor = x, grad: Tensor = grad) -> None:
            layer(x.detach().requires_grad_()).backward(grad)

        found = medians(
            {name: lambda layer=layer, run=run: run(layer) for name, layer in layers.items()},
            rounds,
        )
        rows.append({"shape": list(shape), **found})
    return rows


def times_ours(row: dict[str, Any], peer: str) -> float:
    """Return the time of a peer over ours, of the turns that they took together."""
    ratio: float = row[peer] / row[f"ours beside {peer}"]
    return ratio


def geometric_mean(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=36)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    alone = single_process(options.rounds)
    together = run_ranks(two_ranks, 2, options.rounds, timeout=600.0)[0]
    summary = {
        "ours / F.batch_norm": geometric_mean([1.0 / times_ours(r, "F.batch_norm") for r in alone]),
        "composition / ours": geometric_mean([times_ours(r, "composition") for r in alone]),
        "naive / ours, 2 ranks": geometric_mean([r["naive"] / r["ours"] for r in together]),
    }
    if options.json:
        print(json.dumps({"one process": alone, "two ranks": together, "summary": summary}))
        return
    rows: list[tuple[str, ...]] = [
        ("shape", "layout", "ours ms", "ours/F.batch_norm", "composition/ours")
    ]
    rows += [
        (
            "x".join(map(str, r["shape"])),
            r["layout"],
            f"{1e3 * r['ours beside F.batch_norm']:.2f}",
            f"{1.0 / times_ours(r, 'F.batch_norm'):.2f}",
            f"{times_ours(r, 'composition'):.2f}",
        )
        for r in alone
    ]
    print("one process, one thread, forward + backward, float32")
    print("\n".join(format_table(rows)))
    print("two gloo ranks, whole layer, forward + backward, float32")
    rows = [("shape", "ours ms", "naive/ours")]
    for r in together:
        ratio = f"{r['naive'] / r['ours']:.2f}"
        rows.append(("x".join(map(str, r["shape"])), f"{1e3 * r['ours']:.2f}", ratio))
    print("\n".join(format_table(rows)))
    for name, value in summary.items():
        print(f"geometric mean {name}: {value:.2f}")


if __name__ == "__main__":
    main()
