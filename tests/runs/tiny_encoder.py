"""A random BERT with a tokenizer for the words of `tiny_cola`, saved as transformers saves one."""

from pathlib import Path

WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat a dog one bird old my did didn ' n t sat ."


def write_tiny_encoder(folder: Path) -> Path:
    import torch
    from tokenizers import BertWordPieceTokenizer
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    folder.mkdir(parents=True)
    pieces = BertWordPieceTokenizer({word: i for i, word in enumerate(WORDS.split())}, lowercase=True)
    PreTrainedTokenizerFast(
        tokenizer_object=pieces._tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
        sep_token="[SEP]", mask_token="[MASK]",
    ).save_pretrained(folder)  # fmt: skip
    config = BertConfig(
        vocab_size=len(WORDS.split()), hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32, initializer_range=0.2,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
    return folder
