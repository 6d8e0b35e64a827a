"""A machine without Triton loses nothing but speed."""

import subprocess
import sys
import textwrap

SCRIPT = """
    import sys

    sys.modules["triton"] = None  # an import fails as of a package that is not there
    import torch
    import gpattention
    from gpattention import gp
    from gpattention.models import AttentionConfig, VisionConfig, VisionTransformer

    torch.manual_seed(0)
    for kind in ("softmax", "kernel", "direct", "cgp", "scgp", "sgpa"):
        options = {"num_inducing": 4} if kind in ("scgp", "sgpa") else {}
        config = VisionConfig(
            image_size=8, width=8, heads=2, depth=1, classes=3, attention=AttentionConfig(kind, options)
        )
        model = VisionTransformer(config).train()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        out = model(torch.randn(2, 3, 8, 8), need=("logits", "regularizer"))
        loss = torch.nn.functional.cross_entropy(out.logits, torch.tensor([0, 1])) + out.regularizer
        before = model.head.weight.detach().clone()
        loss.backward()
        optimizer.step()
        assert loss.isfinite() and not torch.equal(before, model.head.weight)
        assert model.predict(torch.randn(2, 3, 8, 8), samples=2).probs.isfinite().all()
    on_gpu = type("OnGPU", (), {"device": torch.device("cuda"), "dtype": torch.float32})
    assert "Triton is not installed" in gp.why_not_fused(on_gpu)
"""


def test_every_kind_trains_and_predicts_with_triton_hidden() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
