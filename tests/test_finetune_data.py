"""Which images a training run takes, and what it says about the others."""

from __future__ import annotations

import dataclasses
import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from PIL import Image

import bnconvert as bc
from bnconvert.finetune.sources import open_sources
from bnconvert.image_files import read_image
from bnconvert.testing import run_ranks
from tests.shapes import CLASSES, draw_shape

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from bnconvert.finetune.settings import Settings
from tests.finetune_support import run_here, settings


def test_a_timm_dataset_is_opened_by_its_name(images: Path, tmp_path: Path) -> None:
    asked = settings(images, tmp_path / "run", data="torch/image_folder", epochs=1)
    summary = run_here(dataclasses.replace(asked, data_root=str(images)))
    assert (summary["training_images"], summary["final"]["images"]) == (42, 15)
    assert summary["classes"] == sorted(CLASSES)
    with pytest.raises(bc.BnconvertError, match="timm cannot open it"):
        run_here(settings(images, tmp_path / "other", data="torch/nothing"))


def test_a_part_of_each_class_is_held_out_without_a_validation_folder(
    images: Path, tmp_path: Path
) -> None:
    summary = run_here(settings(images / "train", tmp_path / "run", epochs=1))
    assert (summary["training_images"], summary["final"]["images"]) == (33, 9)


def spoil(folder: Path, kind: str) -> None:
    if kind == "empty class":
        (folder / "train" / "zigzag").mkdir()
    elif kind == "bad image":
        (folder / "train" / "bar" / "bad.png").write_bytes(b"no image")
        whole = (folder / "train" / "bar" / "0.png").read_bytes()
        (folder / "val" / "bar" / "cut.png").write_bytes(whole[: len(whole) // 2])
    elif kind == "one class":
        for part in ("train", "val"):
            for other in sorted((folder / part).iterdir())[1:]:
                shutil.rmtree(other)
    elif kind == "parts":
        (folder / "train").rename(folder / "training")
        (folder / "val").rename(folder / "validation")
    elif kind == "unknown class":
        (folder / "val" / "zigzag").mkdir()
        draw_shape("bar", torch.Generator()).save(folder / "val" / "zigzag" / "0.png")


@pytest.fixture
def own_images(images: Path, tmp_path: Path) -> Callable[[str], Path]:
    def make(kind: str) -> Path:
        folder = tmp_path / "images"
        shutil.copytree(images, folder)
        spoil(folder, kind)
        return folder

    return make


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("empty class", "zigzag: holds no image"),
        ("bad image", r"2 images cannot be read .*bad\.png.*cut\.png.*--skip-bad-images"),
        ("unknown class", "zigzag is not among the training classes"),
        ("one class", "holds one class"),
        ("parts", "training, validation look like parts of the data"),
    ],
)
def test_bad_data_is_refused_with_what_is_wrong(
    own_images: Callable[[str], Path], tmp_path: Path, kind: str, message: str
) -> None:
    with pytest.raises(bc.BnconvertError, match=message):
        run_here(settings(own_images(kind), tmp_path / "run"))


def test_bad_images_are_left_out_and_named_when_asked(
    own_images: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = own_images("bad image")
    summary = run_here(settings(folder, tmp_path / "run", epochs=1, skip_bad_images=True))
    assert [path.rsplit("/", 1)[1] for path in summary["skipped_images"]] == ["bad.png", "cut.png"]
    assert (summary["training_images"], summary["final"]["images"]) == (42, 15)


def test_every_usual_kind_of_image_counts_and_hidden_files_do_not(
    own_images: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = own_images("as it is")
    kinds = (".webp", ".bmp", ".tif", ".gif", ".ppm")
    for kind in kinds:
        draw_shape("bar", torch.Generator()).save(folder / "train" / "bar" / f"other{kind}")
    hidden = folder / "train" / "bar" / ".ipynb_checkpoints"
    hidden.mkdir()
    draw_shape("bar", torch.Generator()).save(hidden / "0-checkpoint.png")
    source, _ = open_sources(str(folder), None, 0.2)
    assert len(source) == 42 + len(kinds)


@pytest.mark.parametrize(
    ("dtype", "what"),
    [(np.float32, "floating point numbers of unknown range"), (np.int32, "32-bit integers")],
)
def test_images_of_unknown_range_are_refused_by_name(
    own_images: Callable[[str], Path], tmp_path: Path, dtype: type, what: str
) -> None:
    folder = own_images("")
    path = folder / "train" / "bar" / "deep.tif"
    Image.fromarray((1000 * np.arange(64)).astype(dtype).reshape(8, 8)).save(path)
    with pytest.raises(bc.BnconvertError, match=rf"deep.tif: cannot be read .*{what}"):
        read_image(str(path))
    with pytest.raises(bc.BnconvertError, match=rf"1 images cannot be read .*deep\.tif.*{what}"):
        run_here(settings(folder, tmp_path / "run"))
    summary = run_here(settings(folder, tmp_path / "run", epochs=1, skip_bad_images=True))
    assert summary["skipped_images"] == [str(path)]


def test_small_and_deep_images_can_be_read(
    own_images: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = own_images("") / "train" / "bar"
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    for name in ("deep.png", "deep.tif", "deep.pgm"):
        Image.fromarray(values).save(folder / name)
    draw_shape("bar", torch.Generator()).resize((5, 3)).save(folder / "small.jpg")
    run_here(settings(folder.parent.parent, tmp_path / "run", epochs=1))


@pytest.mark.parametrize(
    ("spoiled", "message"),
    [
        ("val/*/*.png", "none of the validation images can be read"),
        ("train/bar/*.png", "bar: none of its training images can be read"),
    ],
)
def test_a_class_without_a_readable_image_is_refused(
    own_images: Callable[[str], Path], tmp_path: Path, spoiled: str, message: str
) -> None:
    folder = own_images("")
    for path in folder.glob(spoiled):
        path.write_bytes(b"no image")
    with pytest.raises(bc.BnconvertError, match=message):
        run_here(settings(folder, tmp_path / "run", skip_bad_images=True))


def test_links_in_class_folders_are_followed_but_not_in_circles(
    own_images: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = own_images("")
    bar = folder / "train" / "bar"
    (bar / "below").mkdir()
    draw_shape("bar", torch.Generator()).save(bar / "below" / "x.png")
    outside = tmp_path / "outside"
    outside.mkdir()
    draw_shape("bar", torch.Generator()).save(outside / "y.png")
    (bar / "linked").symlink_to(outside)
    (outside / "up").symlink_to(outside)
    (bar / "below" / "up").symlink_to(bar)
    (bar / "all").symlink_to(folder)
    (bar / "root").symlink_to("/")
    source, _ = open_sources(str(folder), None, 0.2)
    assert len(source) == 42 + 2


def test_hidden_folders_are_no_classes(own_images: Callable[[str], Path]) -> None:
    folder = own_images("hidden")
    (folder / "train" / ".ipynb_checkpoints").mkdir()
    (folder / "val" / "__MACOSX").mkdir()
    train, validation = open_sources(str(folder), None, 0.2)
    assert train.classes == validation.classes == tuple(sorted(CLASSES))


def test_sixteen_bits_are_scaled_to_eight(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "deep.png")
    read = np.asarray(read_image(str(tmp_path / "deep.png")))
    assert np.abs(read[..., 0] - values / 256.0).max() <= 1.0


def test_more_processes_than_images_is_refused_on_every_rank(
    own_images: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = own_images("")
    for path in (folder / "train").glob("*/*.png"):
        if path.stem != "0":
            path.unlink()
    asked = settings(folder, tmp_path / "run", norm="plain")
    texts = run_ranks(refusal, 2, asked)
    assert texts[0] == texts[1]
    assert "3 training images are too few for 2 processes" in texts[0]


def refusal(rank: int, asked: Settings) -> str:
    with pytest.raises(bc.BnconvertError) as caught:
        run_here(asked)
    return str(caught.value)
