"""Tiny random language models of every family, the same at every call."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn

VOCABULARY, ITEMS, TOKENS = 41, 3, 9
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16,
    "vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip
SHARED = {**SIZES, "num_key_value_heads": 2, "head_dim": 8}
WINDOW = {**SHARED, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {
    "n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2,
    "n_positions": 64,
}  # fmt: skip
SEQ2SEQ = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": VOCABULARY,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
GPT_OSS = {**WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1, "attn_implementation": "eager"}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHead", GPT2),
    "gpt2 eager": ("GPT2LMHead", {**GPT2, "attn_implementation": "eager"}),
    "llama": ("LlamaForCausalLM", SIZES),
    "grouped llama": ("LlamaForCausalLM", SHARED),
    "eager llama": ("LlamaForCausalLM", {**SHARED, "attn_implementation": "eager"}),
    "multi-query llama": ("LlamaForCausalLM", {**SHARED, "num_key_value_heads": 1}),
    "mistral": ("MistralForCausalLM", {**SHARED, "sliding_window": 4}),
    "qwen2": ("Qwen2ForCausalLM", SHARED),
    "qwen3": ("Qwen3ForCausalLM", SHARED),
    "gemma2": ("Gemma2ForCausalLM", {**WINDOW, "attn_logit_softcapping": None}),
    "gemma3": ("Gemma3ForCausalLM", WINDOW),
    "phi": ("PhiForCausalLM", SIZES),
    "gpt-neox": ("GPTNeoXForCausalLM", SIZES),
    "opt": ("OPTForCausalLM", {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 16,
        "vocab_size": VOCABULARY, "word_embed_proj_dim": 32, "max_position_embeddings": 64,
    }),
    "gpt-oss": ("GptOssForCausalLM", GPT_OSS),
}  # fmt: skip


def decoder(name: str, **changes: Any) -> Any:
    """A language model in evaluation mode, its weights larger than usual so that attention is not flat."""
    cls, sizes = DECODERS[name]
    stem = cls.removesuffix("LMHead").removesuffix("ForCausalLM")
    stem = "Gemma3Text" if stem == "Gemma3" else stem
    return build(cls + ("Model" if cls.endswith("LMHead") else ""), stem, {**sizes, **changes})


def build(cls: str, stem: str, sizes: dict[str, Any]) -> Any:
    """A model of transformers with weights that were drawn for it."""
    torch.manual_seed(0)
    model = getattr(tf, cls)(getattr(tf, f"{stem}Config")(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
            else:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def bart() -> Any:
    """An encoder-decoder of texts."""
    return build("BartForConditionalGeneration", "Bart", {**SEQ2SEQ, "max_position_embeddings": 64})


def whisper() -> Any:
    """An encoder-decoder of sounds."""
    sizes = {**SEQ2SEQ, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 64}
    return build("WhisperForConditionalGeneration", "Whisper", sizes)


def texts(padding: str | None = None) -> dict[str, Tensor]:
    """Ids, and a mask where some are padding."""
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (ITEMS, TOKENS), generator=made)
    if padding is None:
        return {"input_ids": ids}
    real = torch.arange(TOKENS) < torch.tensor([TOKENS, 4, 6])[:, None]  # [B, N]
    real = real.flip(-1) if padding == "left" else real
    given = {"input_ids": torch.where(real, ids, 0), "attention_mask": real.long()}
    if padding == "left":
        given["position_ids"] = (real.long().cumsum(-1) - 1).clamp_min(0)
    return given


def packed() -> dict[str, Tensor]:
    """Three texts in one row, as transformers knows them by their positions."""
    lengths = (4, 3, 2)
    return {
        "input_ids": texts()["input_ids"],
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).expand(ITEMS, -1).contiguous(),
    }


@dataclass(frozen=True)
class Both:
    """An encoder-decoder and what it takes."""

    model: nn.Module
    inputs: dict[str, Tensor]


def sequences(name: str) -> Both:
    """BART or Whisper with sources and targets."""
    targets = texts("right")
    ids = {"decoder_input_ids": targets["input_ids"], "decoder_attention_mask": targets["attention_mask"]}
    if name == "bart":
        source = texts("right")
        sources = {n: x.flip(0) for n, x in source.items()}
        return Both(bart(), {**sources, **ids})
    sound = torch.randn(ITEMS, 4, 16, generator=torch.Generator().manual_seed(2))
    return Both(whisper(), {"input_features": sound, **ids})


CASES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "no padding": texts,
    "right padding": lambda: texts("right"),
    "left padding": lambda: texts("left"),
    "packed": packed,
}
