"""Programs of torch.export and ONNX files answer as the models do."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gpattention
from gpattention.hosts.export import read_answer
from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer
from tests.hosts.hosts import Host, logits, make, some


def named(inputs: Any) -> dict[str, Tensor]:
    return {"inputs": inputs} if isinstance(inputs, Tensor) else dict(inputs)


def converted(family: str, kind: str | None) -> Host:
    host = make(family)
    host.model.eval()
    return host if kind is None else Host(gpattention.convert(host.model, kind), host.inputs, 2, host.call)


EXPORTED = [
    ("bert", "cgp"), ("distilbert", "scgp"), ("vit", "sgpa"), ("encoder", "direct"), ("timm", "cgp"),
    ("own softmax", "cgp"), ("own text", "softmax-gp"), ("own softmax", None),
]  # fmt: skip


def mostly_slow(cases: list[Any], fast: Any) -> list[Any]:
    """One case in the fast tests: tracing a model takes seconds."""
    marks = [[] if case == fast else [pytest.mark.slow] for case in cases]
    values = [case if isinstance(case, tuple) else (case,) for case in cases]
    return [pytest.param(*value, marks=mark) for value, mark in zip(values, marks, strict=True)]


@pytest.mark.parametrize(("family", "kind"), mostly_slow(EXPORTED, ("timm", "cgp")))
def test_programs_of_converted_models(family: str, kind: str | None, tmp_path: Path) -> None:
    host = converted(family, kind)
    host.model.train()
    # an example of one item frees the batch size too
    program = gpattention.export_program(host.model, some(host.inputs, slice(1)))
    assert host.model.training  # as it was
    host.model.eval()
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    for few in (some(host.inputs, slice(count)) for count in (1, 3)):
        with torch.no_grad():
            assert torch.allclose(loaded(named(few)), logits(host, few), atol=1e-5)


@pytest.mark.slow
def test_free_lengths_and_torch_export_itself() -> None:
    host = converted("bert", "cgp")
    program = gpattention.export_program(host.model, host.inputs, dynamic_length=True)
    short = {name: x[:3, :4] for name, x in host.inputs.items()}
    own = torch.export.export(host.model, (), host.inputs)
    with torch.no_grad():
        assert torch.allclose(program.module()(short), logits(host, short), atol=1e-5)
        assert torch.allclose(read_answer(own.module()(**host.inputs)), logits(host), atol=1e-5)


ATTACHED = ["bert", "vit", "encoder", "timm", "own softmax", "own kernel rows"]


@pytest.mark.parametrize("family", mostly_slow(ATTACHED, "timm"))
def test_programs_of_attached_models(family: str) -> None:
    host = make(family)
    handle = gpattention.attach(host.model)
    program = gpattention.export_program(handle, host.inputs)
    few = some(host.inputs, slice(2))
    with torch.no_grad():
        answer, *variances = program.module()(named(few))
    plain = handle.predict(few, samples=0)
    assert torch.allclose(answer, plain.logits[0], atol=1e-5)
    expected = handle.variances(few)
    assert len(variances) == len(expected) == 2
    assert all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(variances, expected, strict=True))


def run_onnx(path: Path, inputs: Any) -> Tensor:
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(str(path))
    feed = {name: x.numpy() for name, x in named(inputs).items()}
    assert {i.name for i in session.get_inputs()} <= set(feed)
    return torch.from_numpy(session.run(None, feed)[0])


ONNX = [
    ("own softmax", None), ("own softmax", "direct"), ("own text", "softmax-gp"), ("own kernel rows", None),
    ("own kernel rows", "direct"), ("bert", None), ("bert", "softmax-gp"), ("bert", "direct"),
    ("bert", "kernel"), ("vit", "direct"), ("encoder", "direct"), ("timm", "direct"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "kind"), mostly_slow(ONNX, None))
def test_onnx(family: str, kind: str | None, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    host = converted(family, kind)
    path = gpattention.export_onnx(host.model, tmp_path / "deep" / "model.onnx", host.inputs)
    few = some(host.inputs, slice(3))
    if family in ("bert", "encoder"):
        few = {name: x[:, :5] for name, x in few.items()}
    with torch.no_grad():
        expected = logits(host, few)
    assert torch.allclose(run_onnx(path, few), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["cgp", "scgp", "sgpa"])
@pytest.mark.parametrize("family", ["bert", "own softmax"])
def test_kinds_that_need_a_solve_are_refused(kind: str, family: str, tmp_path: Path) -> None:
    host = converted(family, kind)
    with pytest.raises(ValueError, match=rf"direct, kernel, softmax, softmax-gp for ONNX, got '{kind}' in "):
        gpattention.export_onnx(host.model, tmp_path / "model.onnx", host.inputs)
    assert not list(tmp_path.iterdir())


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host, path = converted("encoder", "direct"), tmp_path / "model.onnx"
    refused: list[tuple[Callable[[], Any], str]] = [
        (lambda: gpattention.export_onnx(host.model, path, some(host.inputs, slice(1))), "at least 2 items"),
        (lambda: gpattention.export_onnx(lambda x: x, path, host.inputs), r"nn\.Module, got function"),
        (lambda: gpattention.export_program(host.model, "x"), "mapping of tensors, got str"),
        (lambda: read_answer({"loss": 1}), "a tensor or logits, got dict"),
    ]
    for call, message in refused:
        with pytest.raises(ValueError, match=message):
            call()
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"export_onnx needs onnxscript: .*gpattention\[onnx\]"):
        gpattention.export_onnx(host.model, path, host.inputs)


@pytest.mark.parametrize("kind", ["kernel", "cgp", "scgp"])
def test_programs_keep_fused_kernels_when_they_are_asked_to(kind: str) -> None:
    pytest.importorskip("triton")
    torch.manual_seed(0)
    attention = AttentionConfig(kind, {"num_inducing": 2} if kind == "scgp" else {})
    config = VisionConfig(image_size=8, width=8, heads=2, depth=1, classes=3, attention=attention)
    model, images = VisionTransformer(config).eval(), torch.randn(3, 3, 8, 8)
    for fused in (False, True):
        program = gpattention.export_program(model, images, fused=fused)
        graphs = [part.graph for part in program.graph_module.modules() if hasattr(part, "graph")]
        names = [str(node.target) for graph in graphs for node in graph.nodes]
        assert any(name.startswith("gpattention.") for name in names) == fused
        with torch.no_grad():
            found, expected = program.module()({"inputs": images[:2]}), model(images[:2]).logits
        assert torch.allclose(found, expected, atol=1e-5)
