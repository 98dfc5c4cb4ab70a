"""Whole layers and models: against torch's, in CUDA graphs, over NCCL and over staged gloo."""

from __future__ import annotations

import copy
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.timing import launches, wall_seconds
from bnconvert import SyncBatchNorm2d, convert_sync_batchnorm
from bnconvert.kernels import comm
from bnconvert.testing import randomize_batchnorm, run_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.gpu.results import Results

SMALL = ((8, 64, 56), (8, 256, 14), (8, 2048, 7), (32, 256, 14))
GOAL = 2.0


@contextmanager
def one_nccl_rank() -> Iterator[None]:
    """Join an NCCL group of one rank, in which layers synchronise all the same."""
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{Path(folder) / 'store'}"
        dist.init_process_group("nccl", init_method=store, rank=0, world_size=1)
        try:
            with comm.forced():
                yield
        finally:
            dist.destroy_process_group()


def whole_layer(results: Results) -> None:
    """Time forward and backward of a layer against torch's synchronised one, NCCL in both."""
    from torch.nn.modules._functions import SyncBatchNorm

    with one_nccl_rank():
        group = dist.group.WORLD
        for batch, channels, side in SMALL:
            x = torch.randn(batch, channels, side, side, device="cuda", dtype=torch.bfloat16)
            x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
            grad = torch.randn_like(x)
            layer = SyncBatchNorm2d(channels, device="cuda")

            def ours(layer: nn.Module = layer, x: Tensor = x, grad: Tensor = grad) -> object:
                return torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)

            def theirs(layer: Any = layer, x: Tensor = x, grad: Tensor = grad) -> object:
                layer.num_batches_tracked.add_(1)
                out = SyncBatchNorm.apply(
                    x,
                    layer.weight,
                    layer.bias,
                    layer.running_mean,
                    layer.running_var,
                    layer.eps,
                    layer.momentum,
                    group,
                    1,
                )
                return torch.autograd.grad(out, (x, layer.weight, layer.bias), grad)

            times = wall_seconds(ours), wall_seconds(theirs)
            results.row(
                "whole layer",
                shape=f"{batch}x{channels}x{side}x{side}",
                us=round(1e6 * times[0], 1),
                torch_us=round(1e6 * times[1], 1),
                speedup=round(times[1] / times[0], 2),
                launches=launches(ours),
                torch_launches=launches(theirs),
            )
    least = min(row["speedup"] for row in results.data["rows"]["whole layer"])
    results.check(
        f"goal: whole layer at small batch >= {GOAL}x torch.nn.SyncBatchNorm",
        least >= GOAL,
        f"{least}x at least",
    )


def agrees_over_nccl(results: Results) -> None:
    """Compare a layer that reduces over NCCL with float64."""
    with one_nccl_rank():
        for dtype in (torch.float32, torch.bfloat16):
            stock = nn.BatchNorm2d(65, device="cuda")
            randomize_batchnorm(stock)
            layer = convert_sync_batchnorm(copy.deepcopy(stock))
            x = torch.randn(16, 65, 7, 7, device="cuda").to(dtype)
            error = _difference(layer, stock.double(), x)
            limit = 2e-5 if dtype == torch.float32 else 3e-2
            results.check(f"NCCL with one rank, {dtype}", error < limit, f"difference {error:.1e}")


def _difference(layer: nn.Module, exact: nn.Module, x: Tensor) -> float:
    """Return the largest difference of output and input gradient of a training step."""
    grad = torch.randn_like(x)
    leaf, exact_leaf = x.clone().requires_grad_(), x.double().requires_grad_()
    output, expected = layer(leaf), exact(exact_leaf)
    (actual,) = torch.autograd.grad(output, leaf, grad)
    (wanted,) = torch.autograd.grad(expected, exact_leaf, grad.double())
    pairs = ((output, expected), (actual, wanted))
    return max((a.double() - b).abs().max().item() for a, b in pairs)


def never_waits(results: Results) -> None:
    """Run a step in the mode in which torch raises at every synchronisation with the host."""
    with one_nccl_rank():
        layer = SyncBatchNorm2d(64, momentum=None, device="cuda")
        x = torch.randn(8, 64, 14, 14, device="cuda", requires_grad=True)
        grad = torch.randn_like(x)
        torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)  # compiles and loads
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad(layer(x), (x, *layer.parameters()), grad)
            passed, detail = True, ""
        except RuntimeError as error:
            passed, detail = False, str(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    results.check("a step never waits for the device", passed, detail)


def captured(results: Results) -> None:
    """Capture a training step in a CUDA graph; replaying it must equal running it."""
    with one_nccl_rank():
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64), nn.ReLU())
        eager = convert_sync_batchnorm(layers.cuda())
        graphed = copy.deepcopy(eager)
        x = torch.randn(4, 8, 16, 16, device="cuda")

        def step(model: nn.Module) -> None:
            model.zero_grad(set_to_none=False)
            torch.autograd.backward(model(x).square().mean())

        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                step(graphed)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(graphed)
        for _ in range(4):
            x.copy_(torch.randn_like(x))
            graph.replay()
        for _ in range(7):
            step(eager)
        torch.cuda.synchronize()
        pairs = zip(eager.parameters(), graphed.parameters(), strict=True)
        # The last step had the same input and, in training, no memory of those before.
        error = max((a.grad - b.grad).abs().max().item() for a, b in pairs)  # type: ignore[operator]
        tracked = int(graphed.state_dict()["1.num_batches_tracked"])
    results.check("CUDA graph of a training step", error < 1e-5, f"difference {error:.1e}")
    results.check("CUDA graph counts batches", tracked == 7, f"{tracked} of 7")


def staged_rank(rank: int, sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Train a step on this rank's part of a batch; gloo carries the statistics."""
    stock = nn.BatchNorm2d(65)
    randomize_batchnorm(stock)
    layer = convert_sync_batchnorm(stock).cuda()
    x, grad = (torch.split(t, list(sizes))[rank] for t in staged_batch(sum(sizes)))
    leaf = x.cuda().requires_grad_()
    output = layer(leaf)
    (grad_input,) = torch.autograd.grad(output, leaf, grad.cuda())
    return output.detach().cpu(), grad_input.cpu(), layer.state_dict()["running_var"].cpu()


def staged_batch(rows: int) -> tuple[Tensor, Tensor]:
    """Return the same input and gradient in every process."""
    generator = torch.Generator().manual_seed(3)
    x, grad = (torch.randn(rows, 65, 7, 7, generator=generator) for _ in range(2))
    return x, grad


def agrees_over_gloo(results: Results) -> None:
    """Compare two processes on this GPU with one layer on the whole batch in float64."""
    sizes = (5, 3)
    ranks = run_ranks(staged_rank, 2, sizes, timeout=150.0)
    exact = nn.BatchNorm2d(65)
    randomize_batchnorm(exact)
    exact = exact.double()
    x, grad = (t.double() for t in staged_batch(sum(sizes)))
    leaf = x.requires_grad_()
    output = exact(leaf)
    (wanted,) = torch.autograd.grad(output, leaf, grad)
    pairs = [
        (torch.cat([rank[0] for rank in ranks]), output),
        (torch.cat([rank[1] for rank in ranks]), wanted),
        *((rank[2], exact.state_dict()["running_var"]) for rank in ranks),
    ]
    error = max((a.double() - b).abs().max().item() for a, b in pairs)
    results.check("two processes, gloo staged", error < 2e-5, f"difference {error:.1e}")


def resnet50(results: Results) -> None:
    """Time a ResNet-50 training step: plain BatchNorm, ours over NCCL, and torch's over NCCL."""
    import timm

    with one_nccl_rank():
        model = timm.create_model("resnet50").cuda().to(memory_format=torch.channels_last)
        x = torch.randn(64, 3, 224, 224, device="cuda").contiguous(
            memory_format=torch.channels_last
        )
        target = torch.randint(1000, (64,), device="cuda")

        def step(network: nn.Module) -> Callable[[], None]:
            def run() -> None:
                with torch.autocast("cuda", torch.bfloat16):
                    loss = nn.functional.cross_entropy(network(x), target)
                torch.autograd.backward(loss)

            return run

        plain = wall_seconds(step(model), 10)
        synchronised = wall_seconds(step(convert_sync_batchnorm(model)), 10)
    results.row(
        "ResNet-50 step",
        batch=64,
        plain_ms=round(1e3 * plain, 2),
        ours_ms=round(1e3 * synchronised, 2),
        ratio=round(synchronised / plain, 3),
    )
