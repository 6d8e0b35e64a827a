"""Language models under a handle: scores of tokens, texts continued, what is usual, and flags."""

import gc
import io
import math
import sys
import types
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

import gpattention
from gpattention.hosts import Handle, TokenUncertainty, language
from gpattention.hosts.families.base import AttentionCall, Site
from gpattention.hosts.language import TokenUsual, encode, log_odds, prediction_scores, window_means
from gpattention.hosts.sites import hooked
from gpattention.hosts.tokens import SCORES
from tests.hosts.decoder_hosts import ITEMS, TOKENS, VOCABULARY, decoder, packed, sequences, texts
from tests.refusals import refusals
from tests.threads import at_once

FITTING: dict[str, Any] = {"samples": 2, "levels": ()}


class Letters:
    """A tokenizer whose tokens are letters."""

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [3 + ord(letter) % (VOCABULARY - 3) for letter in text]}

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(94 + own) for own in ids)


pytestmark = pytest.mark.filterwarnings("ignore:log variances of a handle")


def attached(name: str = "grouped llama", **changes: Any) -> Handle:
    return gpattention.attach(decoder(name, **changes), Letters())


def held_out(items: int = 25, tokens: int = 12) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(3)
    return {"input_ids": torch.randint(3, VOCABULARY, (items, tokens), generator=made)}


@pytest.fixture(scope="module")
def fitted() -> Handle:
    handle = attached()
    handle.fit(held_out(), **FITTING)
    return handle


@pytest.mark.parametrize("padding", [None, "left", "right"])
def test_scores_are_those_of_the_models_own_logits(padding: str | None) -> None:
    handle, inputs = attached(), texts(padding)
    found = handle.token_uncertainty(inputs, batch_size=2)
    with torch.no_grad():
        log_p = handle.model(**inputs).logits.log_softmax(-1)
    real = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"])).bool()
    assert torch.equal(found.real, real)
    rows = real[:, :-1] & real[:, 1:]
    later = inputs["input_ids"][:, 1:]
    top = log_p.exp().topk(2).values
    torch.testing.assert_close(found.entropy[real], -(log_p.exp() * log_p).sum(-1)[real])
    torch.testing.assert_close(found.top_probability[real], top[..., 0][real])
    torch.testing.assert_close(found.margin[real], (top[..., 0] - top[..., 1])[real])
    wanted = -log_p[:, :-1].gather(-1, later[..., None])[..., 0]
    torch.testing.assert_close(found.surprise[:, :-1][rows], wanted[rows])
    assert torch.equal(found.next_ids[:, :-1], torch.where(rows, later, -1))
    assert bool((found.next_ids[:, -1] == -1).all())
    assert bool(found.surprise[:, -1].isnan().all())
    assert found.profile is None
    assert found.strangeness is None


def test_rows_do_not_look_ahead_nor_at_padding() -> None:
    handle = attached("mistral")
    whole = handle.token_uncertainty(texts(), heads=True)
    for side in ("left", "right"):
        inputs = texts(side)
        found = handle.token_uncertainty(inputs, heads=True)
        ids = inputs["input_ids"][inputs["attention_mask"].bool()].split([9, 4, 6])
        for item, own in enumerate(ids):
            alone = handle.token_uncertainty(own[None], heads=True)
            rows = found.real[item]
            torch.testing.assert_close(found.profile[item, rows], alone.profile[0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found.log_pivot[item, rows], alone.log_pivot[0], rtol=1e-4, atol=1e-4)
            assert found.positions[item, rows].tolist() == list(range(len(own)))
    torch.testing.assert_close(found.profile[0], whole.profile[0], rtol=1e-4, atol=1e-4)


def test_the_profile_is_the_log_variance_of_the_unit_process() -> None:
    handle, inputs = attached("llama"), texts()
    found = handle.token_uncertainty(inputs, heads=True)
    assert found.columns[:2] == ("model.layers.0.self_attn head 0", "model.layers.0.self_attn head 1")
    assert found.profile.shape == (ITEMS, TOKENS, 8)
    torch.testing.assert_close(found.log_variance, found.profile.mean(-1))
    assert float(found.profile.max()) <= 0


def test_pivots_sum_to_the_log_determinant_that_llm_check_scores_by() -> None:
    """Of kappa(k, k) + s^2 I of every head's keys, the mean over heads."""
    handle, inputs = attached(), texts()
    noise, wanted = float(handle.settings.noise[0, 0]), []

    def hook(site: Site, call: AttentionCall) -> Tensor:
        k = call.k.double()  # [B, G, N, C]
        K = gpattention.gp.rbf(k, k) + noise * torch.eye(TOKENS)
        wanted.append(torch.logdet(K))  # [B, G]
        return call.mean

    with torch.no_grad(), hooked(handle.model, handle.sites, hook):
        handle.model(**inputs)
    found = handle.token_uncertainty(inputs).log_pivot.sum(-1)  # [B]
    torch.testing.assert_close(found.double(), torch.cat(wanted, 1).mean(1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["grouped llama", "mistral", "gemma3"])
@pytest.mark.parametrize("padding", [None, "left"])
def test_layers_together_are_layers_apart(
    name: str, padding: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, inputs = attached(name), texts(padding)
    handle.fit(held_out(), **FITTING)
    alone = handle.token_uncertainty(inputs, heads=True)
    prompt = {n: x for n, x in inputs.items() if n != "position_ids"}
    first = TokenUncertainty.join(handle.generate(prompt, 3))
    monkeypatch.setattr(language, "TOGETHER_ON", ("cpu",))
    found = handle.token_uncertainty(inputs, heads=True)
    assert found.columns == alone.columns
    torch.testing.assert_close(found.profile[found.real], alone.profile[found.real], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.log_pivot[found.real], alone.log_pivot[found.real], rtol=1e-4, atol=1e-4)
    again = TokenUncertainty.join(handle.generate(prompt, 3))
    torch.testing.assert_close(again.log_variance, first.log_variance, rtol=1e-4, atol=1e-4)


def test_packed_texts_are_those_apart() -> None:
    handle, inputs = attached(), packed()
    found = handle.token_uncertainty(inputs, heads=True)
    alone = handle.token_uncertainty(inputs["input_ids"][:, 4:7], heads=True)
    torch.testing.assert_close(found.profile[:, 4:7], alone.profile, rtol=1e-4, atol=1e-4)
    assert found.next_ids[0].eq(-1).nonzero()[:, 0].tolist() == [3, 6, 8]


@pytest.mark.parametrize("name", ["bart", "whisper"])
def test_encoder_decoders(name: str) -> None:
    both = sequences(name)
    found = gpattention.attach(both.model).token_uncertainty(both.inputs, heads=True)
    assert found.entropy.shape == (ITEMS, TOKENS)
    assert found.profile.shape == (ITEMS, TOKENS, 2 * 2 * 4)  # causal and cross-attention of two layers
    assert torch.equal(found.real, both.inputs["decoder_attention_mask"].bool())


@pytest.mark.parametrize(("vocabulary", "rows"), [(7, 300), (2, 3)])
def test_scores_of_many_rows(vocabulary: int, rows: int) -> None:
    logits = 50 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(0))
    found = prediction_scores(logits.bfloat16(), torch.full((rows,), 1))
    p = logits.bfloat16().double().softmax(-1)
    torch.testing.assert_close(
        found["entropy"].double(), -(p * p.clamp_min(1e-300).log()).sum(-1), atol=1e-5, rtol=0
    )
    torch.testing.assert_close(
        found["surprise"].double(), -p[:, 1].clamp_min(1e-300).log(), atol=1e-3, rtol=1e-5
    )


GENERATION = {"use_cache": True, "max_position_embeddings": 128}


def generated(handle: Handle, inputs: dict[str, Tensor], count: int, seed: int = 0, **options: Any) -> Tensor:
    """The model's own."""
    torch.manual_seed(seed)
    return handle.model.generate(**inputs, max_new_tokens=count, **options)[:, inputs["input_ids"].shape[1] :]


@pytest.mark.parametrize("name", ["gpt2", "grouped llama", "mistral", "gemma3", "opt", "gpt-oss"])
@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("sampling", [
    {"do_sample": False}, {"do_sample": True}, {"do_sample": True, "temperature": 0.7, "top_p": 0.8},
])  # fmt: skip
def test_ids_are_those_of_generate(name: str, padding: str | None, sampling: dict[str, Any]) -> None:
    handle = attached(name)
    handle.model.config.use_cache = True
    inputs = {n: x for n, x in texts(padding).items() if n != "position_ids"}
    wanted = generated(handle, inputs, 8, seed=5, **sampling)
    steps = list(handle.generate(inputs, 8, seed=5, **sampling))
    joined = TokenUncertainty.join(steps)
    assert torch.equal(joined.next_ids, wanted[:, : len(steps)])
    assert joined.ids.shape == (ITEMS, len(steps))
    assert torch.equal(joined.ids[:, 1:], joined.next_ids[:, :-1])


@pytest.mark.parametrize("name", ["gpt2", "grouped llama", "mistral", "gemma3"])
@pytest.mark.parametrize("max_keys", [4, 256])
@pytest.mark.parametrize("padding", [None, "left"])
def test_rows_of_generated_tokens_are_those_of_a_pass_over_all(
    name: str, max_keys: int, padding: str | None
) -> None:
    handle = gpattention.attach(decoder(name, **GENERATION_OF.get(name, {})), max_keys=max_keys)
    inputs = {n: x for n, x in texts(padding).items() if n != "position_ids"}
    handle.model.generation_config.eos_token_id = None
    steps = TokenUncertainty.join(handle.generate(inputs, 20))
    ids = torch.cat([inputs["input_ids"], steps.next_ids], 1)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    mask = torch.cat([mask, torch.ones_like(steps.next_ids)], 1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    whole = handle.token_uncertainty({"input_ids": ids, "attention_mask": mask, "position_ids": positions})
    rows = slice(TOKENS - 1, -1)
    for score in ("log_variance", "log_pivot", "entropy", "surprise", "margin", "top_probability"):
        torch.testing.assert_close(
            getattr(steps, score), getattr(whole, score)[:, rows], rtol=1e-4, atol=1e-4, msg=score
        )
    assert torch.equal(steps.positions, whole.positions[:, rows])


def test_five_hundred_generated_tokens_are_those_of_a_pass_over_all() -> None:
    """The last ones have nearly twice as many keys as a row conditions on."""
    handle = attached(**{**GENERATION, "max_position_embeddings": 512})
    handle.model.generation_config.eos_token_id = None
    ids = texts()["input_ids"][:1]
    steps = TokenUncertainty.join(handle.generate(ids, 500, do_sample=True, seed=0))
    whole = handle.token_uncertainty(torch.cat([ids, steps.next_ids], 1))
    rows = slice(TOKENS - 1, -1)
    for score in ("log_variance", "log_pivot"):
        torch.testing.assert_close(
            getattr(steps, score), getattr(whole, score)[:, rows], rtol=1e-5, atol=1e-5
        )


GENERATION_OF: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 128},
    **dict.fromkeys(("grouped llama", "mistral", "gemma3"), GENERATION),
}


def test_texts_that_end_go_on_with_padding_that_is_not_real() -> None:
    handle, inputs = attached(**GENERATION), texts()
    ends = handle.model.generate(**inputs, max_new_tokens=3)[:, TOKENS + 1 :][0, 0]
    handle.model.generation_config.eos_token_id = int(ends)
    wanted = handle.model.generate(**inputs, max_new_tokens=12)[:, TOKENS:]
    joined = TokenUncertainty.join(handle.generate(inputs, 12))
    assert torch.equal(joined.next_ids, wanted)
    done = (wanted == ends).int().cumsum(-1) - (wanted == ends).int() > 0
    assert torch.equal(joined.real, ~done)


def test_generating_and_fitting_after_a_fit(fitted: Handle) -> None:
    joined = TokenUncertainty.join(fitted.generate("hello", 6))
    assert joined.strangeness is not None
    assert joined.strangeness.shape == (1, 6)
    assert set(joined.standard) == set(SCORES) - {"strangeness", "combined"}
    whole = torch.cat([encode(Letters(), ["hello"])["input_ids"], joined.next_ids], 1)
    again = fitted.token_uncertainty(whole)
    torch.testing.assert_close(joined.strangeness, again.strangeness[:, 4:-1], rtol=1e-3, atol=1e-3)


def test_fit_measures_what_is_usual(fitted: Handle) -> None:
    assert fitted.settings.fitted
    assert not fitted.settings.any_drawn  # no level was fitted
    found = fitted.token_uncertainty(held_out(60, 12))
    for score in SCORES:
        values = found.score(score, standardised=True)
        values = values[values.isfinite()]
        assert abs(float(values.mean())) < 0.4, score
        assert 0.6 < float(values.std()) < 1.5 * (1 + (score == "combined")), score
    assert float(found.p_value.min()) > 0
    assert 0.35 < float(found.p_value.mean()) < 0.65


def test_nothing_is_kept_for_a_gradient() -> None:
    """Else the graphs of all texts stay until the fit ends: 12 GB for sixty of seventy tokens each."""
    handle, recorded = attached(), []
    handle.model.lm_head.register_forward_hook(lambda *call: recorded.append(call[2].requires_grad))
    handle.fit(held_out(10), **FITTING)
    handle.token_uncertainty(held_out(2))
    assert recorded
    assert not any(recorded)


def large(least: int) -> set[int]:
    """Where tensors of so many bytes lie, views of them counted as the whole."""
    found = (x for x in gc.get_objects() if issubclass(type(x), Tensor))
    storages = (x.untyped_storage() for x in found)
    return {storage.data_ptr() for storage in storages if storage.nbytes() >= least}


def test_logits_of_all_tokens_are_not_kept() -> None:
    """At no time those of a text that was looked at before, nor any at the end."""
    handle, inputs = gpattention.attach(decoder("llama", vocab_size=4096, **GENERATION), max_keys=8), texts()
    handle.model.generation_config.eos_token_id = None
    size, seen = TOKENS * 4096 * 4, []  # bytes for one text
    before = large(size)
    handle.model.lm_head.register_forward_pre_hook(lambda *_: seen.append(len(large(size) - before)))
    uncertain = handle.token_uncertainty(inputs, batch_size=1)
    answered = handle.predict(inputs, samples=2, batch_size=2)
    steps = list(handle.generate(inputs, 3))
    assert len(seen) > 2 * ITEMS
    assert not any(seen)
    assert not large(size) - before
    assert uncertain.entropy.shape == (ITEMS, TOKENS)
    assert answered.logits.shape == (2, ITEMS, 4096)
    assert len(steps) == 3


def test_heads_that_share_keys_share_the_map(fitted: Handle) -> None:
    for frame in fitted.settings.frames:
        inverse = frame.inverse.unflatten(0, (2, 2))
        assert torch.equal(inverse[:, 0], inverse[:, 1])
        assert not torch.equal(frame.inverse[0], frame.inverse[2])
    inputs = texts("left")
    mean = fitted.process_mean(inputs)
    assert torch.equal(mean, fitted.process_mean(inputs))
    with torch.no_grad():
        host = fitted.model(**inputs).logits[:, -1]
    torch.testing.assert_close(mean, host, rtol=1e-4, atol=1e-4)


def test_draws_are_made_only_where_they_help() -> None:
    handle = attached()
    seen: list[str] = []
    fit = handle.fit(held_out(), samples=4, levels=("global",), progress=lambda stage, *_: seen.append(stage))
    assert [c.name for c in fit.candidates] == ["plain", "global"]
    assert fit.chosen in ("plain", "global")
    assert fit.candidates[1].settings.any_drawn
    assert {"frames", "scales", "tokens"} <= set(seen)
    plain = fit.candidates[0]
    ids = held_out()["input_ids"][torch.arange(25) % 5 >= 3]
    with torch.no_grad():
        log_p = handle.model(input_ids=ids).logits.log_softmax(-1)
    wanted = -log_p[:, :-1].gather(-1, ids[:, 1:, None]).mean()
    assert math.isclose(plain.nll, float(wanted), rel_tol=1e-4)


def test_other_texts_are_flagged(fitted: Handle) -> None:
    usual, foreign = held_out(40, 12)["input_ids"], torch.full((3, 12), 7)
    spans = fitted.flag_spans(torch.cat([usual[25:], foreign]), rate=0.02, by="strangeness")
    flagged = {span.item for span in spans}
    assert {15, 16, 17} <= flagged
    assert len(flagged) < 10
    for span in spans:
        assert 0 <= span.start < span.stop <= 12
        assert len(span.text) == span.stop - span.start
    first = fitted.token_uncertainty(foreign)
    for by in ("strangeness", "combined"):
        assert fitted.flag_spans(first, rate=0.02, by=by) == fitted.flag_spans(foreign, rate=0.02, by=by)


def made_up(texts: int, seed: int) -> TokenUncertainty:
    """Scores that grow with the position, and spread as it grows."""
    made = torch.Generator().manual_seed(seed)
    place = torch.arange(20).expand(texts, -1)  # [B, N]
    grown = {name: (1 + place) * (3 + torch.randn(texts, 20, generator=made)) for name in range(6)}
    profile = -(1 + torch.rand(texts, 20, 4, generator=made)) / (1 + place[..., None])
    real = torch.ones(texts, 20, dtype=torch.bool)
    return TokenUncertainty(place, place, real, place, *grown.values(), profile, ("a", "b", "c", "d"))


def test_scores_are_compared_with_those_of_their_position() -> None:
    usual = TokenUsual.fit([made_up(300, 0)], [made_up(200, 1)])
    found = usual.judge(made_up(400, 2))
    for name in SCORES:
        if name == "combined":
            continue
        values = found.score(name, standardised=True)  # [B, N]
        assert float(values.mean(0).abs().max()) < 0.75, name  # half octaves: their ends are apart
        assert 0.6 < float(values.std(0).min()) <= float(values.std(0).max()) < 1.5, name
    sure = found.score("margin", standardised=True)
    torch.testing.assert_close(sure.mean(), torch.tensor(0.0), atol=0.1, rtol=0)


def test_combined_adds_the_surprise_of_the_same_token(fitted: Handle) -> None:
    found = fitted.token_uncertainty(texts("right"))
    combined, surprise = found.score("combined"), found.standard["surprise"]
    torch.testing.assert_close(combined[:, 0], found.strangeness[:, 0])
    torch.testing.assert_close(combined[0, 1:], found.strangeness[0, 1:] + surprise[0, :-1])
    assert bool(combined[found.real].isfinite().all())


def test_odds_end_where_single_precision_does() -> None:
    u = torch.tensor([1e-12, 0.25, 0.5, 1 - 2**-20, 1.0])
    wanted = torch.tensor([1e-7, 1 / 3, 1.0, 2**20 - 1, 1e7]).log()
    torch.testing.assert_close(log_odds(u.log()), wanted, rtol=1e-4, atol=1e-4)


def test_windows_average_what_is_known() -> None:
    scores = torch.tensor([[1.0, float("nan"), 3.0, 5.0]])
    means = window_means(scores, torch.tensor([[True, True, True, False]]))
    torch.testing.assert_close(means[0, :3], torch.tensor([2.0, 2.0, 2.0], dtype=torch.float64))


def test_saved_and_loaded(fitted: Handle, tmp_path: Path) -> None:
    fitted.save(tmp_path)
    other = attached()
    other.load(tmp_path)
    mine, theirs = (handle.token_uncertainty(texts("right")) for handle in (fitted, other))
    assert torch.equal(mine.strangeness[mine.real], theirs.strangeness[mine.real])
    assert torch.equal(mine.p_value[mine.real], theirs.p_value[mine.real])
    assert other.flag_spans(texts(), 0.05) == fitted.flag_spans(texts(), 0.05)
    (tmp_path / "tokens.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="sha256"):
        attached().load(tmp_path)
    attached().save(tmp_path)
    assert not list(tmp_path.glob("tokens.*"))


def test_shown_in_a_terminal(fitted: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    found = fitted.token_uncertainty(["abcabc", "zzzz\x1b[2J"])
    plain = io.StringIO()
    found.show("strangeness", file=plain)
    title, *lines = plain.getvalue().splitlines()
    assert title == "strangeness of the token read, in deviations from what is usual there"
    assert len(lines) == 2
    assert "\x1b" not in plain.getvalue()
    monkeypatch.setenv("FORCE_COLOR", "1")
    coloured = io.StringIO()
    found.show("surprise", file=coloured)
    assert "\x1b[" in coloured.getvalue()
    assert coloured.getvalue().startswith("\x1b[3msurprise of the token that follows")


def test_shown_as_html(fitted: Handle) -> None:
    found = fitted.token_uncertainty("a<b>&")
    page = found.to_html("surprise")
    assert found.to_html() == found.to_html("combined") == found._repr_html_()
    assert page.count("<span") == 5
    assert 'title=""' in page  # nothing predicted the first token
    assert "strangeness" in page
    assert "<b>" not in fitted.token_uncertainty("a<b>&").to_html("log_variance")
    bare = gpattention.attach(decoder("gpt2")).token_uncertainty(texts())
    assert "&lt;" in bare.to_html("entropy")


def test_shown_in_a_notebook(fitted: Handle, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook, shown = types.ModuleType("IPython.display"), list[str]()
    notebook.HTML, notebook.display = str, shown.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython.display", notebook)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    found = fitted.token_uncertainty("a<b>&")
    found.show("surprise")
    assert shown == [found.to_html("surprise")]
    found.show("surprise", file=(text := io.StringIO()))
    assert "surprise" in text.getvalue()


def test_as_a_table(fitted: Handle) -> None:
    pytest.importorskip("pandas")
    frame = fitted.token_uncertainty(texts("right")).to_frame()
    assert len(frame) == 9 + 4 + 6
    assert list(frame["position"][9:13]) == [0, 1, 2, 3]
    assert {"item", "token", "next", "entropy", "strangeness", "p_value", "entropy standardised"} <= set(
        frame
    )


def test_unfitted_handles_warn_of_the_origin(fitted: Handle) -> None:
    handle = attached()
    with pytest.warns(UserWarning, match="centred at the origin"):
        handle.token_uncertainty(texts())
    with pytest.warns(UserWarning, match="centred at the origin"):
        next(handle.generate(texts(), 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted.token_uncertainty(texts())


def test_what_it_says_of_itself(fitted: Handle) -> None:
    found = fitted.token_uncertainty(texts("right"))
    assert repr(found).startswith("TokenUncertainty of 3 texts, 19 tokens (fitted): mean entropy")
    assert len(found[:1]) == 1
    assert "not fitted" in repr(attached().token_uncertainty(texts()))


def test_threads_have_what_they_have_alone(fitted: Handle) -> None:
    def work(inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        joined = TokenUncertainty.join(fitted.generate(inputs["input_ids"], 5))
        return fitted.token_uncertainty(inputs).strangeness, joined.next_ids

    calls = [partial(work, texts(padding)) for padding in (None, "left", "right")] * 2
    for found, alone in zip(at_once(calls), [call() for call in calls], strict=True):
        assert all(map(torch.equal, found, alone))


def test_the_model_is_what_it_was() -> None:
    model = decoder("grouped llama").train()
    inputs = texts()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    handle = gpattention.attach(model)
    handle.fit(held_out(), **FITTING)
    list(handle.generate(inputs, 3))
    assert all(module.training for module in model.modules())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not hasattr(model, "__getstate__") or "__getstate__" not in vars(model)
    assert handle.detach() is model
    for call in (handle.token_uncertainty, handle.generate, handle.flag_spans):
        with pytest.raises(ValueError, match="detached"):
            call(inputs)


def bfloat16() -> Handle:
    return gpattention.attach(decoder("grouped llama", **GENERATION).bfloat16())


def test_bfloat16_hosts() -> None:
    handle, inputs = bfloat16(), texts()
    steps = TokenUncertainty.join(handle.generate(inputs, 6))
    assert torch.equal(steps.next_ids, generated(handle, inputs, 6))
    found = handle.token_uncertainty(inputs)
    for own in (steps, found):
        for name in ("entropy", "log_variance", "log_pivot"):
            assert getattr(own, name).dtype == torch.float32
            assert bool(getattr(own, name).isfinite().all())


def with_beams() -> Handle:
    handle = attached()
    handle.model.generation_config.num_beams = 3
    return handle


def bert() -> Handle:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return gpattention.attach(tf.BertModel(tf.BertConfig(**sizes, vocab_size=40)))


test_refusals = refusals([
    (lambda: bert().token_uncertainty(texts()), "causal attention", ""),
    (lambda: with_beams().generate(texts()), "generation_config", "num_beams=3"),
    (lambda: gpattention.attach(sequences("bart").model).generate(texts()), "encoder-decoder", ""),
    (lambda: attached().generate(texts("right")), "padding", "left"),
    (lambda: attached().generate(texts(), do_sample=True, temperature=0), "temperature", "0"),
    (lambda: attached().generate(texts(), do_sample=True, top_p=1.5), "top_p", "1.5"),
    (lambda: attached().generate(texts(), 0), "max_new_tokens", "0"),
    (lambda: gpattention.attach(decoder("gpt2")).token_uncertainty("text"), "tokenizer", "none"),
    (lambda: attached().token_uncertainty([""]), "at least one token", "0"),
    (lambda: attached().token_uncertainty({"ids": texts()["input_ids"]}), "input_ids", "ids"),
    (lambda: attached().flag_spans(texts()), "fitted", ""),
    (lambda: attached().token_uncertainty(texts()).score("strangeness"), "strangeness", "fit"),
    (lambda: attached().token_uncertainty(texts()).score("entropy", standardised=True), "entropy", "fit"),
    (lambda: attached().token_uncertainty(texts()).show("nonsense"), "by", "nonsense"),
    (lambda: TokenUncertainty.join([]), "at least one step", "none"),
    (lambda: attached().fit(held_out(3)), "5 texts", "3"),
    (lambda: attached().fit("one"), "several texts", "one"),
    (lambda: attached().fit([]), "at least one batch", "none"),
    (lambda: attached().fit(held_out(), torch.ones(2)), "labels", "2"),
    (lambda: attached().fit(held_out(), temperature="adaptive"), "texts alone", "adaptive"),
])  # fmt: skip


def test_predictions_of_encoders_are_shown_too() -> None:
    from tests.hosts.hosts import bert

    inputs = {
        "input_ids": torch.arange(3, 9).view(2, 3),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }
    result = gpattention.attach(bert("ForTokenClassification").eval()).predict(inputs, samples=2)
    shown = io.StringIO()
    result.show([["one ", "two ", "three"], ["four ", "five ", "six"]], file=shown)
    title, first, second = shown.getvalue().replace("[", "").replace("]", "").splitlines()
    assert title == "entropy of each token's class, in ranks within the text"
    assert (first, second) == ("one two three", "four five ")
    result.show(by="confidence", file=(bare := io.StringIO()))
    assert len(bare.getvalue().splitlines()) == 3
    with pytest.raises(ValueError, match=r"3 tokens, got \[1, 1\]"):
        result.show([["a"], ["b"]])
    assert repr(result).startswith("TokenPrediction of 2 texts, 5 tokens, 2 draws: mean confidence 0.")
    assert result.to_html() == result._repr_html_()
    assert f'title="entropy {float(result.entropy[1, 1]):.3g}"' in result.to_html()
    pytest.importorskip("pandas")
    frame = result.to_frame([["one", "two", "three"], ["four", "five", "six"]])
    assert list(frame["token"]) == ["one", "two", "three", "four", "five"]
    assert (list(frame["item"]), list(frame["position"])) == ([0, 0, 0, 1, 1], [0, 1, 2, 0, 1])
    assert list(frame["entropy"]) == result.of_real_tokens.entropy.tolist()
    assert "token" not in result.to_frame()
