"""Converted models are saved by their hosts and come back bit by bit."""

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gpattention
from gpattention.hosts.conversion import Conversion
from gpattention.models import Transformer, VisionConfig, VisionTransformer
from tests.hosts.hosts import Encoder, Host, logits, make

FROM_FOLDER = ["bert", "distilbert", "vit", "own softmax", "own kernel rows", "own text"]
WITH_HOST = ["encoder", "timm"]
READER = r"gpattention\.from_pretrained\(folder\) reads"


def converted(family: str, kind: str = "cgp", **options: Any) -> Host:
    host = make(family)
    gpattention.convert(host.model, kind, **options)
    with torch.no_grad():
        for parameter in host.model.parameters():  # as if trained
            parameter.add_(0.01 * torch.randn_like(parameter))
    host.model.eval()
    return host


def saved(folder: Path, family: str, kind: str = "cgp", **options: Any) -> Any:
    """The converted host, which lies in the folder too."""
    host: Any = converted(family, kind, **options)
    host.model.save_pretrained(folder)
    return host


def load(folder: Path, family: str) -> Any:
    """What a user calls for a folder of this family."""
    return gpattention.from_pretrained(folder, make(family).model if family in WITH_HOST else None)


def check_answers(model: nn.Module, host: Host) -> None:
    assert torch.equal(logits(Host(model, host.inputs, 2, host.call)), logits(host))


ROUND_TRIPS = [
    *((family, "cgp") for family in FROM_FOLDER + WITH_HOST),
    *(("bert", kind) for kind in ("softmax-gp", "direct", "scgp", "kernel", "sgpa")),
]


@pytest.mark.parametrize(("family", "kind"), ROUND_TRIPS)
def test_the_round_trip_is_exact(family: str, kind: str, tmp_path: Path) -> None:
    host = saved(tmp_path, family, kind, **({"num_inducing": (4, 3)} if kind == "scgp" else {}))
    assert list(tmp_path.glob("*.safetensors"))
    again = load(tmp_path, family)
    assert type(again) is type(host.model)
    assert not again.training
    mine, theirs = host.model.state_dict(), again.state_dict()
    assert set(mine) == set(theirs)
    assert all(torch.equal(theirs[name], x) for name, x in mine.items())
    check_answers(again, host)
    if not isinstance(again.train(), Transformer):
        logits(Host(again, host.inputs, 2, host.call))
        assert gpattention.regularizer(again).requires_grad == (kind not in ("softmax-gp", "kernel"))


def test_the_record_is_in_the_config(tmp_path: Path) -> None:
    layers = ["bert.encoder.layer.1.attention.self"]
    host = saved(tmp_path, "bert", "direct", layers=layers, draw="none", noise=0.1)
    record = gpattention.conversion_of(host.model)
    assert record == Conversion.from_dict(json.loads((tmp_path / "config.json").read_text())["gpattention"])
    assert record.layers == tuple(layers)
    assert dict(record.left_alone) == {"bert.encoder.layer.0.attention.self": "not chosen"}
    assert "1 layers are direct attention now, 1 left alone" in str(record)
    assert gpattention.conversion_of(gpattention.from_pretrained(tmp_path)) == record


def test_a_plain_model_of_ours_saved_over_a_converted_one_comes_back_plain(tmp_path: Path) -> None:
    saved(tmp_path, "own softmax")
    plain: Any = make("own softmax").model
    plain.save_pretrained(tmp_path)
    again = gpattention.from_pretrained(tmp_path)
    assert gpattention.conversion_of(again) is None
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in plain.state_dict().items())


def test_the_record_of_another_model_is_refused_by_its_file(tmp_path: Path) -> None:
    saved(tmp_path, "own softmax")
    record = (tmp_path / "conversion.json").read_bytes()
    config = VisionConfig(image_size=8, width=16, heads=2, depth=1, attention="cgp")
    VisionTransformer(config).save_pretrained(tmp_path)
    (tmp_path / "conversion.json").write_bytes(record)
    message = f"{tmp_path / 'conversion.json'}: .*VisionTransformer.*among none, got 'blocks.0.attention'"
    with pytest.raises(ValueError, match=message):
        gpattention.from_pretrained(tmp_path)


def test_the_saved_type_is_kept(tmp_path: Path) -> None:
    model: Any = gpattention.convert(make("encoder").model, "direct").double()
    model.save_pretrained(tmp_path)
    assert {p.dtype for p in load(tmp_path, "encoder").parameters()} == {torch.float64}


@pytest.mark.parametrize("family", ["bert", "encoder", "own softmax"])
def test_missing_unexpected_and_nonfinite_weights_are_errors(family: str, tmp_path: Path) -> None:
    host = saved(tmp_path, family)
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    missing = next(name for name in tensors if name.endswith("noise.raw"))
    changed = {("other" if name == missing else name): x for name, x in tensors.items()}
    save_file(changed, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"noise\.raw"):
        load(tmp_path, family)
    name, parameter = list(host.model.named_parameters())[-1]
    parameter.data.view(-1)[0] = torch.nan
    host.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path}.*: .*finite.*nan in {re.escape(name)}"):
        load(tmp_path, family)


class Masked(nn.Module):
    """A host with a mask of minus infinity, as many have one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = make("encoder").model
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))


def test_masks_may_be_infinite(tmp_path: Path) -> None:
    model: Any = gpattention.convert(Masked(), "cgp")
    model.save_pretrained(tmp_path)
    assert torch.equal(gpattention.from_pretrained(tmp_path, Masked()).mask, model.mask)
    model.mask[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="got nan in mask"):
        gpattention.from_pretrained(tmp_path, Masked())


def test_records_that_ask_for_any_memory_are_refused(tmp_path: Path) -> None:
    saved(tmp_path, "encoder", "scgp", num_inducing=3)
    record = json.loads((tmp_path / "conversion.json").read_text())
    record["options"]["num_inducing"] = 10**12
    (tmp_path / "conversion.json").write_text(json.dumps(record))
    with pytest.raises(ValueError, match=r"conversion\.json: .*at most 1e\+10 parameters, got"):
        load(tmp_path, "encoder")


def encoder() -> nn.Module:
    return make("encoder").model


def config_of(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "config.json").write_text(text)


UNKNOWN = json.dumps({"gpattention": Conversion("cgp").to_dict(), "architectures": ["NoSuchModel"]})


# what is done to the folder of a converted encoder, what it is read with, and what is said
UNREADABLE: list[tuple[Callable[[Path], Any], Callable[[], Any], dict[str, Any], str]] = [
    (lambda folder: None, lambda: None, {}, "expected the host"),
    (lambda folder: None, lambda: Encoder, {}, "got <class .*Encoder"),
    (lambda folder: None, lambda: converted("encoder").model, {}, "expected a host as before"),
    (lambda folder: None, encoder, {"dtype": torch.float16}, "options.*dtype"),
    (lambda folder: (folder / "model.safetensors").write_bytes(b"half"), encoder, {}, "not a whole safete"),
    (lambda folder: (folder / "model.safetensors").unlink(), encoder, {}, "no file"),
    (lambda folder: (folder / "conversion.json").write_text("{"), encoder, {}, r"conversion\.json"),
    (lambda folder: (folder / "conversion.json").write_text("{}"), encoder, {}, r"json: .*format_version"),
    (lambda folder: (folder / "conversion.json").unlink(), encoder, {}, "no record of a conversion"),
    (config_of("[]"), encoder, {}, "expected an object"),
    (config_of("{"), encoder, {}, "not JSON"),
    (config_of('{"gpattention": {"kind": "cgp"}}'), lambda: None, {}, "format_version"),
    (config_of(UNKNOWN), lambda: None, {}, "NoSuchModel"),
]


@pytest.mark.parametrize(("spoil", "host", "options", "message"), UNREADABLE)
def test_folders_that_cannot_be_read(
    spoil: Any, host: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(tmp_path, "encoder")
    spoil(tmp_path)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        gpattention.from_pretrained(tmp_path, host(), **options)
    with pytest.raises(FileNotFoundError, match="no folder"):
        gpattention.from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "softmax"),
        ("draw", "joint"),
        ("seed", 0.5),
        ("options", {"causal": True}),
        ("options", True),
        ("options", "x"),
        ("layers", 3),
        ("left_alone", 7),
        ("more", 1),
    ],
)
def test_records_that_are_refused(field: str, value: Any) -> None:
    plain = {**Conversion("cgp", options={"num_inducing": (2, 3)}).to_dict(), field: value}
    with pytest.raises(ValueError, match=f"{'causal' if isinstance(value, dict) else field}"):
        Conversion.from_dict(plain)


def test_copies_save_themselves(tmp_path: Path) -> None:
    other: Any = copy.deepcopy(converted("encoder").model)
    next(other.parameters()).data.zero_()
    other.save_pretrained(tmp_path)
    assert not bool(next(load(tmp_path, "encoder").parameters()).any())


def test_a_host_that_saves_itself_writes_the_record_too(tmp_path: Path) -> None:
    class Saving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.host = make("encoder").model

        def save_pretrained(self, folder: Path) -> None:
            save_file(self.state_dict(), folder / "model.safetensors")

    model = gpattention.convert(Saving(), "direct")
    model.save_pretrained(tmp_path)
    again = gpattention.from_pretrained(tmp_path, Saving())
    assert set(again.state_dict()) == set(model.state_dict())


def test_our_classes_read_what_they_can_and_name_who_reads_the_rest(tmp_path: Path) -> None:
    host = saved(tmp_path / "kernel", "own kernel rows", "direct")
    check_answers(VisionTransformer.from_pretrained(tmp_path / "kernel"), host)
    saved(tmp_path / "softmax", "own softmax", "direct")
    with pytest.raises(ValueError, match=f"{READER} it"):
        VisionTransformer.from_pretrained(tmp_path / "softmax")


@pytest.mark.parametrize("family", ["bert", "bert eager", "roberta", "distilbert", "electra", "vit", "deit"])
def test_the_hosts_classes_name_who_reads_a_converted_folder(family: str, tmp_path: Path) -> None:
    """Of every family of transformers; they built a plain model around weights trained with another."""
    import transformers

    host = saved(tmp_path, family)
    task = "Image" if "Image" in type(host.model).__name__ else "Sequence"
    auto = getattr(transformers, f"AutoModelFor{task}Classification")
    for cls in (type(host.model), transformers.AutoModel, auto):
        with pytest.raises(ValueError, match=READER):
            cls.from_pretrained(tmp_path)
    for found in (None, type(host.model)):
        again: Any = gpattention.from_pretrained(tmp_path, found)
        check_answers(again, host)
    again.save_pretrained(tmp_path / "again")
    with pytest.raises(ValueError, match=READER):
        type(host.model).from_pretrained(tmp_path / "again")


def test_a_host_that_the_folder_names_is_not_taken(tmp_path: Path) -> None:
    saved(tmp_path, "bert")
    built = make("bert").model
    with pytest.raises(ValueError, match=r"got a BertForSequence.*: call gpattention\.from_pretrained\('"):
        gpattention.from_pretrained(tmp_path, built)
    assert gpattention.conversion_of(built) is None
    with pytest.raises(ValueError, match=r"such as \['BertForSequenceClassification'\], got .*Linear"):
        gpattention.from_pretrained(tmp_path, nn.Linear)


def test_a_class_of_ones_own_reads_its_folder(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    class Mine(BertForSequenceClassification):
        pass

    host = make("bert")
    model = gpattention.convert(Mine(host.model.config), "direct").eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"got \['Mine'\]: gpattention\.from_pretrained\(folder, Class\)"):
        gpattention.from_pretrained(tmp_path)
    again = gpattention.from_pretrained(tmp_path, Mine)
    assert type(again) is Mine
    check_answers(again, Host(model, host.inputs, 2))


@pytest.mark.parametrize("family", ["bert", "vit", "encoder", "timm"])
def test_a_plain_model_saved_over_a_converted_one_is_named(family: str, tmp_path: Path) -> None:
    saved(tmp_path, family)
    plain: Any = make(family).model
    message = "weights of a plain model.*saved over the converted one.*gpattention.convert"
    if family in WITH_HOST:
        save_file(plain.state_dict(), tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            load(tmp_path, family)
        return
    # whoever insists gets the host's attention, and its record with it
    type(plain).from_pretrained(tmp_path, attn_implementation="eager").save_pretrained(tmp_path)
    for found in (None, type(plain)):
        with pytest.raises(ValueError, match=message):
            gpattention.from_pretrained(tmp_path, found)
    type(plain).from_pretrained(tmp_path)  # as the message says
    plain.base_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no record of a conversion"):
        gpattention.from_pretrained(tmp_path)


def test_weights_in_several_files_come_back(tmp_path: Path) -> None:
    host = converted("bert")
    model, plain = host.model, make("bert").model
    model.save_pretrained(tmp_path, max_shard_size="5KB")  # type: ignore[operator]
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check_answers(gpattention.from_pretrained(tmp_path), host)
    plain.config.gpattention = model.config.gpattention  # type: ignore[union-attr]
    plain.save_pretrained(tmp_path / "plain", max_shard_size="5KB")  # type: ignore[operator]
    with pytest.raises(ValueError, match="weights of a plain model"):
        gpattention.from_pretrained(tmp_path / "plain")
