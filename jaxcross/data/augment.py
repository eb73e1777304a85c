"""Turns a JPEG into a normalised image, with the usual ImageNet augmentation and evaluation crop.

These are pure functions: the result depends only on the JPEG's bytes and, in training, on the
random generator you pass in. Given the same arguments, every rank produces exactly the same image.
"""

from __future__ import annotations

import math

import cv2
import numpy as np

from jaxcross.errors import clause

MEAN_RGB = np.array([0.485, 0.456, 0.406], np.float32)
STDDEV_RGB = np.array([0.229, 0.224, 0.225], np.float32)
AREA = (0.08, 1.0)
ASPECT = (3 / 4, 4 / 3)
# For evaluation, we resize the shorter side to 256/224 of `image_size` and keep the centre.
CROP_SHARE = 224 / 256
ATTEMPTS = 10


def decode(jpeg: bytes) -> np.ndarray:
    """Decodes a JPEG to uint8 BGR `[height, width, 3]`. Like TFDS, ignores any EXIF rotation.

    Raises:
        ValueError: The bytes aren't an image.
    """
    image = None
    if jpeg:
        flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION
        try:
            image = cv2.imdecode(np.frombuffer(jpeg, np.uint8), flags)
        except cv2.error as error:  # e.g. if it exceeds OpenCV's pixel limit
            raise ValueError(
                f"A record's `image` of {len(jpeg)} bytes cannot be decoded: {clause(str(error))}. "
                "Replace the image, and prepare the data set again."
            ) from error
    if image is None:
        raise ValueError(
            f"A record's `image` of {len(jpeg)} bytes cannot be decoded. Replace the image, and "
            "prepare the data set again."
        )
    return image


def random_crop(height: int, width: int, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Returns top, left, height and width of a random crop.

    The crop covers 8% to 100% of the image's area, with an aspect ratio between 3/4 and 4/3, as in
    Szegedy et al., 2015.
    """
    area = height * width
    for _ in range(ATTEMPTS):
        wanted = area * rng.uniform(*AREA)
        aspect = math.exp(rng.uniform(math.log(ASPECT[0]), math.log(ASPECT[1])))
        crop_width = round(math.sqrt(wanted * aspect))
        crop_height = round(math.sqrt(wanted / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top = int(rng.integers(height - crop_height + 1))
            left = int(rng.integers(width - crop_width + 1))
            return top, left, crop_height, crop_width
    return centre_crop(height, width, 1.0)


def centre_crop(height: int, width: int, share: float = CROP_SHARE) -> tuple[int, int, int, int]:
    """Returns top, left, height and width of a central square.

    Its side is the fraction `share` of the image's shorter side.
    """
    side = max(1, round(min(height, width) * share))
    return (height - side) // 2, (width - side) // 2, side, side


def _finish(
    image: np.ndarray, box: tuple[int, int, int, int], image_size: int, *, flip: bool
) -> np.ndarray:
    top, left, height, width = box
    crop = image[top : top + height, left : left + width]
    # Area averaging avoids aliasing when we scale an image down, but makes it look blocky when we
    # scale it up. Use linear interpolation in that case.
    shrinks = height > image_size and width > image_size
    crop = cv2.resize(
        crop,
        (image_size, image_size),
        interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR,
    )
    crop = cv2.cvtColor(crop, cv2.COLOR_BGR2RGB)
    if flip:
        crop = crop[:, ::-1]
    out = np.multiply(crop, 1 / (255 * STDDEV_RGB), dtype=np.float32)
    out -= MEAN_RGB / STDDEV_RGB
    return out


def train_crop(image: np.ndarray, image_size: int, rng: np.random.Generator) -> np.ndarray:
    """Takes a random crop of a decoded image, resizes it, maybe flips it, and normalises it.

    Returns:
        float32 RGB `[image_size, image_size, 3]`.
    """
    box = random_crop(image.shape[0], image.shape[1], rng)
    return _finish(image, box, image_size, flip=bool(rng.integers(2)))


def eval_crop(image: np.ndarray, image_size: int) -> np.ndarray:
    """Takes a centre crop of a decoded image, resizes it and normalises it.

    Returns:
        float32 RGB `[image_size, image_size, 3]`.
    """
    return _finish(image, centre_crop(image.shape[0], image.shape[1]), image_size, flip=False)


def train_image(jpeg: bytes, image_size: int, rng: np.random.Generator) -> np.ndarray:
    """Decodes a JPEG, then applies `train_crop`."""
    return train_crop(decode(jpeg), image_size, rng)


def eval_image(jpeg: bytes, image_size: int) -> np.ndarray:
    """Decodes a JPEG, then applies `eval_crop`."""
    return eval_crop(decode(jpeg), image_size)
