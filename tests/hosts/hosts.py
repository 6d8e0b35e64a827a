"""Tiny random hosts of every family, each with inputs, padding included where the family has any."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from gpattention.hosts.families.base import AttentionCall, Site
from gpattention.hosts.predict import call_model
from gpattention.models import AttentionConfig, TextConfig, TextTransformer, VisionConfig, VisionTransformer

ITEMS, TOKENS, CLASSES = 5, 7, 3
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
REAL = torch.arange(TOKENS) < torch.tensor([7, 5, 7, 3, 4])[:, None]  # [B, N]


@dataclass(frozen=True)
class Host:
    """A classifier with what it takes."""

    model: nn.Module
    inputs: Any
    sites: int
    call: Callable[[Any, Any], Any] = call_model


class Encoder(nn.Module):
    """A classifier around `nn.TransformerEncoder`."""

    def __init__(self, batch_first: bool = True, nested: bool = False) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)
        self.head = nn.Linear(16, CLASSES)
        self.batch_first = batch_first

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        if not self.batch_first:
            x = x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.head(x[:, 0] if self.batch_first else x[0])


class TimmAttention(nn.Module):
    """The layout and forward of timm's `Attention`, which cannot be installed beside this torch."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.fused_attn = False
        self.qkv = nn.Linear(dim, dim * 3)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim), nn.LayerNorm(self.head_dim)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            rate = self.attn_drop.p if self.training else 0.0
            x = scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=rate)
        else:
            attn = (q * self.scale) @ k.transpose(-2, -1)
            attn = attn if attn_mask is None else attn.masked_fill(~attn_mask, -torch.inf)
            x = self.attn_drop(attn.softmax(dim=-1)) @ v
        return self.proj_drop(self.proj(x.transpose(1, 2).reshape(B, N, C)))


class TimmViT(nn.Module):
    """Two such layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([TimmAttention(16, 2), TimmAttention(16, 2)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x[:, 0])


def bert(head: str = "ForSequenceClassification", **options: Any) -> Any:
    """A BERT with this head, the same at every call."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(**{**SIZES, "vocab_size": 40, "num_labels": CLASSES, **options})
    return getattr(transformers, f"Bert{head}")(config)


def _bert_like(name: str, implementation: str = "sdpa") -> Host:
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 40, "num_labels": CLASSES, "attn_implementation": implementation}
    if name == "DistilBert":
        sizes |= {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32}
    else:
        sizes |= {**SIZES, "max_position_embeddings": 32}
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForSequenceClassification")(config)
    return Host(model, {"input_ids": torch.randint(3, 40, (ITEMS, TOKENS)), "attention_mask": REAL.long()}, 2)


def _vit_like(name: str) -> Host:
    import transformers

    sizes = {**SIZES, "image_size": 8, "patch_size": 4, "num_labels": CLASSES}
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, f"{name}ForImageClassification")(config)
    return Host(model, {"pixel_values": torch.randn(ITEMS, 3, 8, 8)}, 2)


def _encoder(batch_first: bool) -> Host:
    inputs = {"x": torch.randn(ITEMS, TOKENS, 16), "padding": ~REAL}
    return Host(Encoder(batch_first), inputs, 2)


def _own_vision(kind: str, **options: Any) -> Host:
    config = VisionConfig(
        classes=CLASSES, depth=2, width=16, heads=2, image_size=8, channels=1, patch=2, dropout=0.1,
        attention=AttentionConfig(kind, options),
    )  # fmt: skip
    return Host(VisionTransformer(config), torch.randn(ITEMS, 1, 8, 8), 2)


def _own_text() -> Host:
    config = TextConfig(
        classes=CLASSES, depth=2, width=16, heads=2, vocabulary=40, embedding_width=8, max_length=TOKENS,
        attention="softmax",
    )  # fmt: skip
    ids = torch.randint(2, 40, (ITEMS, TOKENS))
    ids[1, 5:], ids[3, 3:] = 0, 0
    return Host(TextTransformer(config), ids, 2)


HOSTS: dict[str, Callable[[], Host]] = {
    "bert": lambda: _bert_like("Bert"),
    "bert eager": lambda: _bert_like("Bert", "eager"),
    "roberta": lambda: _bert_like("Roberta"),
    "distilbert": lambda: _bert_like("DistilBert"),
    "electra": lambda: _bert_like("Electra"),
    "vit": lambda: _vit_like("ViT"),
    "deit": lambda: _vit_like("DeiT"),
    "encoder": lambda: _encoder(True),
    "encoder, batch second": lambda: _encoder(False),
    "timm": lambda: Host(TimmViT(), torch.randn(ITEMS, TOKENS, 16), 2),
    "own softmax": lambda: _own_vision("softmax"),
    "own text": _own_text,
    "own kernel rows": lambda: _own_vision("kernel"),
    "own kernel": lambda: _own_vision("kernel", normalize="none"),
    "own ard kernel": lambda: _own_vision("kernel", normalize="none", kernel="ard_rbf"),
    "own exp_dot": lambda: _own_vision("kernel", normalize="none", kernel="exp_dot"),
    "own exp_dot rows": lambda: _own_vision("kernel", kernel="exp_dot"),
}


def make(name: str) -> Host:
    """The host of that name, larger than life: weights spread enough for attention to be selective."""
    torch.manual_seed(0)
    host = HOSTS[name]()
    with torch.no_grad():
        for parameter in host.model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3 if float(parameter.std()) < 0.05 else 1)
    return host


def logits(host: Host, inputs: Any = None) -> Tensor:
    """What the host answers, by default to its own inputs.  [B, C]"""
    output = host.call(host.model, host.inputs if inputs is None else inputs)
    return output if isinstance(output, Tensor) else output.logits


def some(inputs: Any, chosen: slice) -> Any:
    """Some of the items."""
    return inputs[chosen] if isinstance(inputs, Tensor) else {name: x[chosen] for name, x in inputs.items()}


def pass_on(site: Site, call: AttentionCall) -> Tensor:
    """A hook that changes nothing."""
    return call.mean
