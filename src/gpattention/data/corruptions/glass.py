"""Frosted glass: blur, move pixels about, blur."""

from torch import Tensor

from gpattention.data.corruptions.corruption import Constants, Scene
from gpattention.data.corruptions.filters import gaussian_filter
from gpattention.data.corruptions.levels import cut_levels, fractions


def glass_blur(images: Tensor, constants: Constants, scene: Scene) -> Tensor:
    """Between two Gaussian blurs, pixels are replaced by neighbours, once or twice over the image.

    The published code means to swap a pixel with one up to a pixel away (up and to the left: its random
    integers exclude the upper end), from the bottom right corner on. NumPy hands it views, so the first
    half of the swap overwrites what the second would read: the pixel is replaced and its neighbour kept.
    CIFAR-10-C was made so, and so is this. As no pixel is read after it was written, a pass is one gather.
    """
    sigma, passes = constants
    height, width = images.shape[-2:]
    moved = fractions(cut_levels(gaussian_filter(images, sigma)))
    for number in range(int(passes)):
        offsets = (2 * scene.random.uniform(f"offsets {number}", 2, height, width)).long() - 1  # -1 or 0
        moved = move_pixels(moved, offsets[:, 0], offsets[:, 1])
    return gaussian_filter(moved, sigma)


def move_pixels(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Out(y, x) = in(y + down, x + right) except in the first two rows and columns; offsets [B, H, W]."""
    height, width = images.shape[-2:]
    down, right = down.clone(), right.clone()
    for offset in (down, right):
        offset[:, :2] = 0
        offset[:, :, :2] = 0
    shift = (down * width + right).flatten(1)  # [B, H W]
    place = shift + shift.new_ones(height * width).cumsum(0) - 1
    channels = images.shape[1]
    return images.flatten(2).gather(2, place[:, None].expand(-1, channels, -1)).reshape(images.shape)
