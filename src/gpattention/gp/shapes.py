"""Leading axes that broadcast together."""

import torch


def broadcast(*shapes: torch.Size) -> torch.Size:
    """`torch.broadcast_shapes`, without its cost where the longest shape ends in all the others."""
    longest = shapes[0]
    for shape in shapes:  # max(key=len) cannot be compiled where a size is symbolic
        longest = shape if len(shape) > len(longest) else longest
    if all(shape == longest[len(longest) - len(shape) :] for shape in shapes):
        return longest
    return torch.broadcast_shapes(*shapes)
