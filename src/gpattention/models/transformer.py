"""The transformers of the paper, for images and for texts, with any kind of attention in any layer.

They share pre-LayerNorm blocks, a head, draws and storage, and differ in how they embed and pool.

A plain block adds, then normalises.  With fused kernels, a sum in the residual stream is left to the
LayerNorm that reads it, possibly in the next block, so that both are one kernel.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self, TypeGuard

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import gelu, linear

from gpattention.attention import Attention, AttentionOutput, Draw, build_attention
from gpattention.attention.base import check_draw, check_need
from gpattention.checks import check_choice
from gpattention.gp import NoiseSource, NumericalError, Posterior
from gpattention.models.config import (
    CONVERSION_FILE,
    TextConfig,
    TransformerConfig,
    VisionConfig,
    load_config,
    load_weights,
    save_folder,
)
from gpattention.models.health import HealthReport, measure_health
from gpattention.models.moments import METHODS, Method, predict_moments, transformer_moments
from gpattention.models.predict import Inputs, predict
from gpattention.models.prediction import Prediction
from gpattention.models.signals import Signals, model_signals
from gpattention.numerics import autocast_is_on, checked_once, checks_are_deferred
from gpattention.ops import is_plain, is_watched, why_not_fused_on
from gpattention.ops.layers import (
    EMBEDDING_SITE,
    MOST_COLUMNS,
    Added,
    drop,
    first_site,
    gelu_linear,
    rate_of,
    residual_norm,
)
from gpattention.ops.switch import with_parts

NEEDS = ("logits", "regularizer", "variance", "weights", "posterior", "tokens")


@dataclass(frozen=True)
class LayerOutput:
    """The results of one layer that `need` asked for.

    If S > 1 samples are drawn, B is S * B (sample by sample) from the first layer that draws.

    Attributes:
        variance: [B, H, N] or [B, H, N, D]
        weights: [B, H, N, N]
        posterior: of the layer's attention.
        attended: [B, N, E] tokens after the attention.
        tokens: [B, N, E] tokens after the block.
    """

    variance: Tensor | None = None
    weights: Tensor | None = None
    posterior: Posterior | None = None
    attended: Tensor | None = None
    tokens: Tensor | None = None


@dataclass(frozen=True)
class ModelOutput:
    """A forward pass.

    Attributes:
        logits: [B, C], or [S, B, C] if S > 1 samples were drawn.
        regularizer: sum over layers, to be added to a loss.
        layers: one for every block.
    """

    logits: Tensor
    regularizer: Tensor | None = None
    layers: tuple[LayerOutput, ...] = ()


@dataclass(frozen=True)
class BlockOutput:
    """Tokens after the block and after its attention, and the output of the attention."""

    tokens: Tensor  # [B, N, E] or [S, B, N, E] where several samples were drawn
    attended: Tensor  # the same before the feed-forward part
    attention: AttentionOutput


class FeedForward(nn.Module):
    """LayerNorm, two linear maps with a GELU between them, dropout: what is added to the tokens."""

    def __init__(self, width: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.into = nn.Linear(width, hidden)
        self.back = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, seed: Tensor | None = None, site: int = 0) -> Tensor:
        """[..., E] -> [..., E]; a seed makes the masks of the two sites (see `ops.layers`)."""
        hidden = drop(self.dropout, gelu(self.into(self.norm(x))), seed, site)
        return drop(self.dropout, self.back(hidden), seed, site + 1)


class Block(nn.Module):
    """x + attention(LN x), then x + feed-forward(x).

    Args:
        attention: of any kind.
        mlp_width: of the feed-forward part's hidden layer.
        dropout: probability of dropping an entry of either layer of it.
    """

    def __init__(self, attention: Attention, *, mlp_width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(attention.embed_dim)
        self.attention = attention
        self.feed_forward = FeedForward(attention.embed_dim, mlp_width, dropout)

    def forward(
        self, x: Tensor, *, before: "Block | None" = None, seed: Tensor | None = None, site: int = 0,
        **options: Any,
    ) -> BlockOutput:  # fmt: skip
        """One layer of tokens [B, N, E], with options of its attention's call.

        `before` is the layer below, through which inducing inputs that are tokens travel; `seed` makes the
        dropout masks of the block's sites, the first of which is `site`.
        """
        inducing = self.attention.inducing_tokens()  # [H, m, E]
        if inducing is not None and before is not None:
            # they are tokens, which have passed the layer below like all others
            options["inducing"] = self.norm(inducing + before.feed_forward(inducing, seed, site + 3))
        seeded = seed is not None and type(self.attention).forward is Attention.forward
        # kinds of third parties may not know `finish`
        attention = self.attention(self.norm(x), **options, **({"finish": False} if seeded else {}))
        output = attention.output
        if seeded:
            output = drop(self.attention.dropout, self.attention.output(output), seed, site)
        attended = x + output
        return BlockOutput(attended + self.feed_forward(attended, seed, site + 1), attended, attention)


@dataclass(frozen=True)
class Stream:
    """The residual stream: tokens [..., E], and what remains to be added to them."""

    tokens: Tensor
    added: Added | None = None

    def settle(self, norm: nn.LayerNorm, seed: Tensor | None) -> tuple[Tensor, Tensor]:
        """The complete tokens, and their LayerNorm.  [..., E] each"""
        return residual_norm(self.tokens, self.added, norm.weight, norm.bias, norm.eps, seed)


def run_block(
    stream: Stream, block: Block, seed: Tensor | None, site: int, *, before: Block | None, **options: Any
) -> tuple[Stream, AttentionOutput]:
    """The same as `block(...)`, by fused kernels."""
    tokens, normed = stream.settle(block.norm, seed)
    inducing = block.attention.inducing_tokens()  # [H, m, E]
    if inducing is not None and before is not None:
        below = _feed_forward(Stream(inducing), before.feed_forward, seed, site + 3)
        options["inducing"] = below.settle(block.norm, seed)[1]
    attention: AttentionOutput = block.attention(normed, finish=False, **options)
    output = block.attention.output
    z = linear(attention.output.flatten(0, -3), output.weight)  # samples share the batch axis from here on
    added = Added(z, output.bias, rate_of(block.attention.dropout), site)
    return _feed_forward(Stream(tokens, added), block.feed_forward, seed, site + 1), attention


def _feed_forward(stream: Stream, part: FeedForward, seed: Tensor | None, site: int) -> Stream:
    tokens, normed = stream.settle(part.norm, seed)
    hidden, rate = linear(normed, part.into.weight), rate_of(part.dropout)
    z = gelu_linear(hidden, part.into.bias, part.back.weight, rate, seed, site)
    return Stream(tokens, Added(z, part.back.bias, rate, site + 1))


def are_fused(blocks: list[Block], norm: nn.Module, need: tuple[str, ...]) -> bool:
    """Whether the blocks and the last LayerNorm run fused.

    The fused path reads parameters instead of calling modules, which must be plain and without hooks.
    """
    if torch.compiler.is_compiling():  # first, as the compiler would guard all that is looked at
        return False
    if "tokens" in need or not _is_affine(norm):
        return False
    device, dtype = norm.weight.device, norm.weight.dtype
    return (
        dtype == torch.float32
        and not autocast_is_on(device)
        and len(norm.weight) <= MOST_COLUMNS  # one program holds a whole row
        and why_not_fused_on(device, dtype) is None
        and all(_is_plain_block(block) for block in blocks)
    )


def _is_affine(norm: nn.Module) -> TypeGuard[nn.LayerNorm]:
    """Whether a module is a LayerNorm of one axis with weight and bias, without hooks."""
    plain = is_plain(norm, nn.LayerNorm) and len(norm.normalized_shape) == 1
    return plain and norm.weight is not None and norm.bias is not None


def _may_drop(dropout: nn.Module) -> bool:
    """Whether a module is dropout without hooks, of a rate that the kernels support."""
    return is_plain(dropout, nn.Dropout) and dropout.p < 1


def _is_plain_block(block: Block) -> bool:
    attention, part = block.attention, block.feed_forward
    return (
        type(block) is Block
        and type(part) is FeedForward
        and type(attention).forward is Attention.forward
        and attention.batch_first
        and not is_watched(*with_parts(block))
        and all(_is_affine(norm) for norm in (block.norm, part.norm))
        and all(is_plain(linear, nn.Linear) for linear in (attention.output, part.into, part.back))
        and all(_may_drop(dropout) for dropout in (attention.dropout, part.dropout))
    )


class Transformer(nn.Module):
    """Base of `VisionTransformer` and `TextTransformer`; a subclass embeds and pools.

    Args:
        config: sizes, and the attention of each layer.
    """

    config_class: ClassVar[type[TransformerConfig]] = TransformerConfig
    dropout: nn.Dropout  # of the embedded tokens

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width, dropout = config.width, config.dropout
        sizes: dict[str, Any] = {"embed_dim": width, "num_heads": config.heads, "dropout": dropout}
        hidden = width if config.mlp_width is None else config.mlp_width
        self.blocks = nn.ModuleList(
            Block(
                build_attention(layer.kind, **sizes, **config.sized(layer)), mlp_width=hidden, dropout=dropout
            )
            for layer in config.layers
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.classes)

    @property
    def draws(self) -> bool:
        """Whether any layer has a posterior to draw from."""
        return any(block.attention.draws for block in self._blocks())

    def embed(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Tokens [B, N, E] and padding mask [B, N] (True = ignore) of a batch."""
        tokens, padding = self._tokens(inputs)
        return self.dropout(tokens), padding

    def pool(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """[B, N, E] -> [B, E]"""
        raise NotImplementedError

    def real_tokens(self, inputs: Inputs) -> Tensor:
        """How many tokens of each item are not padding.  [B]"""
        raise NotImplementedError

    def _tokens(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Tokens before their dropout, and the padding mask."""
        raise NotImplementedError

    def _unsummed(self, inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None] | None:
        """Tokens as x [B, N, E] + bias [E] + positions [N, E], then the padding mask; None if not so."""
        return None

    def forward(
        self, inputs: Inputs, *, draw: Draw = "none", samples: int = 1,
        generator: Generator | NoiseSource | None = None, need: tuple[str, ...] = ("logits",),
        dropout_seed: Tensor | None = None,
    ) -> ModelOutput:  # fmt: skip
        """Logits, and what else `need` names.

        With `draw`, every layer with a posterior passes on a draw instead of its mean; `samples` > 1 runs
        several draws side by side and stacks their logits.  The regulariser is that of the layers as they
        were run, divided by the number of samples.  In training, `dropout_seed`, a whole number [] on the
        device of the model, determines what is dropped; without it torch's generator does.
        """
        features, layers, regularizer = self._run(inputs, draw, samples, generator, need, dropout_seed)
        logits = self.head(features)  # [S * B, C]
        if samples > 1:
            logits = logits.unflatten(0, (samples, -1))
        return ModelOutput(logits, regularizer, layers)

    def features(
        self, inputs: Inputs, *, draw: Draw = "none", generator: Generator | NoiseSource | None = None
    ) -> Tensor:
        """The input of the classifier `head`.  [B, E]"""
        return self._run(inputs, draw, 1, generator, ("logits",))[0]

    def predict(
        self, inputs: Inputs, samples: int = 10, seed: int = 0, *, method: Method = "draws", **options: Any
    ) -> Prediction:
        """Class probabilities with uncertainty, in chunks of bounded memory; see `predict`.

        `samples=0` is the mean prediction.  The noise of an item depends only on the seed and its position.
        `method="moments"` propagates variances in one pass instead of drawing (see `moments`).
        """
        check_choice("method", method, METHODS)
        if method == "moments":
            return predict_moments(self, partial(transformer_moments, self), inputs, **options)
        return predict(self, inputs, samples=samples, seed=seed, **options)

    def signals(self, inputs: Inputs | Iterable[Any], **options: Any) -> Signals:
        """Signals of every item from one pass without draws, for detectors of strange items.

        Args:
            inputs: a batch, or a loader of batches, whose signals are on the CPU.
            **options: `variance`, `per_token` and `batch_size` of `measure_signals`.

        Returns:
            Logits, features, and profiles of variance and attention entropy.
        """
        return model_signals(self, inputs, **options)

    def health(self, inputs: Inputs, labels: Tensor | None = None) -> HealthReport:
        """How near each layer is to collapse, and whether its variance ranks errors; see `measure_health`."""
        return measure_health(self, inputs, labels)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors`, each completely or not at all."""
        save_folder(Path(folder), type(self).__name__, self.config.to_dict(), self.state_dict())

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Load what `save_pretrained` wrote; anything unexpected is an error."""
        folder = Path(folder)
        if (folder / CONVERSION_FILE).is_file():
            got = f"got a converted one ({CONVERSION_FILE}): gpattention.from_pretrained(folder) reads it"
            raise ValueError(f"expected {folder} to hold the model of its config, {got}")
        config = load_config(folder, cls.__name__)
        try:
            model = cls(cls.config_class.from_dict(config))
        except ValueError as error:
            raise ValueError(f"{folder / 'config.json'}: {error}") from error
        load_weights(model, folder / "model.safetensors")
        return model.eval()

    def _blocks(self) -> list[Block]:
        return [block for block in self.blocks if isinstance(block, Block)]

    def _run(
        self, inputs: Inputs, draw: Draw, samples: int, generator: Generator | NoiseSource | None,
        need: tuple[str, ...], seed: Tensor | None = None,
    ) -> tuple[Tensor, tuple[LayerOutput, ...], Tensor | None]:  # fmt: skip
        """The head's input [S * B, E], the output of each layer, and the sum of their regularisers []."""
        check_need(need, NEEDS)
        if "posterior" in need:  # which checks its results when they are asked for
            return self._layer_by_layer(inputs, draw, samples, generator, need, seed)
        return checked_once(
            lambda: self._layer_by_layer(inputs, draw, samples, generator, need, seed),
            self.norm.weight.device,
            lambda found: (found[0], found[2], *(layer.variance for layer in found[1])),
        )

    def _layer_by_layer(
        self, inputs: Inputs, draw: Draw, samples: int, generator: Generator | NoiseSource | None,
        need: tuple[str, ...], seed: Tensor | None,
    ) -> tuple[Tensor, tuple[LayerOutput, ...], Tensor | None]:  # fmt: skip
        blocks = self._blocks()
        if draw != "none" and not self.draws:
            kinds = ", ".join(sorted({block.attention.kind for block in blocks}))
            raise ValueError(f"draw={draw!r} asked of a model without posteriors (its layers: {kinds})")
        check_draw(draw, samples)
        fused = are_fused(blocks, self.norm, need)
        dropouts = (module for module in self.modules() if isinstance(module, nn.Dropout))
        # kernels drop by a seed, which comes from torch's generator, so that `manual_seed` decides
        if fused and seed is None and any(rate_of(dropout) > 0 for dropout in dropouts):
            seed = torch.randint(-(2**62), 2**62, (), device=self.norm.weight.device)
        stream, padding = self._stream(inputs, seed, fused=fused)
        layers, regularizers, before, parted = [], [], None, False
        for index, block in enumerate(blocks):
            # up to the first layer that draws, all samples share one computation
            parts = samples > 1 and not parted and block.attention.draws
            drawing = block.attention.draws  # layers without a posterior are not asked for it
            known = ("regularizer", *(("variance", "posterior") if drawing else ()))
            known += ("weights",) if block.attention.weighs else ()
            options: dict[str, Any] = {
                "draw": draw if drawing else "none", "need": ("output", *(n for n in need if n in known)),
                "key_padding_mask": padding, "samples": samples if parts else 1, "generator": generator,
                "before": before, "seed": seed, "site": first_site(index),
            }  # fmt: skip
            attended = tokens = None
            with _named_failures(index, block):
                if fused:
                    stream, attention = run_block(stream, block, **options)
                else:
                    given: BlockOutput = block(stream.tokens, **options)
                    attention, attended, tokens = given.attention, given.attended, given.tokens
            if parts:  # from here on the samples share the batch axis
                parted = True
                padding = None if padding is None else padding.repeat(samples, 1)
                attended, tokens = (None if x is None else x.flatten(0, 1) for x in (attended, tokens))
            if tokens is not None:
                stream = Stream(tokens)
            states = (attended, tokens) if "tokens" in need else ()
            layers.append(LayerOutput(attention.variance, attention.weights, attention.posterior, *states))
            regularizers += [] if attention.regularizer is None else [attention.regularizer]
            before = block
        # the last block's sum is completed here
        normed = stream.settle(self.norm, seed)[1] if fused else self.norm(stream.tokens)
        total = sum(regularizers[1:], regularizers[0]) if regularizers else None
        return self.pool(normed, padding), tuple(layers), total

    def _stream(self, inputs: Inputs, seed: Tensor | None, *, fused: bool) -> tuple[Stream, Tensor | None]:
        """The input of the first block, its last sum left open if `fused`, and the padding mask."""
        own = type(self).embed is Transformer.embed
        # the embedding of a subclass must be called, and so must dropout with hooks
        unsummed = self._unsummed(inputs) if fused and own and _may_drop(self.dropout) else None
        if unsummed is not None:
            x, bias, positions, padding = unsummed
            added = Added(x, bias, rate_of(self.dropout), EMBEDDING_SITE, inside=True)
            return Stream(positions, added), padding
        if seed is None or not own:
            tokens, padding = self.embed(inputs)
            return Stream(tokens), padding
        tokens, padding = self._tokens(inputs)
        return Stream(drop(self.dropout, tokens, seed, EMBEDDING_SITE)), padding


@contextmanager
def _named_failures(index: int, block: Block) -> Iterator[None]:
    """Numerical errors name the layer."""
    try:
        yield
    except NumericalError as error:
        error.add_note(f"in layer {index} ({block.attention.kind}), where matrices are numbered [item, head]")
        raise


class VisionTransformer(Transformer):
    """Patches, learned positions, pre-LayerNorm blocks, sequence pooling, a linear classifier.

    Args:
        config: the paper's CIFAR-10 model if not given.

    >>> model = VisionTransformer(VisionConfig(attention="cgp"))
    >>> model(images).logits  # images [B, 3, 32, 32] -> [B, 10]
    """

    config_class = VisionConfig

    def __init__(self, config: VisionConfig | None = None) -> None:
        config = VisionConfig() if config is None else config
        super().__init__(config)
        self.vision = config
        self.patches = nn.Conv2d(config.channels, config.width, config.patch, stride=config.patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, config.tokens, config.width))
        self.dropout = nn.Dropout(config.dropout)
        self.attend = nn.Linear(config.width, 1, bias=False)  # a softmax over tokens would not see a bias

    def pool(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """Sequence pooling: a softmax over tokens of one learned score."""
        weights = self.attend(tokens).softmax(-2)  # [B, N, 1]
        if tokens.is_cuda:  # one product instead of three passes
            return (weights.mT @ tokens).squeeze(-2)
        return (weights * tokens).sum(-2)

    def real_tokens(self, inputs: Inputs) -> Tensor:
        """All of them.  [B]"""
        tensor = inputs if isinstance(inputs, Tensor) else next(iter(inputs.values()))
        return torch.full((len(tensor),), self.vision.tokens, device=tensor.device)

    def _unsummed(self, inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None] | None:
        if not self._cuts():
            return None
        x = linear(self._cut(self._images(inputs)), self.patches.weight.flatten(1))  # [B, N, E]
        return x, self.patches.bias, self.positions[0], None

    def _tokens(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Patches with their positions.  [B, N, E]"""
        images = self._images(inputs)
        if images.is_cuda and self._cuts():  # rows of tokens, as everything after wants
            weight = self.patches.weight.flatten(1)  # [E, pixels of a patch]
            return linear(self._cut(images), weight, self.patches.bias) + self.positions, None
        return self.patches(images).flatten(2).mT + self.positions, None

    def _cuts(self) -> bool:
        """Whether the convolution is a linear map of patches that do not overlap."""
        p, conv = (self.vision.patch, self.vision.patch), self.patches
        return is_plain(conv, nn.Conv2d) and conv.kernel_size == conv.stride == p and conv.padding == (0, 0)

    def _images(self, inputs: Inputs) -> Tensor:
        if not isinstance(inputs, Tensor):
            raise ValueError(f"expected a tensor of images, got {type(inputs).__name__}")
        expected = (self.vision.channels, *self.vision.sides)
        if inputs.ndim != 4 or inputs.shape[1:] != expected:
            shape = f"[B, {', '.join(map(str, expected))}]"
            raise ValueError(f"expected images of shape {shape}, got {tuple(inputs.shape)}")
        if not inputs.is_floating_point():
            kind = inputs.dtype
            raise ValueError(f"expected floating-point images, got {kind}: normalise pixels as in training")
        # data are float32, a model may have another type; autocast chooses by itself
        return inputs if autocast_is_on(inputs.device) else inputs.to(self.positions.dtype)

    def _cut(self, images: Tensor) -> Tensor:
        """Patches as rows of pixels, ordered as the convolution's weights are.  [B, N, channels * patch^2]"""
        p = self.vision.patch
        cut = images.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # [B, C, rows, p, columns, p]
        return cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class TextTransformer(Transformer):
    """Word embeddings beside contextual ones, projected, learned positions, blocks, mean over real words.

    Inputs are word indices [B, N], or a mapping with "tokens" [B, N], optionally "padding_mask" [B, N]
    (True = ignore; index 0 is padding when it is left out) and "contextual" [B, N, contextual_width].

    Args:
        config: the paper's CoLA model if not given.

    >>> model = TextTransformer(TextConfig(vocabulary=5000, attention="scgp"))
    >>> model({"tokens": tokens, "padding_mask": padding}).logits  # [B, 2]
    """

    config_class = TextConfig

    def __init__(self, config: TextConfig | None = None) -> None:
        config = TextConfig() if config is None else config
        super().__init__(config)
        self.text = config
        self.words = nn.Embedding(config.vocabulary, config.embedding_width, padding_idx=0)
        self.project = nn.Linear(config.embedding_width + config.contextual_width, config.width)
        self.positions = nn.Parameter(0.02 * torch.randn(1, config.max_length, config.width))
        self.dropout = nn.Dropout(config.dropout)

    def pool(self, tokens: Tensor, padding: Tensor | None) -> Tensor:
        """Mean over real words, zero where there are none."""
        if padding is None:
            return tokens.mean(-2)
        real = ~padding[..., None]
        return torch.where(real, tokens, 0.0).sum(-2) / real.sum(-2).clamp_min(1)

    def real_tokens(self, inputs: Inputs) -> Tensor:
        """Words that are not padding.  [B]"""
        return (~_padding({"tokens": inputs} if isinstance(inputs, Tensor) else inputs)).sum(-1)

    def text_lengths(self, inputs: Inputs) -> Tensor | None:
        """Words up to the last real one, to which inputs may be cut; None if all have one length.  [B]"""
        if any(isinstance(layer, Attention) and layer.one_length for layer in self.modules()):
            return None
        return text_lengths({"tokens": inputs} if isinstance(inputs, Tensor) else inputs)

    def _unsummed(self, inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None] | None:
        if not is_plain(self.project, nn.Linear):
            return None
        words, padding = self._words(inputs)
        x = linear(words, self.project.weight)  # [B, N, E]
        return x, self.project.bias, self.positions[0, : words.shape[1]], padding

    def _tokens(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Projected words with their positions.  [B, N, E]"""
        words, padding = self._words(inputs)
        return self.project(words) + self.positions[:, : words.shape[1]], padding

    def _words(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Embedded words beside contextual embeddings [B, N, W], and where there are none [B, N]."""
        given = {"tokens": inputs} if isinstance(inputs, Tensor) else dict(inputs)
        unknown = sorted(set(given) - {"tokens", "padding_mask", "contextual"})
        if unknown or "tokens" not in given:
            known = "'tokens', 'padding_mask' and 'contextual'"
            raise ValueError(f"expected inputs with {known}, got {sorted(given)}")
        tokens, most = given["tokens"], self.text.max_length
        shape, kind = tuple(tokens.shape), tokens.dtype
        if tokens.ndim != 2 or kind not in (torch.int64, torch.int32):
            raise ValueError(f"expected tokens [B, N] of whole numbers, got {shape} {kind}")
        if shape[1] > most:
            raise ValueError(f"expected at most max_length={most} words, got {shape[1]}")
        self._check_known(tokens)
        padding = _padding(given)
        if padding.dtype != torch.bool or padding.shape != tokens.shape:
            expected = f"expected padding_mask to be bool (True = ignore) of shape {list(shape)}"
            raise ValueError(f"{expected}, got shape {tuple(padding.shape)} and {padding.dtype}")
        words = self.words(tokens)  # [B, N, embedding_width]
        return self._beside_contextual(words, given.get("contextual"), padding), padding

    def _check_known(self, tokens: Tensor) -> None:
        """Refuse words of another vocabulary; not on a GPU, which every pass would have to wait for."""
        if tokens.device.type != "cpu" or tokens.numel() == 0 or checks_are_deferred(tokens):
            return
        least, most = (int(x) for x in tokens.aminmax())
        if least < 0 or most >= self.text.vocabulary:
            last, got = self.text.vocabulary - 1, least if least < 0 else most
            raise ValueError(f"expected tokens from 0 to {last}, the model's vocabulary, got {got}")

    def _beside_contextual(self, words: Tensor, contextual: Tensor | None, padding: Tensor) -> Tensor:
        width = self.text.contextual_width
        if width == 0 and contextual is None:
            return words
        expected = (*words.shape[:2], width)
        if contextual is None or contextual.shape != expected:
            got = None if contextual is None else tuple(contextual.shape)
            raise ValueError(f"expected contextual embeddings of shape {expected}, got {got}")
        # overwritten, not multiplied, so that NaN at padded words does no harm
        contextual = torch.where(padding[..., None], 0.0, contextual.to(words.dtype))
        return torch.cat([words, contextual], -1)


def text_lengths(given: Mapping[str, Tensor]) -> Tensor:
    """Words of each text up to the last that is no padding.  [B]"""
    real = ~_padding(given)  # [B, N]
    return (real * torch.arange(1, real.shape[1] + 1, device=real.device)).amax(-1)


def _padding(given: Mapping[str, Tensor]) -> Tensor:
    """The mask as given, or where the words are index 0.  [B, N]"""
    padding = given.get("padding_mask")
    return given["tokens"] == 0 if padding is None else padding
