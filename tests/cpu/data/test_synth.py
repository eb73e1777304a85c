"""`jaxcross data synth` writes a real TFDS data set."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow_datasets as tfds

from jaxcross.commands import data as command
from jaxcross.data import eval_batches, synthesise, train_batches


def invoke(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return command.run(parser.parse_args(["data", *map(str, arguments)]))


def test_tfds_itself_reads_it(tmp_path: Path) -> None:
    folder = synthesise(tmp_path, images=12, classes=3, width=40, height=30)
    builder: Any = tfds.builder_from_directory(folder)
    assert builder.info.full_name == "imagenet2012/5.1.0"
    source = builder.as_data_source("train")
    assert len(source) == 12
    assert len(builder.as_data_source("validation")) == 3
    example = source[4]
    assert example["image"].shape == (30, 40, 3)
    assert example["label"] == 1
    assert example["file_name"] == b"n00000001_4.JPEG"
    assert builder.info.features["label"].num_classes == 3


def test_synthesise_is_repeatable_and_writes_once(tmp_path: Path) -> None:
    """The same arguments give the same files, which aren't written again."""
    options: dict[str, Any] = {"images": 8, "classes": 2, "width": 32, "height": 32}
    first, second = synthesise(tmp_path / "a", **options), synthesise(tmp_path / "b", **options)
    written = {path.name: path.stat().st_mtime_ns for path in first.iterdir()}
    for batch, other in zip(
        *(train_batches(f, batch_size=4, image_size=8, epochs=1) for f in (first, second)),
        strict=True,
    ):
        assert np.array_equal(batch["image"], other["image"])
    assert synthesise(tmp_path / "a", **options) == first
    assert {path.name: path.stat().st_mtime_ns for path in first.iterdir()} == written
    with pytest.raises(ValueError, match=r"^`.*5.1.0` already holds another data set"):
        synthesise(tmp_path / "a", **{**options, "images": 9})


def test_interrupted_writing_leaves_nothing(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesise(tmp_path, images=16, classes=2, width=16, height=16, progress=stop)
    assert list((tmp_path / "imagenet2012").iterdir()) == []


@pytest.mark.integration
def test_class_can_be_recognised_from_the_image(tmp_path: Path) -> None:
    """The nearest mean colour, learnt from training images, classifies most validation images."""
    synthesise(tmp_path, images=96, classes=6, width=64, height=48)
    train = next(train_batches(tmp_path, batch_size=96, image_size=32))
    test = next(eval_batches(tmp_path, batch_size=24, image_size=32))

    def chroma(images: np.ndarray) -> np.ndarray:
        mean = images.mean((1, 2))
        mean -= mean.mean(-1, keepdims=True)
        return mean / np.linalg.norm(mean, axis=-1, keepdims=True)

    centres = np.stack(
        [chroma(train["image"][train["label"] == label]).mean(0) for label in range(6)]
    )
    guess = np.argmax(chroma(test["image"]) @ centres.T, -1)
    assert np.mean(guess == test["label"]) > 0.8


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("synth", tmp_path, "--images", 8, "--classes", 2, "--size", "32x24")
    assert invoke(*arguments) == 0
    assert invoke(*arguments) == 0
    out = capsys.readouterr().out
    assert "imagenet2012/5.1.0: 8 training images, 2 classes" in out
    assert f"use it with --data-dir {tmp_path}" in out
    assert invoke("info", tmp_path) == 0
    assert "train, 8 records, 2 classes" in capsys.readouterr().out


def test_command_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert invoke("synth", tmp_path, "--images", 0) == 1
    assert capsys.readouterr().err.startswith(
        "jaxcross data synth: `images` must be at least 1, not 0."
    )
    assert invoke("info", tmp_path / "nowhere") == 1
    assert "jaxcross data info: The data folder `" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        invoke("synth", tmp_path, "--size", "64")
    assert "`64` is not WIDTHxHEIGHT, for example 500x375" in capsys.readouterr().err
