"""The examples of docs/integrations.md run as they stand, in two processes."""

from __future__ import annotations

import copy
import os
import pickle
import re
import socket
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d
from torch import nn
from torch.utils.checkpoint import checkpoint

import bnconvert as bc
from bnconvert.layers import Kind, kind_of
from bnconvert.testing import randomize_batchnorm, run_ranks

DOCUMENT = Path(__file__).parent.parent / "docs" / "integrations.md"
BLOCK = re.compile(r"^```python( setup)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


def examples() -> tuple[str, dict[str, str]]:
    """Return the common first lines, and the example of each heading."""
    text = DOCUMENT.read_text()
    found: dict[str, str] = {}
    setup = ""
    for match in BLOCK.finditer(text):
        heading = re.findall(r"^## (.*)$", text[: match.start()], re.MULTILINE)
        if match[1]:
            setup = match[2]
        else:
            found[heading[-1]] = match[2]
    return setup, found


SETUP, EXAMPLES = examples()


def run_example(rank: int, heading: str, port: int) -> dict[str, Any]:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="none",
    )  # fmt: skip
    torch.manual_seed(rank)
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other libraries warn as they like
        exec(SETUP, names)  # noqa: S102 (the documentation of this project)
        torch.manual_seed(rank + 1)
        exec(EXAMPLES[heading], names)  # noqa: S102
    model = names["model"]
    state = {key: _whole(value) for key, value in model.state_dict().items()}
    kinds = {kind_of(module) for module in model.modules()} - {None}
    return {"kinds": [kind.name for kind in kinds if kind], "state": state}


def _whole(value: Any) -> torch.Tensor:
    whole: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole.clone()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("heading", EXAMPLES)
def test_the_documented_example_ends_with_equal_plain_models(heading: str) -> None:
    first, second = run_ranks(run_example, 2, heading, free_port())
    assert first["kinds"] == second["kinds"] == [Kind.PLAIN.name]
    moved = first["state"]["bn1.running_mean"]
    assert not torch.equal(moved, torch.zeros_like(moved))
    for name, value in first["state"].items():
        if "running_" in name:
            assert torch.equal(value, second["state"][name]), name


def test_every_library_of_the_issue_has_an_example() -> None:
    words = " ".join(EXAMPLES)
    for library in ("timm", "DistributedDataParallel", "FSDP2", "Accelerate", "checkpointing"):
        assert library in words


@pytest.mark.parametrize("reentrant", [False])
def test_checkpointing_updates_the_statistics_once(reentrant: bool) -> None:
    first, second = run_ranks(train_checkpointed, 2, reentrant)
    for name, value in first[0].items():
        assert torch.equal(value, first[1][name]), name
        assert torch.equal(value, second[0][name]) or "weight" in name or "bias" in name


def train_checkpointed(rank: int, reentrant: bool) -> list[dict[str, torch.Tensor]]:
    states = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.BatchNorm2d(5))
        randomize_batchnorm(model)
        bc.convert_sync_batchnorm(model)
        torch.manual_seed(rank)
        for _ in range(3):
            x = torch.randn(2, 3, 6, 6)
            y = checkpoint(model, x, use_reentrant=reentrant) if checkpointed else model(x)
            y.backward(torch.randn(y.shape))
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return states


def test_the_plugin_leaves_a_model_as_it_was_in_every_class() -> None:
    pytest.importorskip("lightning", reason="needs the extra `lightning`")
    import timm

    from bnconvert.integrations.lightning import BatchNormFreeze, BatchNormSync

    model = timm.create_model("test_efficientnet")
    before = [type(module) for module in model.modules()]
    plugin = BatchNormSync(exclude="bn1")
    assert bc.is_synchronized(plugin.apply(model))
    assert not bc.is_synchronized(model.bn1)
    assert [type(module) for module in plugin.revert(model).modules()] == before
    callback = BatchNormFreeze(include="blocks.*")
    callback.setup(None, model, "fit")
    assert kind_of(model.bn1) is Kind.PLAIN
    assert Kind.FROZEN in {kind_of(module) for module in model.modules()}
    callback.teardown(None, model, "fit")
    assert [type(module) for module in model.modules()] == before


def test_the_plugins_leave_alone_what_was_frozen_or_synchronised_before() -> None:
    pytest.importorskip("lightning", reason="needs the extra `lightning`")
    from bnconvert.integrations.lightning import BatchNormFreeze, BatchNormSync

    model = nn.Sequential(*(nn.BatchNorm2d(4) for _ in range(4)))
    bc.freeze_batchnorm(model, include="0")
    bc.freeze_batchnorm(model, include="1", affine=False)
    bc.convert_sync_batchnorm(model, include="2")
    before = [(type(m), m.weight.requires_grad, m.bias.requires_grad) for m in model]
    plugin = BatchNormSync()
    callback = pickle.loads(pickle.dumps(BatchNormFreeze(exclude="3")))  # noqa: S301 (our own)
    callback.setup(None, model, "fit")
    plugin.apply(model)
    assert [kind_of(m) for m in model] == [Kind.FROZEN] * 3 + [Kind.SYNC]
    assert not any(m.weight.requires_grad for m in model[:3])
    plugin.revert(model)
    callback.on_exception(None, model, KeyboardInterrupt())
    assert [(type(m), m.weight.requires_grad, m.bias.requires_grad) for m in model] == before
    callback.teardown(None, model, "fit")
    assert [(type(m), m.weight.requires_grad, m.bias.requires_grad) for m in model] == before
    bc.unfreeze_batchnorm(model)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # of lightning
def test_frozen_statistics_outlive_stochastic_weight_averaging() -> None:
    """It resets the statistics of all layers and takes those of the averaged weights."""
    lightning = pytest.importorskip("lightning", reason="needs the extra `lightning`")
    from bnconvert.integrations.lightning import BatchNormFreeze

    class Task(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
            randomize_batchnorm(self.model)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    task, batches = Task(), torch.randn(3, 8, 3)
    frozen: Any = task.model[0]
    other: Any = task.model[2]
    before = {name: value.clone() for name, value in frozen.state_dict().items()}
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def note(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen.append((inputs[0].detach().mean(0), frozen.running_mean.clone()))

    other.register_forward_pre_hook(note)
    averaging = lightning.pytorch.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=1)
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        callbacks=[BatchNormFreeze(include="model.0"), averaging],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    trainer.fit(task, torch.utils.data.DataLoader(list(batches.flatten(0, 1)), batch_size=8))  # type: ignore[arg-type]
    assert kind_of(frozen) is Kind.PLAIN
    for name, value in frozen.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert int(other.num_batches_tracked) == len(batches)
    last = seen[-len(batches) :]
    assert all(torch.equal(frozen_mean, before["running_mean"]) for _, frozen_mean in last)
    mean = torch.stack([batch_mean for batch_mean, _ in last]).mean(0)
    torch.testing.assert_close(other.running_mean, mean)


@pytest.mark.parametrize("change", [bc.convert_sync_batchnorm, bc.freeze_batchnorm])
@pytest.mark.parametrize("training", [True, False])
def test_fx_sees_each_layer_as_one_call(change: Any, training: bool) -> None:
    """Feature extraction of torchvision and quantization of torch trace models in this way."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), BatchNormAct2d(4), nn.Flatten(), nn.BatchNorm1d(144)
    )
    randomize_batchnorm(model)
    model = change(model).train(training)
    traced = torch.fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes].count("call_module") == 5
    assert all(traced.get_submodule(name) is model.get_submodule(name) for name in "124")
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(traced(images), copy.deepcopy(model)(images))
