"""Folding exported programs: what only a graph can express, and branches that become one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from bnconvert import BnconvertError, fold_exported
from bnconvert.errors import VerificationError
from bnconvert.fold import plan_fold_exported
from bnconvert.report import Outcome
from bnconvert.testing import randomize_batchnorm
from tests.fold_support import Steps, image

if TYPE_CHECKING:
    from collections.abc import Callable

    from bnconvert.report import Report


def export(model: nn.Module, x: Tensor, **options: Any) -> ExportedProgram:
    torch.manual_seed(0)
    model = model.double().eval()
    randomize_batchnorm(model)
    return torch.export.export(model, (x.double(),), strict=False, **options)


def count(program: ExportedProgram, *names: str) -> int:
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return sum(any(f"aten.{name}." in call for name in names) for call in calls)


def tracked(program: ExportedProgram) -> int:
    """Return the number of instance norms that normalise by running statistics."""
    nodes = program.graph.nodes
    return sum("instance_norm" in str(node.target) and not node.args[5] for node in nodes)


def check_program(
    program: ExportedProgram, x: Tensor, folded: int, left: int = 0, **options: Any
) -> tuple[ExportedProgram, Report]:
    x = x.double()
    nodes = [node.name for node in program.graph.nodes]
    plan = plan_fold_exported(program, **options)
    assert plan.report.count(Outcome.FOLDED) == folded, str(plan)
    assert len(plan.report.left) == left, str(plan)
    result = plan.apply()
    assert [node.name for node in program.graph.nodes] == nodes
    with torch.no_grad():
        torch.testing.assert_close(result.module()(x), program.module()(x), rtol=1e-11, atol=1e-11)
    assert count(result, "batch_norm") + tracked(result) == left
    return result, plan.report


def test_a_program_of_a_dynamic_batch_stays_dynamic() -> None:
    model = nn.Sequential(
        nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.GELU(), nn.BatchNorm2d(4), nn.Flatten()
    )
    model.append(nn.Linear(144, 3))
    program = export(model, image(), dynamic_shapes=({0: Dim.DYNAMIC},))
    result, _ = check_program(program, image(), folded=2)
    x = torch.randn(7, 6, 8, 8, dtype=torch.float64)
    torch.testing.assert_close(result.module()(x), program.module()(x), rtol=1e-11, atol=1e-11)
    assert not any("running" in name or "num_batches" in name for name in result.state_dict)


def functional(x: Tensor, conv: nn.Module, bn: nn.Module, end: nn.Module) -> Any:
    x = F.batch_norm(conv(x), bn.running_mean, bn.running_var, bn.weight, bn.bias, False, 0.1, 1e-3)  # type: ignore[arg-type]
    y = F.relu(F.batch_norm(F.gelu(x), bn.running_mean, bn.running_var), inplace=True)  # type: ignore[arg-type]
    return end(y)


def functional_model() -> Steps:
    return Steps(functional, conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4), end=nn.Conv2d(4, 4, 1))


def test_functional_norms_and_activations_are_folded() -> None:
    result, _ = check_program(export(functional_model(), image()), image(), folded=2)
    assert count(result, "clamp") == 1
    program = export(functional_model(), image())
    check_program(program, image(), folded=1, left=1, rewrite_activations=False)


def test_a_module_called_several_times_is_folded_at_each_call() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module, other: nn.Module) -> Any:
        return bn(conv(bn(conv(x)))) + other(conv(x))

    model = Steps(
        steps,
        conv=nn.Conv2d(6, 6, 3, padding=1),
        bn=nn.BatchNorm2d(6),
        other=nn.BatchNorm2d(6),
    )
    result, _ = check_program(export(model, image()), image(), folded=2)
    assert count(result, "conv2d") == 3


def test_a_decomposed_program_is_folded() -> None:
    model = nn.Sequential(
        nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )
    program = export(model, image()).run_decompositions()
    result, _ = check_program(program, image(), folded=1)
    assert count(result, "_native_batch_norm_legit_no_training") == 0


def test_a_matrix_product_gets_its_shift_as_a_sum() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(6, 4))
            self.bn = nn.BatchNorm1d(4)

        def forward(self, x: Tensor) -> Any:
            return self.bn(x @ self.matrix)

    check_program(export(Product(), torch.randn(5, 6)), torch.randn(5, 6), folded=1)


def test_norms_compose_when_nothing_else_takes_them() -> None:
    model = nn.Sequential(nn.BatchNorm2d(6), nn.BatchNorm2d(6, affine=False), nn.GELU())
    check_program(export(model, image()), image(), folded=1, left=1)


def test_instance_norms_with_running_statistics_are_norms_too() -> None:
    def tracking(channels: int) -> nn.Module:
        norm = nn.InstanceNorm2d(channels, affine=True, track_running_stats=True)
        randomize_batchnorm(norm)
        for tensor in (norm.running_mean, norm.running_var):
            assert tensor is not None
            tensor.uniform_(0.5, 2.0)
        return norm

    torch.manual_seed(0)
    by_instance = nn.InstanceNorm2d(4, affine=True)
    model = nn.Sequential(tracking(6), tracking(6), nn.GELU(), nn.Conv2d(6, 4, 3), tracking(4))
    model.append(by_instance)
    program = export(model, image())
    result, report = check_program(program, image(), folded=2, left=1)
    assert [layer.name for layer in report.left] == ["0"]
    assert count(result, "instance_norm") == 2  # that by the instance is none of ours


def test_a_norm_in_a_no_grad_block_is_folded() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        with torch.no_grad():
            y = bn(conv(x))
        return y * 2

    model = Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4))
    check_program(export(model, image()), image(), folded=1)


def test_a_norm_by_batch_statistics_is_left() -> None:
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    _, report = check_program(export(model, image()), image(), folded=0, left=1)
    assert "no running statistics" in report.left[0].reason


def test_an_in_place_write_into_a_view_is_respected() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        y = conv(x)
        y[:, :2].add_(1.0)
        return bn(y)

    model = Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4))
    _, report = check_program(export(model, image()), image(), folded=0, left=1)
    assert "changed in place" in report.left[0].reason


BRANCHES: dict[str, tuple[Callable[..., Tensor], int]] = {
    "repvgg": (lambda x, a, b, c, bn, g: bn(a(x)) + b(x) + bn(x), 1),
    "residual": (lambda x, a, b, c, bn, g: a(x) + x, 1),
    "difference": (lambda x, a, b, c, bn, g: bn(x - a(x)) - b(x), 1),
    "scales": (lambda x, a, b, c, bn, g: x + g.weight.reshape(-1, 1, 1) * (a(x) - bn(x)), 1),
    "numbers": (lambda x, a, b, c, bn, g: 0 + a(x) * 2.0 - 3 * x + 1.5, 1),
    "zeros": (lambda x, a, b, c, bn, g: a(x) + torch.zeros_like(x) + b(x), 1),
    "norm of a sum": (lambda x, a, b, c, bn, g: bn((a(x) + b(x)) + x), 1),
    "negated": (lambda x, a, b, c, bn, g: bn(-a(x)) - (-x), 1),
    "multiples": (lambda x, a, b, c, bn, g: torch.rsub(torch.add(a(x), b(x), alpha=0.5), x), 1),
    "quotient": (lambda x, a, b, c, bn, g: a(x) / 3 + x / -2, 1),
    "new zeros": (lambda x, a, b, c, bn, g: a(x) + x.new_zeros(x.shape) + b(x), 1),
    "dropped and copied": (
        lambda x, a, b, c, bn, g: F.dropout(a(x), 0.1, False) + b(x).clone().contiguous(),
        1,
    ),
    "same padding": (lambda x, a, b, c, bn, g: c(x) + b(x), 1),
    "no common grid": (lambda x, a, b, c, bn, g: b(x) + c(x), 2),
    "another input": (lambda x, a, b, c, bn, g: a(x) + b(x * 2), 2),
    "read elsewhere": (lambda x, a, b, c, bn, g: (y := a(x)) + b(x) + y.sin(), 2),
}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("kind", BRANCHES)
def test_branches_of_one_input_become_one_convolution(kind: str, groups: int) -> None:
    steps, convolutions = BRANCHES[kind]
    model = Steps(
        steps,
        a=nn.Conv2d(6, 6, 5, padding=4, dilation=2, groups=groups),
        b=nn.Conv2d(6, 6, 1, bias=False, groups=groups),
        c=nn.Conv2d(6, 6, 3, padding=1, groups=groups),
        bn=nn.BatchNorm2d(6),
        g=nn.BatchNorm2d(6),
    )
    if kind == "same padding":
        model.c = nn.Conv2d(6, 6, 3, padding="same", groups=groups)
    if kind == "no common grid":
        model.b = nn.Conv2d(6, 6, (3, 1), padding=(1, 0), groups=groups)
        model.c = nn.Conv2d(6, 6, (1, 3), padding=(0, 1), groups=groups)
    program = export(model, image())
    result, _ = check_program(program, image(), folded=count(program, "batch_norm"))
    assert count(result, "conv2d") == convolutions
    assert (
        count(result, "add", "sub", "mul")
        == {1: 0, 2: count(result, "add", "sub", "mul")}[convolutions]
    )


def test_a_branch_that_is_broadcast_over_positions_does_not_merge() -> None:
    model = Steps(lambda x, a, b: a(x) - b(x), a=nn.Conv2d(6, 4, 1), b=nn.Conv2d(6, 4, 8))
    result, _ = check_program(export(model, image()), image(), folded=0)
    assert count(result, "conv2d") == 2


def test_strided_branches_merge_and_the_residual_does_not() -> None:
    model = Steps(
        lambda x, a, b: a(x) + b(x),
        a=nn.Conv2d(6, 4, 3, stride=2, padding=1),
        b=nn.Conv2d(6, 4, 1, stride=2),
    )
    result, _ = check_program(export(model, image()), image(), folded=0)
    assert count(result, "conv2d") == 1


def test_the_original_program_still_runs_and_wrong_types_are_refused() -> None:
    with pytest.raises(BnconvertError, match="got Conv2d; use fold_batchnorm"):
        fold_exported(nn.Conv2d(1, 1, 1))  # type: ignore[arg-type]


def test_a_failed_proof_names_the_first_operation_that_differs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from bnconvert.fold.sites import Site

    right = Site.new_bias
    monkeypatch.setattr(Site, "new_bias", lambda site: right(site) * (1 + 1e-7))  # type: ignore[operator]
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.GELU(), nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5))
    model += nn.Sequential(nn.GELU(), nn.Conv2d(5, 2, 1))
    with pytest.raises(VerificationError, match="the first layer to differ is 4;"):
        fold_exported(export(model, image()))
