"""The network of ELMo (Peters et al. 2018, https://arxiv.org/abs/1802.05365), as functions of its weights.

Shapes: B sentences of T words (begin and end included), L characters a word, P numbers per direction.
"""

import torch
from torch import Tensor
from torch.nn import functional

from gpattention.models.embeddings.elmo_weights import Cell, ElmoOptions, ElmoWeights


def word_vectors(characters: Tensor, weights: ElmoWeights, options: ElmoOptions) -> Tensor:
    """Words by their spelling: characters [W, L] to [W, P]."""
    activate = torch.relu if options.activation == "relu" else torch.tanh
    letters = functional.embedding(characters, weights.characters).mT  # [W, D, L]
    found = [functional.conv1d(letters, c.weight, c.bias).amax(-1) for c in weights.convolutions]
    x = activate(torch.cat(found, -1))  # [W, F]
    for highway in weights.highways:
        gate = torch.sigmoid(highway.carry(x))  # [W, F], of the change and not, as its name says, of x
        x = gate * torch.relu(highway.transform(x)) + (1.0 - gate) * x
    return x if weights.project is None else weights.project(x)


def layers(x: Tensor, lengths: Tensor, weights: ElmoWeights, options: ElmoOptions) -> Tensor:
    """Every layer's vectors, the words' own first: x [B, T, P], lengths [B] to [1 + layers, B, T, 2 P].

    Each direction has its own stack and starts from zero state; what stands behind a sentence's length
    reaches neither.
    """
    steps = torch.arange(x.shape[1], device=x.device)  # [T]
    back = torch.where(steps < lengths[:, None], lengths[:, None] - 1 - steps, steps)  # [B, T]
    back = back[..., None].expand(x.shape)  # [B, T, P], its own inverse
    ahead, behind = x, x.gather(1, back)  # [B, T, P] each, `behind` last word first
    found = [torch.cat([x, x], -1)]
    for i, (forward, backward) in enumerate(zip(weights.forward, weights.backward, strict=True)):
        skip = options.skip_connections and i > 0
        ahead = lstm(ahead, forward, options) + (ahead if skip else 0.0)
        behind = lstm(behind, backward, options) + (behind if skip else 0.0)
        found.append(torch.cat([ahead, behind.gather(1, back)], -1))
    return torch.stack(found)


def lstm(x: Tensor, cell: Cell, options: ElmoOptions) -> Tensor:
    """Projected LSTM from the first step to the last: [B, T, P] to [B, T, P]."""
    driven = cell.drive(x)  # [B, T, 4 C]
    state = x.new_zeros(x.shape[0], cell.project.shape[1])  # [B, P]
    memory = x.new_zeros(x.shape[0], cell.project.shape[0])  # [B, C]
    states = []
    for step in driven.unbind(1):  # [B, 4 C]
        take, candidate, keep, show = (step + state @ cell.recur).chunk(4, -1)  # [B, C] each
        memory = torch.sigmoid(keep) * memory + torch.sigmoid(take) * torch.tanh(candidate)
        memory = clip(memory, options.cell_clip)
        state = (torch.sigmoid(show) * torch.tanh(memory)) @ cell.project
        state = clip(state, options.projection_clip)
        states.append(state)
    return torch.stack(states, 1)


def clip(x: Tensor, most: float | None) -> Tensor:
    """x within [-most, most]."""
    return x if most is None else x.clamp(-most, most)
