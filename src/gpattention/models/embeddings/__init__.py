"""Text in: vocabularies, and frozen embeddings of words in their sentences.

A model's input is its own learned token table (indices from `Vocabulary.encode`), beside which a
`ContextualEmbedding` may stand: GloVe, ELMo, a local Hugging Face encoder, or none.
"""

from gpattention.models.embeddings.contextual import CachedEmbedding, ContextualEmbedding, NoEmbedding, pad
from gpattention.models.embeddings.elmo import ElmoEmbedding
from gpattention.models.embeddings.huggingface import HuggingFaceEmbedding
from gpattention.models.embeddings.vocabulary import PADDING, UNKNOWN, GloveEmbedding, Vocabulary, words

__all__ = [
    "PADDING", "UNKNOWN", "CachedEmbedding", "ContextualEmbedding", "ElmoEmbedding", "GloveEmbedding",
    "HuggingFaceEmbedding", "NoEmbedding", "Vocabulary", "pad", "words",
]  # fmt: skip
