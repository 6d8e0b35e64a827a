"""Encoder layers: PyTorch's own at kind softmax, converted ones at any other."""

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

import gpattention
from gpattention.models import Encoder, EncoderLayer, Prediction
from tests.refusals import refusals

B, N, E, H = 3, 6, 16, 2
PADDING = torch.arange(N) >= torch.tensor([6, 4, 5])[:, None]  # [B, N] True = ignore
CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)
SIZES: dict[str, Any] = {"d_model": E, "nhead": H, "dim_feedforward": 24}
GAUSSIAN = ("cgp", "direct", "scgp", "softmax-gp", "sgpa")
MADE: dict[str, dict[str, Any]] = {
    "as it is": {},
    "batch first": {"batch_first": True},
    "norm first": {"norm_first": True, "batch_first": True},
    "gelu": {"activation": "gelu", "batch_first": True, "layer_norm_eps": 1e-3},
    "other activation": {"activation": silu},
    "no bias": {"bias": False, "batch_first": True},
}
CALLED: dict[str, dict[str, Any]] = {
    "plain": {},
    "padding": {"src_key_padding_mask": PADDING},
    "mask": {"src_mask": CAUSAL},
    "both": {"src_mask": CAUSAL, "src_key_padding_mask": PADDING},
    "float mask": {"src_mask": torch.zeros(N, N).masked_fill(CAUSAL, -torch.inf), "is_causal": True},
}


def tokens(made: dict[str, Any] | None = None, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(B, N, E, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return x if made is None or made.get("batch_first") else x.transpose(0, 1)


def theirs(**made: Any) -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(**{**SIZES, "batch_first": True, **made})


def gradients(layer: nn.Module, x: Tensor, **called: Any) -> tuple[Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)  # of dropout
    y = layer(x, **called)
    layer.zero_grad()
    y.square().sum().backward()
    return y, {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("made", MADE)
def test_softmax_is_pytorchs_layer(made: str, dtype: torch.dtype, training: bool) -> None:
    torch.manual_seed(0)
    reference = nn.TransformerEncoderLayer(**SIZES, **MADE[made], dtype=dtype).train(training)
    layer = EncoderLayer(**SIZES, **MADE[made], dtype=dtype, kind="softmax").train(training)
    layer.load_state_dict(reference.state_dict())  # strictly
    x = tokens(MADE[made], dtype)
    for name, call in CALLED.items():
        called = {n: m.to(dtype) if n == "src_mask" and m.is_floating_point() else m for n, m in call.items()}
        (ours, by), (wanted, by_wanted) = (gradients(m, x, **called) for m in (layer, reference))
        torch.testing.assert_close(ours, wanted, rtol=0, atol=0, msg=name)
        torch.testing.assert_close(by, by_wanted, rtol=0, atol=0, msg=name)
        with torch.no_grad():  # PyTorch's fused pass, in evaluation
            torch.manual_seed(1)
            fused = layer(x, **called)
            torch.manual_seed(1)
            torch.testing.assert_close(fused, reference(x, **called), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kind", ["softmax-gp", "direct"])
@pytest.mark.parametrize("made", MADE)
def test_kinds_that_start_as_softmax_give_its_mean_and_gradients(made: str, kind: str) -> None:
    """Their attention goes through our own call of `nn.MultiheadAttention` instead of PyTorch's."""
    for dtype, tolerance in ((torch.float32, 3e-5), (torch.float64, 1e-9)):
        torch.manual_seed(0)
        reference = nn.TransformerEncoderLayer(**SIZES, **MADE[made], dtype=dtype).eval()
        # far away from the cap on the standard deviation, under which direct's mean is softmax
        options = {"max_stddev": 1e4} if kind == "direct" else {}
        layer = EncoderLayer.from_torch(reference, kind, **options)
        assert (layer.training, layer.kind) == (False, kind)
        x = tokens(MADE[made], dtype)
        for called in (CALLED["plain"], CALLED["padding"]):
            (ours, by), (wanted, by_wanted) = (gradients(m, x, **called) for m in (layer, reference))
            real = torch.ones(B, N, dtype=torch.bool) if not called else ~PADDING
            real = real if MADE[made].get("batch_first") else real.T
            torch.testing.assert_close(ours[real], wanted[real], rtol=tolerance, atol=tolerance)
            if not called:  # what padded rows give counts above
                for name, expected in by_wanted.items():
                    close = {"rtol": 20 * tolerance, "atol": 20 * tolerance}
                    torch.testing.assert_close(by[name], expected, **close, msg=name)


@pytest.mark.parametrize("kind", [*GAUSSIAN, "kernel"])
def test_an_encoder_is_the_converted_one(kind: str) -> None:
    plain = nn.TransformerEncoder(theirs(dropout=0.0), 2, norm=nn.LayerNorm(E), enable_nested_tensor=False)
    torch.manual_seed(2)
    for p in plain.parameters():  # or both layers were the same
        nn.init.normal_(p, std=0.3)
    # inducing inputs start at these tokens in both
    options: dict[str, Any] = {"example": tokens()} if kind in ("scgp", "sgpa") else {}
    ours = Encoder.from_torch(plain, kind, **options)
    converted = gpattention.convert(nn.Sequential(copy.deepcopy(plain)), kind, **options)
    assert {f"0.{name}" for name in ours.state_dict()} == set(converted.state_dict())
    state = {name.removeprefix("0."): x for name, x in converted.state_dict().items()}
    started = [name for name in state if options and "inducing" in name and "offsets" not in name]
    ours.load_state_dict({**state, **{n: x for n, x in ours.state_dict().items() if n in started}})
    if kind != "sgpa":  # whose inducing inputs are chosen beside others that were drawn
        torch.testing.assert_close(ours.state_dict(), state)
    ours.load_state_dict(state)
    x = tokens()
    with torch.no_grad():
        for mode in (False, True):
            torch.manual_seed(3)
            wanted = converted.train(mode)(x)
            torch.manual_seed(3)
            torch.testing.assert_close(ours.train(mode)(x), wanted)
    torch.manual_seed(3)
    converted(x)
    torch.manual_seed(3)
    ours(x)
    torch.testing.assert_close(gpattention.regularizer(ours), gpattention.regularizer(converted))
    assert isinstance(plain.layers[0].self_attn, nn.MultiheadAttention)  # which stays what it was


class Classifier(nn.Module):
    """A model of one's own."""

    def __init__(self, kind: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder(EncoderLayer(**SIZES, batch_first=True, kind=kind, **options), num_layers=2)
        self.head = nn.Linear(E, 4)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])


@pytest.mark.parametrize("kind", [*GAUSSIAN, "kernel", "softmax"])
def test_a_model_of_ones_own_trains_and_predicts(kind: str) -> None:
    model = Classifier(kind)
    inputs = {"x": tokens(), "padding": PADDING}
    optimiser = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(2):  # each pass forgets the one before
        optimiser.zero_grad()
        loss = model(**inputs).square().mean() + 0.01 * gpattention.regularizer(model)
        loss.backward()
        optimiser.step()
    unused = [name for name, p in model.named_parameters() if p.grad is None]
    assert unused == [] or (kind == "softmax-gp" and all("noise" in n or "prior" in n for n in unused))
    found = gpattention.predict(model, inputs, samples=6, variances=kind in GAUSSIAN and kind != "sgpa")
    assert isinstance(found, Prediction)
    assert (found.probs.shape, found.drawn) == ((B, 4), kind in GAUSSIAN)
    if kind in GAUSSIAN:
        assert bool((found.mutual_information > 0).all())
        sites = gpattention.signals(model, inputs).sites
        assert sites[:2] == ("encoder.layers.0.self_attn head 0", "encoder.layers.0.self_attn head 1")
        assert gpattention.regularizer(model).item() != 0 or kind == "softmax-gp"
    else:
        assert gpattention.regularizer(model).item() == 0
    with torch.no_grad():  # padding changes nothing
        short = model.eval()(tokens()[1:2, :4])
        torch.testing.assert_close(short[0], model(**inputs)[1], rtol=1e-4, atol=1e-5)


def test_only_the_last_call_of_a_layer_is_remembered() -> None:
    torch.manual_seed(0)
    layer, x = EncoderLayer(**SIZES, dropout=0.0, batch_first=True, kind="direct"), tokens()
    layer(3 * x)
    layer(x)
    twice = gpattention.regularizer(layer)
    layer(x)
    torch.testing.assert_close(gpattention.regularizer(layer), twice)
    twice.backward()


def test_copies_and_files_give_the_same() -> None:
    model = Classifier("scgp").eval()
    model(tokens())
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    again = Classifier("scgp").eval()
    again.load_state_dict(torch.load(buffer))
    for other in (again, copy.deepcopy(model)):
        torch.testing.assert_close(other(tokens()), model(tokens()))
    assert "kind='scgp'" in repr(model)


@pytest.mark.parametrize(
    ("kind", "options"), [("softmax-gp", {}), ("cgp", {"normalize": "rows"}), ("kernel", {})]
)
def test_causal_layers_see_no_later_token(kind: str, options: dict[str, Any]) -> None:
    reference = theirs().eval()
    layer = EncoderLayer.from_torch(reference, kind, causal=True, **options)
    x, float_mask = tokens(), CALLED["float mask"]["src_mask"]
    y = layer(x)
    for mask in (CAUSAL, float_mask):
        torch.testing.assert_close(layer(x, src_mask=mask, is_causal=True), y)
        torch.testing.assert_close(Encoder(layer, 1)(x, mask=mask), y)
    changed = x.clone()
    changed[:, 3:] += 1
    torch.testing.assert_close(layer(changed)[:, :3], y[:, :3])
    if kind == "softmax-gp":
        torch.testing.assert_close(y, reference(x, src_mask=CAUSAL), rtol=1e-4, atol=1e-5)


def test_hints_are_given_once_where_attention_starts_from_nothing() -> None:
    fresh = Classifier("cgp")
    fresh(tokens())
    with pytest.warns(UserWarning, match="2 layers of 'cgp' attention are trained from scratch"):
        gpattention.regularizer(fresh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fresh(tokens())
        gpattention.regularizer(fresh)
        loaded = Classifier("cgp")
        loaded.load_state_dict(fresh.state_dict())
        started = Encoder.from_torch(nn.TransformerEncoder(theirs(), 1, enable_nested_tensor=False), "cgp")
        for model in (loaded, Classifier("softmax"), started):
            model(tokens())
            gpattention.regularizer(model)
    plain = nn.TransformerEncoder(theirs(), 1, enable_nested_tensor=False)
    for start in (Encoder.from_torch, gpattention.convert):
        with pytest.warns(UserWarning, match="inducing inputs of 'scgp' attention start at random.*example="):
            start(plain, kind="scgp")  # type: ignore[operator]


def test_frozen_parts_and_modes_are_copied() -> None:
    reference = theirs(dropout=0.3)
    reference.linear1.weight.requires_grad_(False)
    layer = EncoderLayer.from_torch(reference, "cgp")
    assert (layer.training, layer.dropout1.p, layer.linear1.weight.requires_grad) == (True, 0.3, False)
    with torch.no_grad():
        layer.linear2.weight.add_(1.0)
    assert bool((layer.linear2.weight != reference.linear2.weight).all())


class Own(nn.TransformerEncoderLayer):
    """A layer with a forward of its own."""

    def forward(self, src: Tensor, *_: Any, **__: Any) -> Tensor:  # type: ignore[override]
        return src


test_refusals = refusals(
    [
        (lambda: EncoderLayer(E, H, kind="cpg"), "kind", "'cpg'"),
        (lambda: EncoderLayer(E, 3), "d_model a multiple of nhead", "16 and 3"),
        (lambda: EncoderLayer(E, H, draw="joint"), "draw", "joint"),  # type: ignore[arg-type]
        (lambda: EncoderLayer(E, H, kind="softmax", noise=0.1), "options for kind='softmax'", "noise"),
        (lambda: EncoderLayer(E, H, kind="cgp", wrong=1), "options", "wrong"),
        (lambda: EncoderLayer(E, H, kind="cgp", causal=True), "normalize='rows'", "causal=True"),
        (lambda: EncoderLayer(E, H, kind="scgp", causal=True), "options", "causal"),
        (lambda: Encoder(theirs(), 0), "num_layers", "0"),
        (lambda: EncoderLayer.from_torch(nn.Linear(2, 2)), "TransformerEncoderLayer", "Linear"),  # type: ignore[arg-type]
        (lambda: EncoderLayer.from_torch(Own(**SIZES)), "TransformerEncoderLayer", "Own with a forward"),
        (lambda: EncoderLayer.from_torch(EncoderLayer(E, H, kind="cgp")), "softmax attention", "'cgp'"),
        (lambda: Encoder.from_torch(theirs()), "TransformerEncoder", "EncoderLayer"),  # type: ignore[arg-type]
        (lambda: EncoderLayer(**SIZES, batch_first=True)(tokens(), CAUSAL), "self_attn", "differs between"),
        (lambda: EncoderLayer(**SIZES, kind="kernel", causal=True)(tokens({}), ~CAUSAL), "attn_mask", "hide"),
        (lambda: EncoderLayer(**SIZES)(tokens({}).double()), "src of torch.float32", "torch.float64"),
        (lambda: EncoderLayer(**SIZES)(torch.ones(N, B).long()), "src to be floating-point", "Embedding"),
        (lambda: EncoderLayer(**SIZES)(src=tokens({})[..., :4]), "src of shape", "16", r"\(6, 3, 4\)"),
        (lambda: EncoderLayer(**SIZES)(tokens({}), src_key_padding_mask=PADDING.mT), r"\[3, 6\], got \(6, 3"),
        (lambda: gpattention.predict(nn.Linear(2, 2), tokens()), "converted", "EncoderLayer"),
    ]
)  # fmt: skip
