"""What every reader of text is given: sentences, each a sequence of words."""

from collections.abc import Sequence

Sentences = Sequence[Sequence[str]]


def check_sentences(sentences: Sentences) -> None:
    """Raise `ValueError` unless these are lists of non-empty words, none of them empty.

    A string is itself a sequence of strings, so an unsplit sentence would pass for its letters: refuse it.
    So is a sentence without words: a row of nothing but padding has no softmax.
    """
    if isinstance(sentences, str):
        raise ValueError(f"expected sentences to be lists of words, got the string {sentences!r}")
    for i, sentence in enumerate(sentences):
        if isinstance(sentence, str):
            raise ValueError(
                f"expected sentences[{i}] to be a list of words, got the string {sentence!r}: split it "
                "with words(text)"
            )
        if len(sentence) == 0:
            raise ValueError(f"expected sentences[{i}] to hold at least one word, got none")
        for j, word in enumerate(sentence):
            if not isinstance(word, str) or not word:
                raise ValueError(f"expected sentences[{i}][{j}] to be a non-empty string, got {word!r}")
