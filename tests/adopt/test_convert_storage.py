"""Converted models are saved by their hosts and come back bit by bit."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gpattention
from gpattention.adopt.conversion import Conversion
from gpattention.models import Transformer, VisionConfig, VisionTransformer
from tests.adopt.hosts import Encoder, Host, make
from tests.adopt.test_convert_families import logits

SELF_TOLD = ["bert", "distilbert", "vit", "own softmax", "own kernel rows", "own text"]
WITH_HOST = ["encoder", "timm"]


def converted(family: str, kind: str = "cgp", **options: object) -> Host:
    host = make(family)
    gpattention.convert(host.model, kind, **options)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in host.model.parameters():  # as if trained
            parameter.add_(0.01 * torch.randn_like(parameter))
    host.model.eval()
    return host


@pytest.mark.parametrize("family", SELF_TOLD + WITH_HOST)
def test_the_round_trip_is_exact(family: str, tmp_path: Path) -> None:
    host = converted(family)
    host.model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert list(tmp_path.glob("*.safetensors"))
    again = gpattention.from_pretrained(tmp_path, make(family).model if family in WITH_HOST else None)
    assert type(again) is type(host.model)
    assert not again.training
    mine, theirs = host.model.state_dict(), again.state_dict()
    assert set(mine) == set(theirs)
    assert all(torch.equal(theirs[name], x) for name, x in mine.items())
    assert torch.equal(logits(Host(again, host.inputs, 2, host.call)), logits(host))
    again.train()
    if not isinstance(again, Transformer):
        logits(Host(again, host.inputs, 2, host.call))
        assert gpattention.regularizer(again).requires_grad


@pytest.mark.parametrize("kind", ["softmax-gp", "direct", "scgp", "kernel", "sgpa"])
def test_every_kind_comes_back(kind: str, tmp_path: Path) -> None:
    options = {"num_inducing": (4, 3)} if kind == "scgp" else {}
    host = converted("bert", kind, **options)
    host.model.save_pretrained(tmp_path)  # type: ignore[operator]
    again = gpattention.from_pretrained(tmp_path)
    assert torch.equal(logits(Host(again, host.inputs, 2)), logits(host))


def test_the_record_is_in_the_config(tmp_path: Path) -> None:
    host = converted("bert", "direct", layers=["bert.encoder.layer.1.attention.self"], draw="none", noise=0.1)
    host.model.save_pretrained(tmp_path)  # type: ignore[operator]
    plain = json.loads((tmp_path / "config.json").read_text())["gpattention"]
    record = gpattention.conversion_of(host.model)
    assert record == Conversion.from_dict(plain)
    assert record.layers == ("bert.encoder.layer.1.attention.self",)
    assert dict(record.left_alone) == {"bert.encoder.layer.0.attention.self": "not chosen"}
    assert "1 layers are direct attention now, 1 left alone" in str(record)
    again = gpattention.from_pretrained(tmp_path)
    assert gpattention.conversion_of(again) == record


def test_a_plain_model_saved_over_a_converted_one_comes_back_plain(tmp_path: Path) -> None:
    converted("own softmax").model.save_pretrained(tmp_path)  # type: ignore[operator]
    plain = make("own softmax").model
    assert isinstance(plain, VisionTransformer)
    plain.save_pretrained(tmp_path)
    again = gpattention.from_pretrained(tmp_path)
    assert gpattention.conversion_of(again) is None
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in plain.state_dict().items())


def test_the_record_of_another_model_is_refused_by_its_file(tmp_path: Path) -> None:
    converted("own softmax").model.save_pretrained(tmp_path)  # type: ignore[operator]
    record = (tmp_path / "conversion.json").read_bytes()
    VisionTransformer(
        VisionConfig(image_size=8, width=16, heads=2, depth=1, attention="cgp")
    ).save_pretrained(tmp_path)
    (tmp_path / "conversion.json").write_bytes(record)
    message = (
        f"{tmp_path / 'conversion.json'}: expected the record of a conversion of this VisionTransformer.*"
        "no layers of a model without softmax attention, got 'blocks.0.attention'"
    )
    with pytest.raises(ValueError, match=message):
        gpattention.from_pretrained(tmp_path)


def test_the_saved_type_is_kept(tmp_path: Path) -> None:
    host = make("encoder")
    gpattention.convert(host.model, "direct")
    host.model.double()
    host.model.save_pretrained(tmp_path)  # type: ignore[operator]
    again = gpattention.from_pretrained(tmp_path, make("encoder").model)
    assert {p.dtype for p in again.parameters()} == {torch.float64}


def test_missing_and_unexpected_weights_are_errors(tmp_path: Path) -> None:
    for family in ("bert", "encoder", "own softmax"):
        folder = tmp_path / family
        converted(family).model.save_pretrained(folder)  # type: ignore[operator]
        (path,) = folder.glob("*.safetensors")
        tensors = load_file(path)
        name = next(name for name in tensors if name.endswith("noise.raw"))
        changed = {("other" if n == name else n): x for n, x in tensors.items()}
        save_file(changed, path, metadata={"format": "pt"})
        host = make(family).model if family == "encoder" else None
        with pytest.raises(ValueError, match=r"noise\.raw"):
            gpattention.from_pretrained(folder, host)


class Masked(nn.Module):
    """A host with a mask of minus infinity, as many have one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = make("encoder").model
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))


@pytest.mark.parametrize("family", ["bert", "own softmax", "encoder"])
def test_weights_that_are_not_finite_are_refused_by_name(family: str, tmp_path: Path) -> None:
    host = converted(family)
    name, parameter = list(host.model.named_parameters())[-1]
    with torch.no_grad():
        parameter.view(-1)[0] = torch.nan
    host.model.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(
        ValueError, match=rf"{tmp_path}.*: expected finite numbers, got nan in {re.escape(name)}"
    ):
        gpattention.from_pretrained(tmp_path, make(family).model if family in WITH_HOST else None)


def test_masks_may_be_infinite(tmp_path: Path) -> None:
    model = Masked()
    gpattention.convert(model, "cgp")
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    again = gpattention.from_pretrained(tmp_path, Masked())
    assert torch.equal(again.mask, model.mask)  # type: ignore[arg-type]
    model.mask[0, 0] = torch.nan  # type: ignore[index, operator]
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(ValueError, match="got nan in mask"):
        gpattention.from_pretrained(tmp_path, Masked())


def test_records_that_ask_for_any_memory_are_refused(tmp_path: Path) -> None:
    converted("encoder", "scgp", num_inducing=3).model.save_pretrained(tmp_path)  # type: ignore[operator]
    told = json.loads((tmp_path / "conversion.json").read_text())
    told["options"]["num_inducing"] = 10**12
    (tmp_path / "conversion.json").write_text(json.dumps(told))
    with pytest.raises(ValueError, match=r"conversion\.json: .*at most 1e\+10 parameters, got"):
        gpattention.from_pretrained(tmp_path, make("encoder").model)


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no folder"):
        gpattention.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no record of a conversion"):
        gpattention.from_pretrained(tmp_path)
    host = converted("encoder")
    host.model.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(ValueError, match="expected the host"):
        gpattention.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="expected a host as before"):
        gpattention.from_pretrained(tmp_path, converted("encoder").model)
    with pytest.raises(ValueError, match="no options"):
        gpattention.from_pretrained(tmp_path, make("encoder").model, dtype=torch.float16)
    (tmp_path / "model.safetensors").write_bytes(b"half")
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        gpattention.from_pretrained(tmp_path, make("encoder").model)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no file"):
        gpattention.from_pretrained(tmp_path, make("encoder").model)
    (tmp_path / "conversion.json").write_text("{")
    with pytest.raises(ValueError, match=r"conversion\.json"):
        gpattention.from_pretrained(tmp_path, make("encoder").model)


@pytest.mark.parametrize(
    ("text", "match"),
    [("[]", "expected an object"), ("{", "not JSON"), ('{"gpattention": {"kind": "cgp"}}', "format_version")],
)
def test_configs_that_cannot_be_read(text: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=match):
        gpattention.from_pretrained(tmp_path)


def test_an_unknown_architecture(tmp_path: Path) -> None:
    record = Conversion("cgp").to_dict()
    plain = {"gpattention": record, "architectures": ["NoSuchModel"]}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    with pytest.raises(ValueError, match="NoSuchModel"):
        gpattention.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change",
    [{"kind": "softmax"}, {"draw": "joint"}, {"seed": 0.5}, {"options": {"causal": True}}, {"more": 1}],
)
def test_records_that_are_refused(change: dict[str, object]) -> None:
    plain = {**Conversion("cgp", options={"num_inducing": (2, 3)}).to_dict(), **change}
    with pytest.raises(ValueError, match=r"expected|decides"):
        Conversion.from_dict(plain)


def test_copies_save_themselves(tmp_path: Path) -> None:
    host = converted("encoder")
    other = copy.deepcopy(host.model)
    with torch.no_grad():
        next(other.parameters()).zero_()
    other.save_pretrained(tmp_path)  # type: ignore[operator]
    again = gpattention.from_pretrained(tmp_path, make("encoder").model)
    assert torch.equal(next(again.parameters()), torch.zeros_like(next(again.parameters())))


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


def test_a_native_folder_is_read_by_its_class_too(tmp_path: Path) -> None:
    host = converted("own kernel rows", "direct")
    host.model.save_pretrained(tmp_path)  # type: ignore[operator]
    again = VisionTransformer.from_pretrained(tmp_path)
    assert torch.equal(logits(Host(again, host.inputs, 2)), logits(host))


def test_the_class_itself_names_who_reads_a_converted_model(tmp_path: Path) -> None:
    host = make("own softmax")
    gpattention.convert(host.model, "direct")
    host.model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"gpattention\.from_pretrained\(folder\) reads it"):
        VisionTransformer.from_pretrained(tmp_path)
    assert isinstance(gpattention.from_pretrained(tmp_path), VisionTransformer)


HUGGINGFACE = ["bert", "bert eager", "roberta", "distilbert", "electra", "vit", "deit"]


def host_classes(model: nn.Module) -> list[Any]:
    """Whatever of transformers would read a folder of such a model."""
    import transformers

    auto = "AutoModelForImageClassification" if "Image" in type(model).__name__ else None
    return [
        type(model),
        transformers.AutoModel,
        getattr(transformers, auto or "AutoModelForSequenceClassification"),
    ]


@pytest.mark.parametrize("family", HUGGINGFACE)
def test_the_hosts_classes_name_who_reads_a_converted_folder(family: str, tmp_path: Path) -> None:
    """Of every family of transformers; they built a plain model around weights trained with another."""
    host = converted(family)
    host.model.save_pretrained(tmp_path)  # type: ignore[operator]
    for cls in host_classes(host.model):
        with pytest.raises(ValueError, match=r"gpattention\.from_pretrained\(folder\) reads"):
            cls.from_pretrained(tmp_path)
    for found in (None, type(host.model)):
        again = gpattention.from_pretrained(tmp_path, found)
        assert torch.equal(logits(Host(again, host.inputs, 2)), logits(host))
    again.save_pretrained(tmp_path / "again")  # type: ignore[operator]
    with pytest.raises(ValueError, match=r"gpattention\.from_pretrained\(folder\) reads"):
        type(host.model).from_pretrained(tmp_path / "again")  # type: ignore[attr-defined]


def test_a_host_that_the_folder_tells_is_not_taken(tmp_path: Path) -> None:
    converted("bert").model.save_pretrained(tmp_path)  # type: ignore[operator]
    built = make("bert").model
    with pytest.raises(ValueError, match=r"got a BertForSequence.*: call gpattention\.from_pretrained\('"):
        gpattention.from_pretrained(tmp_path, built)
    assert gpattention.conversion_of(built) is None
    with pytest.raises(ValueError, match=r"such as \['BertForSequenceClassification'\], got .*Linear"):
        gpattention.from_pretrained(tmp_path, nn.Linear)
    folder = tmp_path / "torch"
    converted("encoder").model.save_pretrained(folder)  # type: ignore[operator]
    with pytest.raises(ValueError, match="built as before the conversion, got the class Encoder"):
        gpattention.from_pretrained(folder, Encoder)


def test_a_class_of_ones_own_reads_its_folder(tmp_path: Path) -> None:
    from transformers import BertForSequenceClassification

    class Mine(BertForSequenceClassification):
        pass

    model = gpattention.convert(Mine(make("bert").model.config), "direct").eval()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"got \['Mine'\]: gpattention\.from_pretrained\(folder, Class\)"):
        gpattention.from_pretrained(tmp_path)
    again = gpattention.from_pretrained(tmp_path, Mine)
    assert type(again) is Mine
    host = Host(model, make("bert").inputs, 2)
    assert torch.equal(logits(Host(again, host.inputs, 2)), logits(host))


@pytest.mark.parametrize("family", ["bert", "vit", "encoder", "timm"])
def test_a_plain_model_saved_over_a_converted_one_is_named(family: str, tmp_path: Path) -> None:
    host = converted(family)
    host.model.save_pretrained(tmp_path)  # type: ignore[operator]
    plain: Any = make(family).model
    told = "weights of a plain model.*saved over the converted one.*gpattention.convert"
    if family in WITH_HOST:
        save_file(plain.state_dict(), tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match=told):
            gpattention.from_pretrained(tmp_path, make(family).model)
        return
    # whoever insists gets the host's attention, and its record with it
    type(plain).from_pretrained(tmp_path, attn_implementation="eager").save_pretrained(tmp_path)
    for found in (None, type(plain)):
        with pytest.raises(ValueError, match=told):
            gpattention.from_pretrained(tmp_path, found)
    type(plain).from_pretrained(tmp_path)  # as the message says
    plain.base_model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no record of a conversion.*which .*Model\.from_pretrained"):
        gpattention.from_pretrained(tmp_path)


def test_a_folder_without_a_record_tells_what_it_holds(tmp_path: Path) -> None:
    host = converted("bert")
    host.model.save_pretrained(tmp_path)  # type: ignore[operator]
    make("bert").model.config.save_pretrained(tmp_path)  # type: ignore[union-attr, operator]
    for found in (None, type(host.model)):
        with pytest.raises(
            ValueError, match=r"among config.json, model.safetensors\): its weights are those of"
        ):
            gpattention.from_pretrained(tmp_path, found)
    make("bert").model.save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(
        ValueError, match=r"plain model, which BertForSequenceClassification\.from_pretrained"
    ):
        gpattention.from_pretrained(tmp_path, type(host.model))


def test_weights_in_several_files_come_back(tmp_path: Path) -> None:
    host = converted("bert")
    host.model.save_pretrained(tmp_path, max_shard_size="5KB")  # type: ignore[operator]
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert torch.equal(logits(Host(gpattention.from_pretrained(tmp_path), host.inputs, 2)), logits(host))
    make("bert").model.save_pretrained(tmp_path / "plain", max_shard_size="5KB")  # type: ignore[operator]
    record = json.loads((tmp_path / "config.json").read_text())["gpattention"]
    plain = json.loads((tmp_path / "plain" / "config.json").read_text())
    (tmp_path / "plain" / "config.json").write_text(json.dumps({**plain, "gpattention": record}))
    with pytest.raises(ValueError, match="weights of a plain model"):
        gpattention.from_pretrained(tmp_path / "plain")


@pytest.mark.parametrize(
    ("field", "bad"), [("options", True), ("options", "x"), ("layers", 3), ("left_alone", 7)]
)
def test_records_with_values_of_another_type_are_refused(field: str, bad: object) -> None:
    plain = Conversion("cgp").to_dict() | {field: bad}
    with pytest.raises(ValueError, match=f"expected {field} to be"):
        Conversion.from_dict(plain)
