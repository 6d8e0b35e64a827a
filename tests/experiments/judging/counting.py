"""What is predicted, told to a test."""

import pytest

from gpattention.experiments.judging import session


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the sets that are predicted from now on."""
    seen, real = [], session.predict_items

    def predict(predictor: object, items: object, **more: object) -> object:
        seen.append(items.name)  # type: ignore[attr-defined]
        return real(predictor, items, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(session, "predict_items", predict)
    return seen
