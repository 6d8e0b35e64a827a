"""Read a converted model back: the host is built, the recorded conversion done again, every weight loaded."""

from pathlib import Path
from typing import Any

from torch import nn

from gpattention.adopt.conversion import RECORD, Conversion
from gpattention.adopt.convert import conversion_of, convert
from gpattention.adopt.storage import (
    WEIGHTS_FILE,
    load_weights,
    no_record,
    own_class,
    own_host,
    plain_weights,
    read_config,
    read_record,
)
from gpattention.models.storage import CONVERSION_FILE, check_finite


def from_pretrained(
    folder: str | Path, host: nn.Module | type[nn.Module] | None = None, **options: Any
) -> nn.Module:
    """The converted model a folder holds, in evaluation mode.

    For Hugging Face hosts and our own transformers the folder tells everything; for any other, `host` is the
    model built as it was before the conversion, and is converted in place.  `options` are passed on to the
    `from_pretrained` of a Hugging Face host (`dtype`, `device_map`), and `host` may be its class, where that
    is not one of transformers.  Weights that are missing or unexpected are errors.

    >>> model.save_pretrained("folder")
    >>> model = gpattention.from_pretrained("folder")
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    config, record = read_config(folder), read_record(folder)
    if isinstance(config.get(RECORD), dict) and not isinstance(host, nn.Module):
        return _huggingface(folder, config, host, **options)
    if isinstance(config.get(RECORD), dict) and record is None:
        raise ValueError(
            f"expected no host for {folder}, whose config.json tells it, got a {type(host).__name__}: "
            f"call gpattention.from_pretrained({str(folder)!r})"
        )
    if options:
        raise ValueError(f"expected no options for this folder, got {', '.join(options)}")
    cls = own_class(config)
    if cls is not None and record is None:
        return cls.from_pretrained(folder)  # from kernel attention: its own config tells all
    if record is None:
        raise ValueError(no_record(folder, config))
    if cls is None and not isinstance(host, nn.Module):
        found = (
            "none" if host is None else f"the class {host.__name__}" if isinstance(host, type) else repr(host)
        )
        raise ValueError(
            f"expected the host of {folder}, built as before the conversion, got {found}: "
            "gpattention.from_pretrained(folder, host)"
        )
    model = host if isinstance(host, nn.Module) else own_host(folder, cls)  # type: ignore[arg-type]
    again(model, record, folder / CONVERSION_FILE)
    try:
        load_weights(model, folder / WEIGHTS_FILE)
    except ValueError as error:
        raise ValueError(f"{error}{plain_weights(folder, record)}") from error
    return model.eval()


def again(model: nn.Module, record: Conversion, source: Path) -> None:
    """Do a recorded conversion on a host of the same build; `source` is the file that holds the record."""
    if conversion_of(model) is not None:
        raise ValueError("expected a host as before the conversion, got one that is converted")
    try:
        convert(
            model, record.kind, draw=record.draw, layers=record.layers, seed=record.seed, **record.options
        )
    except ValueError as error:
        raise ValueError(
            f"{source}: expected the record of a conversion of this {type(model).__name__}, got one that it "
            f"does not take: {error}"
        ) from error


def _huggingface(
    folder: Path, config: dict[str, Any], host: type[nn.Module] | None, **options: Any
) -> nn.Module:
    """Transformers' own loading, of a class that converts itself before its weights come."""
    import transformers

    record = Conversion.from_dict(config[RECORD])
    names = config.get("architectures") or []
    cls: Any = host or (getattr(transformers, names[0], None) if names else None)
    if cls is None:
        raise ValueError(
            f"{folder / 'config.json'}: expected architectures to name a class of transformers, got {names}: "
            "gpattention.from_pretrained(folder, Class) names another"
        )
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
        raise ValueError(
            f"expected the host's class to be one of transformers' models, such as {names}, got {cls!r}: "
            f"call gpattention.from_pretrained({str(folder)!r})"
        )

    class Converting(cls):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.__class__ = cls  # it was needed to be here at this moment only
            again(self, record, folder / "config.json")

    # transformers asks the class for its name here and there
    Converting.__name__, Converting.__qualname__, Converting.__module__ = (
        cls.__name__, cls.__qualname__, cls.__module__
    )  # fmt: skip
    options = {
        "attn_implementation": None,
        **options,
    }  # the host's own first, instead of SAVED_IMPLEMENTATION
    try:
        model, told = Converting.from_pretrained(folder, output_loading_info=True, **options)
    except ValueError as error:
        if happened := plain_weights(folder, record):
            raise ValueError(f"{error}{happened}") from error
        raise
    wrong = {
        name: sorted(map(str, told[name])) for name in ("missing_keys", "unexpected_keys", "mismatched_keys")
    }
    if any(wrong.values()):
        raise ValueError(
            f"{folder}: expected weights that fit the converted model, got {wrong}"
            f"{plain_weights(folder, record)}"
        )
    buffers = dict(model.named_buffers())
    check_finite(folder, {**dict(model.named_parameters()), **buffers}, infinite=buffers)
    loaded: nn.Module = model.eval()
    return loaded
