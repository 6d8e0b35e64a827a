"""The restricted unpickler runs nothing that a pickle names, and takes time in proportion to its size."""

import os
import pickle
import pickletools
import random
import struct
import time
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


def doubled(levels: int, begin: bytes = b"](K\1e", fold: bytes = b"l") -> bytes:
    """A list of twice the list before, so many times over: six bytes a level, 2^levels elements."""
    steps = (b"h" + bytes([level]) + fold + b"q" + bytes([level + 1]) for level in range(levels))
    return b"(" * levels + begin + b"q\0" + b"".join(steps)


BOMBS = {
    "nested lists": b"\x80\2}U\4data" + doubled(30) + b"s.",
    "nested tuples as keys": b"\x80\2}" + doubled(30, b"K\1", b"t") + b"K\1s.",
    "nested tuples as the name of a module": b"\x80\2" + doubled(30, b"K\1", b"t") + b"U\1a\x93.",
    "a list of itself": b"\x80\2}U\4data]q\0h\0as.",
    "deep lists": b"\x80\2}U\4data" + b"(" * 50_000 + b"l" * 50_000 + b"s.",
    "deep tuples": b"\x80\2}U\4data)" + b"\x85" * 50_000 + b"s.",
    "a string of 2^60": b"\x80\2}U\4data\x8e" + struct.pack("<Q", 1 << 60) + b"s.",
    "a string of 2^31": b"\x80\2}U\4dataT" + struct.pack("<I", (1 << 31) - 1) + b"s.",
    "one string ten thousand times": (
        b"\x80\2}U\4data(T" + struct.pack("<I", 50_000) + b"x" * 50_000 + b"q\0" + b"h\0" * 10_000 + b"ls."
    ),
    "one tuple unpacked ten thousand times": (
        b"\x80\2}U\4data(cnumpy\ndtype\nq\1(" + b"K\1" * 10_000 + b"tq\0" + b"h\1h\0R" * 10_000 + b"ls."
    ),
    "an array of numbers": b"\x80\2}U\4datacnumpy.core.multiarray\n_reconstruct\n)R(" + b"K\1" * 5 + b"tbs.",
    "a number of a million digits": b"\x80\2}U\4dataL" + b"9" * 1_000_000 + b"L\ns.",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_small_pickles_do_not_take_for_ever(name: str, tmp_path: Path) -> None:
    begun = time.perf_counter()
    with pytest.raises(ValueError, match="file: expected a CIFAR pickle, got"):
        read(BOMBS[name], tmp_path)
    assert time.perf_counter() - begun < 20  # on a busy machine; it would be hours


def test_what_is_remembered_takes_no_more_memory_than_it_needs(tmp_path: Path) -> None:
    begun = time.perf_counter()
    content = b"\x80\2}r\xff\xff\xff\x7fU\4data]s."  # number 2^31 - 1: Python's own makes room for as many
    assert read(content, tmp_path) == {"data": []}
    assert time.perf_counter() - begun < 60


def test_the_bomb_is_small() -> None:
    assert len(BOMBS["nested lists"]) < 387


CALLED = []


def call(*arguments: object) -> None:
    CALLED.append(arguments)


def random_program(chance: random.Random) -> bytes:
    """Instructions in any order, half of them such as make sense after each other."""
    values = [
        b"N",
        b"K\1",
        b"]",
        b")",
        b"}",
        b"(",
        b"U\4data",
        b"X\1\0\0\0a",
        b"C\2ab",
        b"\x88",
        b"G" + bytes(8),
    ]
    names = [
        f"c{__name__}\ncall\n".encode(), b"cnumpy\ndtype\n", b"cnumpy\nndarray\n",
        b"cnumpy.core.multiarray\n_reconstruct\n", b"cos\nsystem\n",
    ]  # fmt: skip
    steps = [
        b"a",
        b"e",
        b"s",
        b"u",
        b"l",
        b"t",
        b"d",
        b"R",
        b"b",
        b"\x85",
        b"\x86",
        b"\x87",
        b"\x93",
        b"0",
        b"2",
        b"1",
    ]
    steps += [b"\x81", b"\x92", b"o", b"Q", b"\x8f", b"\x90", b"\x91", b"\x94"]
    content = b"\x80\2}U\4data" if chance.random() < 0.5 else b"\x80\4"
    for _ in range(chance.randrange(chance.choice([4, 8, 200]))):
        kind = chance.random()
        if kind < 0.35:
            content += chance.choice(values)
        elif kind < 0.6:
            content += chance.choice(steps)
        elif kind < 0.65:
            content += chance.choice(names)
        elif kind < 0.95:
            content += chance.choice([b"q", b"h"]) + bytes([chance.randrange(6)])
        else:
            content += chance.choice(pickletools.opcodes).code.encode("latin-1") + chance.randbytes(2)
    return content + chance.choice([b"s.", b".", b""])


@pytest.mark.parametrize("seed", range(4))
def test_random_programs_end_and_call_nothing(seed: int, tmp_path: Path) -> None:
    chance, begun, plain = random.Random(seed), time.perf_counter(), 0
    for _ in range(400):
        try:
            found = read(random_program(chance), tmp_path)
        except ValueError as error:
            told = f"{tmp_path / 'file'}: expected a CIFAR pickle"
            assert str(error).startswith(told)  # noqa: PT017 - or it is a pickle
        else:
            assert all(isinstance(key, str) for key in found)
            plain += 1
    assert plain > 0  # some are pickles
    assert time.perf_counter() - begun < 60
    assert CALLED == []


@pytest.mark.parametrize("seed", range(2))
def test_damaged_bytes_end_and_call_nothing(seed: int, tmp_path: Path) -> None:
    """A sound file with bytes changed: never anything but a dictionary of plain values or a `ValueError`."""
    chance = random.Random(seed)
    whole = official.mapped(
        {
            "data": official.array(np.arange(24, dtype=np.uint8).reshape(2, 12)),
            "labels": official.listed([b"K\1", b"K\2"]),
            "names": official.listed([official.string("a"), official.string("b")]),
        }
    )
    for _ in range(400):
        changed = bytearray(whole)
        for _ in range(chance.randrange(1, 4)):
            changed[chance.randrange(len(changed))] = chance.randrange(256)
        try:
            found = read(bytes(changed), tmp_path)
        except ValueError:
            continue
        for value in found.values():
            assert isinstance(value, np.ndarray | str | int | float | list | None)
