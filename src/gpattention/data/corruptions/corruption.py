"""What a corruption is: a function of an image, five sets of constants and random numbers."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from gpattention.data.corruptions.random_fields import RandomFields

Constants = tuple[float, ...]


@dataclass(frozen=True)
class Scene:
    """What a corruption may use besides the images and its constants."""

    random: RandomFields
    frost: tuple[Tensor, ...] = ()  # pictures of frost, fractions, [3, h, w] each; only frost looks at them


@dataclass(frozen=True)
class Corruption:
    """One of the 19: `apply` takes float64 images in [0, 1], [B, 3, H, W], and gives such images back."""

    name: str
    category: str
    severities: tuple[Constants, Constants, Constants, Constants, Constants]  # of severity 1 to 5
    apply: Callable[[Tensor, Constants, Scene], Tensor]
