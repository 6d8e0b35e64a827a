"""`nn.TransformerEncoderLayer` and `nn.TransformerEncoder` with any kind of attention.

They are PyTorch's own classes, with the same arguments, parts and names of parameters.  Softmax attention
stays `nn.MultiheadAttention`; other kinds replace it as in a converted model (`convert`), and their new
parameters are called `self_attn.gpattention...`.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import relu

from gpattention.attention.base import check_tokens
from gpattention.checks import check_choice, check_count, check_tensor
from gpattention.models import converted
from gpattention.models.converted import ATTRIBUTE, TrainingDraw
from gpattention.models.multihead import ConvertedMultihead, key_projection
from gpattention.models.projected import KINDS

ENCODER_KINDS = ("softmax", *KINDS)


class EncoderLayer(nn.TransformerEncoderLayer):
    """`nn.TransformerEncoderLayer` with attention of any kind; it takes and returns tensors.

    In training a Gaussian-process kind draws its output, and keeps the regulariser of its last call for
    `gpattention.regularizer(model)`; in evaluation it returns the mean.  `gpattention.predict(model, inputs)`
    draws.  Draws replace the dropout of attention weights; all other dropout is PyTorch's.

    Masks are PyTorch's.  A kind but softmax has one posterior per head: it takes padding, and with
    `causal=True` (softmax-gp, kernel, and direct or cgp with `normalize="rows"` or `"none"`) lets token i see
    tokens up to i, where a causal `src_mask` may say so too.

    Args:
        d_model: width of the tokens; a multiple of `nhead`.
        nhead: number of heads.
        dim_feedforward: width of the feed-forward part's hidden layer.
        dropout: probability of dropping an entry.
        activation: of the hidden layer, "relu", "gelu" or a function.
        layer_norm_eps: of both LayerNorms.
        batch_first: tokens are [B, N, E] instead of [N, B, E].
        norm_first: apply LayerNorm before attention and feed-forward part instead of after them.
        bias: whether linear maps and LayerNorms have biases.
        device: where parameters live.
        dtype: their type.
        kind: "cgp", "direct", "scgp", "softmax-gp", "kernel", "sgpa" or "softmax".
        draw: in training draw the output ("independent") or return the mean ("none").
        **options: of the kind, as of `convert`: `noise`, `prior_scale`, `regularizer`, `num_inducing`,
            `causal`, ...

    Raises:
        ValueError: sizes do not fit, the kind is unknown, or it does not take an option.

    >>> layer = EncoderLayer(d_model=128, nhead=4, batch_first=True, kind="cgp")
    >>> layer(tokens, src_key_padding_mask=padding)  # [B, N, 128]
    """

    from_scratch = False  # whether Gaussian-process attention starts from untrained weights

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        kind: str = "cgp",
        draw: TrainingDraw = "independent",
        **options: Any,
    ) -> None:
        d_model, nhead = check_count("d_model", d_model), check_count("nhead", nhead)
        if d_model % nhead:
            raise ValueError(f"expected d_model a multiple of nhead, got {d_model} and {nhead}")
        super().__init__(
            d_model, nhead, check_count("dim_feedforward", dim_feedforward), dropout, activation,
            layer_norm_eps, batch_first, norm_first, bias, device, dtype,
        )  # fmt: skip
        self._attend_by(kind, draw, options)
        self.from_scratch = kind != "softmax" and KINDS[kind].draws

    @classmethod
    def from_torch(
        cls,
        layer: nn.TransformerEncoderLayer,
        kind: str = "cgp",
        *,
        draw: TrainingDraw = "independent",
        example: Tensor | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """Copy one of PyTorch's layers, with all its weights and another kind of attention.

        It starts as in `convert`: softmax-gp, direct and cgp begin with the mean of the layer.

        Args:
            layer: an `nn.TransformerEncoderLayer`, or one of ours of kind softmax; it is not changed.
            kind: as in the class.
            draw: as in the class.
            example: tokens such as the layer is called with, for scgp and sgpa: inducing inputs start there.
            seed: of the initial inducing inputs.
            **options: of the kind.

        Returns:
            The new layer, in the mode of the old one.

        Raises:
            ValueError: for other modules, and as in the class.

        >>> EncoderLayer.from_torch(trained, kind="softmax-gp")
        """
        made = cls._taken(layer, kind, draw, options)
        if example is not None:
            converted.place_inducing(made, partial(made, example), seed)
        elif kind != "softmax":
            converted.hint_at_example(kind, options)
        return made

    @classmethod
    def _taken(
        cls, layer: nn.TransformerEncoderLayer, kind: str, draw: TrainingDraw, options: dict[str, Any]
    ) -> Self:
        made: Self = _copied(cls, layer, nn.TransformerEncoderLayer)
        made.from_scratch = False
        if type(made.self_attn) is not nn.MultiheadAttention:
            raise ValueError(f"expected a layer with softmax attention, got {made.kind!r}")
        made._attend_by(kind, draw, options)
        return made

    @property
    def kind(self) -> str:
        """The kind of its attention."""
        own = self.self_attn._modules.get(ATTRIBUTE)
        return "softmax" if own is None else str(own.kind)

    def _attend_by(self, kind: str, draw: TrainingDraw, options: dict[str, Any]) -> None:
        """Replace softmax attention by another kind."""
        check_choice("kind", kind, ENCODER_KINDS)
        check_choice("draw", draw, converted.TRAINING_DRAWS)
        if kind == "softmax":
            if options:
                raise ValueError(f"expected no options for kind='softmax', got {', '.join(options)}")
            return
        host = self.self_attn
        layer = converted.make_layer(
            kind, host, host.num_heads, host.head_dim, keys=key_projection(host, "self_attn"),
            scale=host.head_dim**-0.5, draw=draw, name="", options=options,
        )  # fmt: skip
        self.self_attn = ConvertedMultihead(host, layer)  # type: ignore[assignment]
        converted.Passes().watch(self, [layer])
        self.register_forward_pre_hook(_check_call, with_kwargs=True)

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        """Loaded weights have been trained."""
        super()._load_from_state_dict(*args, **options)
        self.from_scratch = False

    def extra_repr(self) -> str:
        """Its kind, for printing."""
        return f"kind={self.kind!r}"


class Encoder(nn.TransformerEncoder):
    """`nn.TransformerEncoder` of such layers: copies of one layer, which do not share weights.

    Args:
        encoder_layer: the layer to copy, an `EncoderLayer` or PyTorch's own.
        num_layers: number of copies.
        norm: applied to the output of the last layer.
        enable_nested_tensor: let PyTorch leave out padding in evaluation, if all layers are softmax.
        mask_check: check before that whether all padding is at the end.

    Raises:
        ValueError: the number of layers is not a positive whole number.

    >>> encoder = Encoder(EncoderLayer(128, 4, batch_first=True, kind="cgp"), num_layers=2)
    >>> encoder(tokens, src_key_padding_mask=padding)  # [B, N, 128]
    """

    def __init__(
        self,
        encoder_layer: nn.TransformerEncoderLayer,
        num_layers: int,
        norm: nn.Module | None = None,
        enable_nested_tensor: bool = True,
        mask_check: bool = True,
    ) -> None:
        nested = enable_nested_tensor and not converted.converted_layers(encoder_layer)
        super().__init__(encoder_layer, check_count("num_layers", num_layers), norm, nested, mask_check)

    @classmethod
    def from_torch(
        cls,
        encoder: nn.TransformerEncoder,
        kind: str = "cgp",
        *,
        draw: TrainingDraw = "independent",
        example: Tensor | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """Copy one of PyTorch's encoders, with all its weights and another kind of attention.

        Args:
            encoder: an `nn.TransformerEncoder`; it is not changed.
            kind: of all layers, as in `EncoderLayer`; assign to `layers[i]` to mix kinds.
            example: tokens such as the encoder is called with, as in `EncoderLayer.from_torch`.
            seed: of the initial inducing inputs.
            draw: as in `EncoderLayer`.
            **options: of the kind.

        Returns:
            The new encoder, in the mode of the old one.

        Raises:
            ValueError: for other modules, and as in `EncoderLayer`.

        >>> Encoder.from_torch(trained, kind="cgp", noise=0.01)
        """
        made = _copied(cls, encoder, nn.TransformerEncoder)
        made.layers = nn.ModuleList(
            EncoderLayer._taken(layer, kind, draw, options) for layer in encoder.layers
        )
        made.layers.train(encoder.layers.training)
        made.use_nested_tensor = made.use_nested_tensor and kind == "softmax"
        if example is not None:
            converted.place_inducing(made, partial(made, example), seed)
        elif kind != "softmax":
            converted.hint_at_example(kind, options)
        return made


def _check_call(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse tokens and padding that do not fit, before a matrix product does in its own words."""
    named = dict(zip(("src", "src_mask", "src_key_padding_mask"), args, strict=False)) | kwargs
    src: Any = named.get("src")
    padding = named.get("src_key_padding_mask")
    check_tensor("src", src)
    axes, width = 2 if src.ndim == 2 else 3, layer.self_attn.embed_dim
    check_tokens("src", src, axes, width, layer.norm1.weight.dtype, owner="layer")
    batch_first = axes == 2 or layer.self_attn.batch_first
    expected = tuple(src.shape[:-1]) if batch_first else (src.shape[1], src.shape[0])
    if padding is not None and tuple(padding.shape) != expected:
        shape = list(expected)
        raise ValueError(f"expected src_key_padding_mask of shape {shape}, got {tuple(padding.shape)}")


def _copied(cls: type[Any], module: nn.Module, expected: type[nn.Module]) -> Any:
    """A copy of a module as an object of our class."""
    if not isinstance(module, expected) or type(module).forward is not expected.forward:
        got = type(module).__name__ + (" with a forward of its own" if isinstance(module, expected) else "")
        pairs = {nn.TransformerEncoder: "Encoder", nn.TransformerEncoderLayer: "EncoderLayer"}
        fits = [name for each, name in pairs.items() if each is not expected and isinstance(module, each)]
        hint = f": {fits[0]}.from_torch takes it" if fits else ""
        raise ValueError(f"expected an nn.{expected.__name__} to start from, got {got}{hint}")
    made = object.__new__(cls)
    vars(made).update(vars(deepcopy(module)))
    return made
