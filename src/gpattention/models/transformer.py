"""What both transformers share: blocks of any kinds, a head, draws, storage, predictions."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Generator, Tensor, nn

from gpattention.attention import AttentionOutput, build_attention
from gpattention.attention.output import Draw, check_need
from gpattention.gp import NoiseSource, NumericalError, Posterior
from gpattention.models.block import Block, BlockOutput
from gpattention.models.config import TransformerConfig
from gpattention.models.fused.stream import Stream, run_block
from gpattention.models.fused.switch import why_not_fused_blocks
from gpattention.models.health import HealthReport, measure_health
from gpattention.models.prediction import Prediction, predict
from gpattention.models.rows import Inputs
from gpattention.models.seeded_dropout import first_site, rate_of
from gpattention.models.storage import CONVERSION_FILE, load_folder, save_folder

NEEDS = ("logits", "regularizer", "variance", "weights", "posterior", "tokens")


@dataclass(frozen=True)
class LayerOutput:
    """What one layer told, as far as `need` asked.

    When S > 1 samples were drawn, B is S * B (sample by sample) from the layer on where they part.
    """

    variance: Tensor | None = None  # [B, H, N] or [B, H, N, D]
    weights: Tensor | None = None  # [B, H, N, N]
    posterior: Posterior | None = None
    attended: Tensor | None = None  # [B, N, E] tokens after the attention
    tokens: Tensor | None = None  # [B, N, E] tokens after the block


@dataclass(frozen=True)
class ModelOutput:
    """A forward pass."""

    logits: Tensor  # [B, C], or [S, B, C] when S > 1 samples were drawn
    regularizer: Tensor | None = None  # sum over layers, to be added to a loss
    layers: tuple[LayerOutput, ...] = ()


class Transformer(nn.Module):
    """Base of `VisionTransformer` and `TextTransformer`; a subclass embeds and pools."""

    config_class: ClassVar[type[TransformerConfig]] = TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        hidden = config.width if config.mlp_width is None else config.mlp_width
        self.blocks = nn.ModuleList(
            Block(
                build_attention(
                    layer.kind, embed_dim=config.width, num_heads=config.heads,
                    dropout=config.dropout, **layer.options,
                ),
                mlp_width=hidden,
                dropout=config.dropout,
            )
            for layer in config.layers
        )  # fmt: skip
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.classes)

    @property
    def draws(self) -> bool:
        """Whether any layer has a posterior to draw from."""
        return any(block.attention.draws for block in self._blocks())

    def embed(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Tokens [B, N, E] and padding mask [B, N] (True = ignore) of a batch."""
        raise NotImplementedError

    def pool(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """[B, N, E] -> [B, E]"""
        raise NotImplementedError

    def real_tokens(self, inputs: Inputs) -> Tensor:
        """How many tokens of each item are not padding.  [B]"""
        raise NotImplementedError

    def forward(
        self,
        inputs: Inputs,
        *,
        draw: Draw = "none",
        samples: int = 1,
        generator: Generator | NoiseSource | None = None,
        need: tuple[str, ...] = ("logits",),
        dropout_seed: Tensor | None = None,  # [] whole number, where the model is
    ) -> ModelOutput:
        """Logits, and whatever else `need` names.

        With `draw`, every layer that has a posterior passes on a draw instead of its mean; `samples` > 1
        runs that many draws side by side and stacks their logits.  The regulariser is that of the
        layers as they were run, divided by the number of samples.  In training, `dropout_seed` fixes what
        is dropped; without it that is drawn from torch's generator.
        """
        features, layers, regularizer = self._run(inputs, draw, samples, generator, need, dropout_seed)
        logits = self.head(features)  # [S * B, C]
        if samples > 1:
            logits = logits.unflatten(0, (samples, -1))
        return ModelOutput(logits, regularizer, layers)

    def features(
        self,
        inputs: Inputs,
        *,
        draw: Draw = "none",
        generator: Generator | NoiseSource | None = None,
    ) -> Tensor:
        """What the classifier `head` reads.  [B, E]"""
        return self._run(inputs, draw, 1, generator, ("logits",))[0]

    def predict(self, inputs: Inputs, samples: int = 10, seed: int = 0, **options: Any) -> Prediction:
        """Class probabilities with uncertainty, in chunks of bounded memory; see `predict`.

        `samples=0` is the mean prediction.  An item's noise depends on the seed and its position alone.
        """
        return predict(self, inputs, samples=samples, seed=seed, **options)

    def health(self, inputs: Inputs, labels: Tensor | None = None) -> HealthReport:
        """Per layer: how near to collapse, and whether its variance says something; see `measure_health`."""
        return measure_health(self, inputs, labels)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`, each in one piece or not at all."""
        save_folder(Path(folder), type(self).__name__, self.config.to_dict(), self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Read what `save_pretrained` wrote; anything unexpected is an error and nothing is loaded."""
        if (Path(folder) / CONVERSION_FILE).is_file():
            raise ValueError(
                f"expected {folder} to hold a model as its config tells it, got one whose attention was "
                f"converted afterwards ({CONVERSION_FILE}): gpattention.from_pretrained(folder) reads it"
            )
        config, tensors = load_folder(Path(folder), cls.__name__)
        try:
            model = cls(cls.config_class.from_dict(config))
        except ValueError as error:
            raise ValueError(f"{Path(folder) / 'config.json'}: {error}") from error
        _check_tensors(Path(folder), model, tensors)
        for name, own in (*model.named_parameters(), *model.named_buffers()):
            own.data = own.data.to(tensors[name].dtype)  # the type it was saved in, or bits would be lost
        model.load_state_dict(tensors)
        return model.eval()

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def _run(
        self,
        inputs: Inputs,
        draw: Draw,
        samples: int,
        generator: Generator | NoiseSource | None,
        need: tuple[str, ...],
        seed: Tensor | None = None,
    ) -> tuple[Tensor, tuple[LayerOutput, ...], Tensor | None]:
        self._check_request(draw, samples, need)
        if why_not_fused_blocks(self._blocks(), self.norm, need) is None:
            return self._run_fused(inputs, draw, samples, generator, need, seed)
        x, padding = self._embed(inputs, seed)
        asked = _asked(need)
        layers: list[LayerOutput] = []
        regularizers: list[Tensor] = []
        before, copies = None, 1
        for index, block in enumerate(self._blocks()):
            first = samples > 1 and copies == 1 and block.attention.draws
            with _named_failures(index, block):
                told = block(
                    x, padding=padding, draw=draw, samples=samples if first else 1, generator=generator,
                    need=_available(block, asked), before=before, seed=seed, site=first_site(index),
                )  # fmt: skip
            if first:  # the samples part ways here: from now on they share the batch axis
                copies = samples
                told = BlockOutput(told.tokens.flatten(0, 1), told.attended.flatten(0, 1), told.attention)
                padding = None if padding is None else padding.repeat(samples, 1)
            x = told.tokens
            layers.append(_layer_output(told.attention, told if "tokens" in need else None))
            if told.attention.regularizer is not None:
                regularizers.append(told.attention.regularizer)
            before = block
        return self.pool(self.norm(x), padding), tuple(layers), _total(regularizers)

    def _run_fused(
        self,
        inputs: Inputs,
        draw: Draw,
        samples: int,
        generator: Generator | NoiseSource | None,
        need: tuple[str, ...],
        seed: Tensor | None,
    ) -> tuple[Tensor, tuple[LayerOutput, ...], Tensor | None]:
        """The same, with the sums of the residual stream fused with what reads them."""
        if seed is None and any(rate_of(m) > 0 for m in self.modules() if isinstance(m, nn.Dropout)):
            seed = torch.randint(-(2**62), 2**62, (), device=self.norm.weight.device)
        stream, padding = self._stream(inputs, seed)
        asked, told, before, copies = _asked(need), [], None, 1
        for index, block in enumerate(self._blocks()):
            first = samples > 1 and copies == 1 and block.attention.draws
            with _named_failures(index, block):
                stream, attention = run_block(
                    stream, block, seed, first_site(index), before=before, key_padding_mask=padding,
                    draw=draw if block.attention.draws else "none", samples=samples if first else 1,
                    generator=generator, need=_available(block, asked),
                )  # fmt: skip
            if first:
                copies = samples
                padding = None if padding is None else padding.repeat(samples, 1)
            told.append(attention)
            before = block
        normed = stream.settle(self.norm, seed)[1]
        regularizer = _total([each.regularizer for each in told if each.regularizer is not None])
        return self.pool(normed, padding), tuple(_layer_output(each) for each in told), regularizer

    def _embed(self, inputs: Inputs, seed: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """`embed` with the dropout mask of a seed, where a subclass knows how."""
        return self.embed(inputs)

    def _stream(self, inputs: Inputs, seed: Tensor | None) -> tuple[Stream, Tensor | None]:
        """The tokens that the first block reads, and the padding mask."""
        tokens, padding = self._embed(inputs, seed)
        return Stream(tokens), padding

    def _check_request(self, draw: Draw, samples: int, need: tuple[str, ...]) -> None:
        check_need(need, NEEDS)
        if draw != "none" and not self.draws:
            kinds = ", ".join(sorted({block.attention.kind for block in self._blocks()}))
            raise ValueError(f"draw={draw!r} asked of a model without posteriors (its layers: {kinds})")
        if samples < 1:
            raise ValueError(f"expected samples >= 1, got {samples}")
        if samples > 1 and draw == "none":
            raise ValueError(f"samples={samples} without a draw: pass draw='independent' or draw='joint'")


def _available(block: Block, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Layers without a posterior are not asked for one."""
    if block.attention.draws:
        return asked
    return tuple(name for name in asked if name not in ("variance", "posterior"))


def _asked(need: tuple[str, ...]) -> tuple[str, ...]:
    """What is needed of every attention."""
    return ("output", *(n for n in need if n in ("regularizer", "variance", "weights", "posterior")))


def _layer_output(attention: AttentionOutput, block: BlockOutput | None = None) -> LayerOutput:
    return LayerOutput(
        variance=attention.variance,
        weights=attention.weights,
        posterior=attention.posterior,
        attended=None if block is None else block.attended,
        tokens=None if block is None else block.tokens,
    )


def _total(regularizers: list[Tensor]) -> Tensor | None:
    return torch.stack(regularizers).sum() if regularizers else None


@contextmanager
def _named_failures(index: int, block: Block) -> Iterator[None]:
    """Numerical failures say in which layer they happened."""
    try:
        yield
    except NumericalError as error:
        error.add_note(f"in layer {index} ({block.attention.kind}), where matrices are numbered [item, head]")
        raise


def _check_tensors(folder: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    wanted = model.state_dict()
    missing, foreign = sorted(set(wanted) - set(tensors)), sorted(set(tensors) - set(wanted))
    if missing or foreign:
        raise ValueError(
            f"{folder / 'model.safetensors'} does not fit its config: "
            f"missing {missing[:3]}{'...' if len(missing) > 3 else ''}, "
            f"unexpected {foreign[:3]}{'...' if len(foreign) > 3 else ''}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"{folder / 'model.safetensors'}: expected {name} of shape {tuple(wanted[name].shape)}, "
                f"got {tuple(tensor.shape)}"
            )
        if wanted[name].is_floating_point() and not tensor.is_floating_point():
            raise ValueError(
                f"{folder / 'model.safetensors'}: expected {name} of floating-point numbers, "
                f"got {tensor.dtype}"
            )
