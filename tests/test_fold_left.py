"""What folding a module tree leaves, with which reason; activations that work in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn

from bnconvert import plan_fold_batchnorm
from bnconvert.testing import randomize_batchnorm
from tests.fold_support import Steps, check_folds, conv_bn, image

if TYPE_CHECKING:
    from collections.abc import Callable

# -- what is left -------------------------------------------------------------------------------


def left(model: nn.Module, x: Tensor | None = None, folded: int = 0, **options: Any) -> str:
    """Return the reason of the only layer that folding leaves."""
    report = check_folds(model, image() if x is None else x, folded, 1, **options)
    return report.left[0].reason


def test_a_producer_that_is_read_elsewhere() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        y = conv(x)
        return bn(y) + y.sin()

    assert "conv (conv2d) is also read by sin" in left(
        Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4))
    )


def test_a_producer_that_is_an_output() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        y = conv(x)
        return bn(y), y

    assert "the model's output" in left(Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4)))


STORES: dict[str, Callable[[Any, Tensor], Any]] = {
    "last": lambda model, y: setattr(model, "last", y),
    "features[0]": lambda model, y: model.features.append(y),
    "named": lambda model, y: model.named.update(y=(y,)),
    "bn.seen": lambda model, y: setattr(model.bn, "seen", y),
}


@pytest.mark.parametrize("name", STORES)
def test_a_producer_that_the_forward_stores_in_an_attribute(name: str) -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        y = conv(x)
        STORES[name](model, y)
        return bn(y)

    model = Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4)).eval()
    model.features, model.named = [], {}  # type: ignore[assignment]
    randomize_batchnorm(model)
    report = plan_fold_batchnorm(model, image()).report
    reason = report.left[0].reason
    assert "conv (conv2d) is also read by the attribute" in reason
    assert name.partition("[")[0] in reason
    assert "where the forward stores it" in reason


def test_a_forward_that_calls_its_own_model_may_store_too() -> None:
    class Flips(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x: Tensor, again: bool = True) -> Tensor:
            y: Tensor = self.bn(self.conv(x))
            self.last = y
            return y + self(x.flip(-1), False).flip(-1) if again else y

    report = plan_fold_batchnorm(Flips().eval(), image()).report
    assert "conv is called 2 times" in report.left[0].reason


def test_results_and_computed_weights_may_be_stored() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        conv.grid = torch.arange(4.0)
        y: Tensor = bn(conv(x))
        bn.seen = y
        return y.sin()

    check_folds(Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4)), image())


def test_a_convolution_with_two_norms() -> None:
    def steps(x: Tensor, conv: nn.Module, one: nn.Module, two: nn.Module) -> Any:
        return one(conv(x)) + two(conv(-x))

    model = Steps(steps, conv=nn.Conv2d(6, 4, 3), one=nn.BatchNorm2d(4), two=nn.BatchNorm2d(4))
    report = check_folds(model, image(), 0, 2)
    assert all("conv is called 2 times" in layer.reason for layer in report.left)


def test_the_same_pair_called_twice() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        return bn(conv(bn(conv(x))))

    model = Steps(steps, conv=nn.Conv2d(6, 6, 3, padding=1), bn=nn.BatchNorm2d(6))
    assert "conv is called 2 times" in left(model)


def test_a_shared_norm_whose_calls_agree_is_folded_into_both() -> None:
    def steps(x: Tensor, one: nn.Module, two: nn.Module, bn: nn.Module) -> Any:
        return bn(one(x)) + bn(two(x)).sin()

    model = Steps(steps, one=nn.Conv2d(6, 4, 3), two=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4))
    check_folds(model, image())


def test_a_shared_norm_whose_calls_disagree_is_left() -> None:
    def steps(x: Tensor, one: nn.Module, bn: nn.Module) -> Any:
        return bn(one(x)) + bn(x).sin()

    model = Steps(steps, one=nn.Conv2d(6, 6, 3, padding=1), bn=nn.BatchNorm2d(6))
    assert "the model's input" in left(model)


def heads() -> Steps:
    def steps(x: Tensor, **layers: nn.Module) -> Any:
        one = layers["bn_1"](layers["conv_1"](x))
        return one + layers["bn_2"](layers["conv_2"](x * 2))

    conv = nn.Conv2d(6, 4, 3)
    return Steps(steps, conv_1=conv, bn_1=nn.BatchNorm2d(4), conv_2=conv, bn_2=nn.BatchNorm2d(4))


def test_a_module_under_two_names_can_be_cloned() -> None:
    check_folds(heads(), image(), 0, 2)
    model = heads()
    check_folds(model, image(), folded=2, clone_shared=True)
    assert model.conv_1 is not model.conv_2


def test_shared_weights_are_left() -> None:
    model = Steps(
        lambda x, one, two, bn: bn(one(x)) + two(x),
        one=nn.Conv2d(6, 4, 3),
        two=nn.Conv2d(6, 4, 3),
        bn=nn.BatchNorm2d(4),
    )
    model.two.weight = model.one.weight
    assert "a weight of one is shared: it is also two.weight" in left(model)


@pytest.mark.parametrize("where", ["conv", "bn", "body"])
def test_a_hook_that_sees_a_changed_value_is_honoured(where: str) -> None:
    body = nn.Sequential(nn.Conv2d(6, 4, 3))
    model = Steps(lambda x, body, bn: bn(body(x)), body=body, bn=nn.BatchNorm2d(4))
    seen: list[Tensor] = []

    def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
        seen.append(output)

    {"conv": body[0], "bn": model.bn, "body": body}[where].register_forward_hook(look)
    assert "hook look" in left(model)


def test_a_hook_that_sees_nothing_of_it_does_not_block() -> None:
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    model.register_forward_hook(lambda module, inputs, output: output * 2)
    check_folds(model, image())


def test_no_running_statistics() -> None:
    model = nn.Sequential(nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, track_running_stats=False))
    assert "no running statistics" in left(model)


def test_a_norm_that_is_not_called() -> None:
    model = Steps(lambda x, conv, bn: conv(x), conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4))
    assert "does not call it" in left(model)


def test_a_norm_whose_forward_does_more() -> None:
    class Doubled(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as in torch)
            return super().forward(input) * 2 + 1

    model = nn.Sequential(nn.Conv2d(6, 4, 3), Doubled(4))
    assert "does more than normalise: mul" in left(model)


def test_selection() -> None:
    model = nn.Sequential(*conv_bn(), nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6))
    assert "excluded by '1'" in left(model, folded=1, exclude="1")
    model = nn.Sequential(*conv_bn(), nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6))
    assert "not among the included" in left(model, folded=1, include=lambda name, _: name == "4")


def test_an_excluded_norm_takes_nothing_in() -> None:
    model = nn.Sequential(nn.BatchNorm2d(6), nn.BatchNorm2d(6), nn.GELU())
    report = check_folds(model, image(), 0, 2, exclude="0")
    assert "0 must not change: it is excluded by '0'" in report.left[1].reason


def test_a_functional_norm_is_reported() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(6, 4, 3)
            self.register_buffer("mean", torch.zeros(4))
            self.register_buffer("var", torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.batch_norm(self.conv(x), self.mean, self.var)  # type: ignore[arg-type]

    report = plan_fold_batchnorm(nn.Sequential(Functional()).eval(), image()).report
    assert report.left[0].name == "0"
    assert "a function called by Functional" in report.left[0].reason


# -- activations in place -----------------------------------------------------------------------


def test_an_in_place_activation_does_not_write_into_a_residual() -> None:
    def steps(x: Tensor, bn: nn.Module, act: nn.Module, end: nn.Module) -> Any:
        y = x * 2
        return end(act(bn(y))) + y

    model = Steps(
        steps, bn=nn.BatchNorm2d(6), act=nn.LeakyReLU(inplace=True), end=nn.Conv2d(6, 6, 1)
    )
    assert "leaky_relu" in left(model)


def test_an_in_place_activation_does_not_write_into_a_split_view() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module, act: nn.Module) -> Any:
        one, two = conv(x).chunk(2, 1)
        return act(bn(one)) * two

    model = Steps(steps, conv=nn.Conv2d(6, 8, 3), bn=nn.BatchNorm2d(4), act=nn.SiLU(inplace=True))
    check_folds(model, image())
    assert model.act.inplace is False
    model(image().double()).sum().backward()


def test_an_in_place_function_on_a_split_view_blocks() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        one, two = conv(x).chunk(2, 1)
        return torch.relu_(bn(one)) * two

    model = Steps(steps, conv=nn.Conv2d(6, 8, 3), bn=nn.BatchNorm2d(4))
    assert "relu_" in left(model)


def test_a_producer_that_is_written_in_place_blocks() -> None:
    def steps(x: Tensor, conv: nn.Module, bn: nn.Module) -> Any:
        y = conv(x)
        y[:, :2] += 1
        return bn(y)

    left(Steps(steps, conv=nn.Conv2d(6, 4, 3), bn=nn.BatchNorm2d(4)))
