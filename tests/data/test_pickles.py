"""The restricted unpickler runs nothing that a pickle names."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from gpattention.data.pickles import read_pickle
from tests.data import official


def read(content: bytes, tmp_path: Path) -> dict[str, object]:
    file = tmp_path / "file"
    file.write_bytes(content)
    return read_pickle(file)


@pytest.mark.parametrize("module", ["numpy.core.multiarray", "numpy._core.multiarray"])
@pytest.mark.parametrize("code", ["u1", "|u1"])
def test_arrays_lists_and_strings(module: str, code: str, tmp_path: Path) -> None:
    x = np.arange(12, dtype=np.uint8).reshape(3, 4)
    content = official.mapped(
        {"data": official.array(x, code, module), "names": official.listed([official.string("caf\xe9")])}
    )
    found = read(content, tmp_path)
    assert np.array_equal(found["data"], x)
    assert found["names"] == ["caf\xe9"]
    assert pickle.loads(content, encoding="bytes")[b"data"].tolist() == x.tolist()  # our writer is right


def test_fortran_order(tmp_path: Path) -> None:
    x = np.asfortranarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
    assert np.array_equal(read(pickle.dumps({"data": x}, protocol=4), tmp_path)["data"], x)


class Evil:
    def __init__(self, called: object, *arguments: object) -> None:
        self.reduced = (called, arguments)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return self.reduced


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("called", "argument", "name"),
    [
        (os.system, "touch {}", "system"),
        (eval, "open({!r}, 'w')", "eval"),
        (open, "{}", "open"),
        (np.load, "{}", "load"),
        (getattr, "{}", "getattr"),
    ],
)
def test_nothing_else_can_be_named(called, argument: str, name: str, protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    content = pickle.dumps({"data": Evil(called, argument.format(str(mark)))}, protocol=protocol)
    with pytest.raises(ValueError, match=rf"expected a CIFAR pickle, got UnpicklingError.*\.{name}"):
        read(content, tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a pickle",
        official.mapped({"data": official.array(np.arange(4, dtype=np.uint8))})[:-9],
        official.mapped({"data": official.array(np.zeros(4, np.uint8), code="O8")}),
        official.mapped({"data": official.array(np.zeros(4, np.uint8), code="f4")}),
        # more elements than bytes: nothing is allocated for them
        official.mapped({"data": official.array(np.zeros((4, 4), "u1")).replace(b"K\4K\4", b"K\xffK\xff")}),
        # an array without a state, a shape that is none, attributes for a function, a persistent object
        official.mapped({"data": b"cnumpy.core.multiarray\n_reconstruct\n)R"}),
        official.mapped({"data": official.array(np.zeros(3, np.uint8)).replace(b"(K\x03t", b"(U\x01at")}),
        official.mapped({"data": b"cnumpy\ndtype\nN}b"}),
        b"\x80\x02Pnumber\n.",
        b"\x80\x02K\x01Q.",
        b"\x80\x02}(K\x01\x82\x01u.",
    ],
)  # fmt: skip
def test_damaged_pickles_are_told(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="file: expected a CIFAR pickle, got"):
        read(content, tmp_path)


def test_only_dictionaries(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="of a dictionary, got list"):
        read(b"\x80\x02].", tmp_path)
