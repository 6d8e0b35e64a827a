"""Damaged and hostile files of every kind that the library reads: they load, or the error names the file."""

import atexit
import functools
import gzip
import io
import json
import lzma
import os
import random
import shutil
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import gpattention
from gpattention.data import load_cola, load_corrupted, load_ood, unpack
from gpattention.data.cifar import CIFAR10, read_cifar
from gpattention.evaluation import PredictionCache
from gpattention.evaluation.predictions import CacheKey, RawPrediction
from gpattention.hosts.settings import load_settings
from gpattention.models import VisionTransformer
from gpattention.models.embeddings import GloveEmbedding, Vocabulary
from gpattention.runs import load_recipe
from gpattention.runs.folder import open_run
from gpattention.runs.inputs import load_preprocessing
from gpattention.runs.records import read_suites
from gpattention.studies import plan_results
from gpattention.studies.plans import load_plan
from gpattention.training.folder import list_checkpoints, read_checkpoint
from tests.data import official
from tests.fuzz import commands
from tests.fuzz.tally import OUTSIDE, TRACEBACK, WRONG, Tally, in_child, listing, scratch

SECONDS, MEMORY = 20.0, 1 << 30
EVIL = b"evil"


@dataclass(frozen=True)
class Kind:
    """Sound files in a folder, which of them to damage, and the reader."""

    make: Callable[[Path], None]
    damage: str  # pattern of file names, below the folder
    read: Callable[[Path], Any]
    form: str = "bytes"  # what it is made of, for damage that knows: json, lines, safetensors, tar, ...


def _copied(what: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        shutil.copytree(commands.template() / what, folder, dirs_exist_ok=True)

    return make


def _make_ood(folder: Path) -> None:
    (folder / "ood" / "mine").mkdir(parents=True)
    x = np.arange(2 * 32 * 32 * 3, dtype=np.uint8).reshape(2, 32, 32, 3)
    np.savez(folder / "ood" / "packed.npz", images=x)
    np.savez_compressed(folder / "ood" / "squeezed.npz", images=x)
    for name in ("a.png", "b.bmp", "c.jpg", "d.webp", "e.tiff", "f.ppm"):
        Image.fromarray(x[0]).save(folder / "ood" / "mine" / name)


def _make_archives(folder: Path) -> None:
    content = b"some text\n" * 50
    for name, mode in (("a.tar", "w"), ("a.tar.gz", "w:gz"), ("a.tar.xz", "w:xz"), ("a.tar.bz2", "w:bz2")):
        with tarfile.open(folder / name, mode) as tar:
            for member in ("top/one.txt", "top/deep/two.txt"):
                about = tarfile.TarInfo(member)
                about.size = len(content)
                tar.addfile(about, io.BytesIO(content))
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as zipped:
        for member in ("top/one.txt", "top/deep/two.txt"):
            zipped.writestr(member, content)


def _read_archives(folder: Path) -> None:
    target = folder / "target"
    target.mkdir()
    for file in sorted(folder.glob("a.*")):
        unpack(file, target / file.name, limit=1 << 22, files=100)


def _make_records(folder: Path) -> None:
    staged = folder / "staged"
    shutil.copytree(commands.template() / "runs" / "judged", staged / "tiny-seed0")
    for name in ("model", "checkpoints", "first-phase", "preprocessing", ".lock", "evaluation/predictions"):
        place = staged / "tiny-seed0" / name
        shutil.rmtree(place, ignore_errors=True)
        place.unlink(missing_ok=True) if place.is_file() else None
    (folder / plan_results.ARCHIVE).write_bytes(plan_results.packed(staged))
    shutil.rmtree(staged)


def _read_records(folder: Path) -> None:
    (folder / "out").mkdir()
    plan_results.unpack(folder / plan_results.ARCHIVE, folder / "out")


KEY = CacheKey(**{f.name: 2 if f.type in (int, "int") else "x" for f in fields(CacheKey)})


def _make_predictions(folder: Path) -> None:
    PredictionCache(folder).write("test", KEY, RawPrediction(torch.randn(2, 3, 4), torch.tensor([0, 1, 2])))


def _host() -> VisionTransformer:
    torch.manual_seed(0)
    trained = VisionTransformer.from_pretrained(commands.template() / "runs" / "trained" / "model")
    config = trained.config.to_dict() | {"attention": [{"kind": "softmax", "options": {}}]}
    return VisionTransformer(VisionTransformer.config_class.from_dict(config))


def _make_attached(folder: Path) -> None:
    gpattention.attach(_host(), task="classification").save(folder)


def _make_converted(folder: Path) -> None:
    gpattention.convert(_host(), "cgp").save_pretrained(folder)


def _written(name: str, text: str) -> Callable[[Path], None]:
    """A file of that text, beside a sound recipe."""

    def make(folder: Path) -> None:
        shutil.copy(commands.template() / "sound.toml", folder / "sound.toml")
        (folder / name).write_text(text)

    return make


def _make_vocabulary(folder: Path) -> None:
    Vocabulary.from_sentences([["the", "cat", "sat"], ["the", "dog"]]).save(folder / "vocabulary.json")


GLOVE = "the 0.1 0.2 0.3\ncat -1 2 3e-2\nsat 0 0 1\non 1 1 1\n"
PLAN = """\
seeds = [0, 1]
changes = ["phases.epochs=1"]
suites = ["clean"]
[[runs]]
recipe = "sound"
[[goals]]
name = "g"
suite = "clean"
set = "test"
measure = "ece"
value = 0.1
"""
_trained, _model = _copied("runs/trained"), _copied("runs/trained/model")
KINDS = {
    "weights": Kind(_model, "*.safetensors", VisionTransformer.from_pretrained, "safetensors"),
    "config": Kind(_model, "config.json", VisionTransformer.from_pretrained, "json"),
    "recipe": Kind(_written("x", ""), "*.toml", lambda f: load_recipe(f / "sound.toml"), "lines"),
    "plan": Kind(_written("plan.toml", PLAN), "plan.toml", lambda f: load_plan(f / "plan.toml"), "lines"),
    "run's recipe": Kind(_trained, "recipe.json", open_run, "json"),
    "events": Kind(_trained, "events.jsonl", open_run, "json lines"),
    "metrics": Kind(_trained, "metrics.csv", open_run, "lines"),
    "preprocessing": Kind(_trained, "preprocessing.json", load_preprocessing, "json"),
    "checkpoint": Kind(
        _trained, "step-*", lambda f: read_checkpoint(list_checkpoints(f / "checkpoints")[-1]), "safetensors"
    ),
    "evaluation": Kind(_copied("runs/judged"), "clean.json", read_suites, "json"),
    "predictions": Kind(
        _make_predictions, "*.safetensors", lambda f: PredictionCache(f).read("test", KEY), "safetensors"
    ),
    "attached record": Kind(_make_attached, "attached.json", load_settings, "json"),
    "attached numbers": Kind(_make_attached, "attached.safetensors", load_settings, "safetensors"),
    "conversion record": Kind(_make_converted, "conversion.json", gpattention.from_pretrained, "json"),
    "conversion weights": Kind(_make_converted, "*.safetensors", gpattention.from_pretrained, "safetensors"),
    "archives": Kind(_make_archives, "a.*", _read_archives, "archive"),
    "records": Kind(_make_records, "records.tar.xz", _read_records, "archive"),
    "cifar pickles": Kind(official.write_cifar10_python, "*", lambda f: read_cifar(CIFAR10, f), "pickle"),
    "cifar binary": Kind(official.write_cifar10_binary, "*", lambda f: read_cifar(CIFAR10, f)),
    "npz": Kind(_make_ood, "packed.npz", lambda f: load_ood("packed", f), "npz"),
    "npz squeezed": Kind(_make_ood, "squeezed.npz", lambda f: load_ood("squeezed", f), "npz"),
    "images": Kind(_make_ood, "?.*", lambda f: load_ood("mine", f), "image"),
    "corrupted": Kind(
        official.write_corrupted, "fog.npy",
        lambda f: load_corrupted("cifar10-c", f, subset=True).part("fog", 1),
    ),
    "cola": Kind(official.write_cola, "in_domain_train.tsv", lambda f: load_cola(f, subset=True), "lines"),
    "glove": Kind(
        _written("vectors.txt", GLOVE), "vectors.txt", lambda f: GloveEmbedding(f / "vectors.txt"), "lines"
    ),
    "vocabulary": Kind(
        _make_vocabulary, "vocabulary.json", lambda f: Vocabulary.load(f / "vocabulary.json"), "json"
    ),
}  # fmt: skip


@functools.cache
def sound(name: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="fuzz-sound-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    torch.manual_seed(0)
    KINDS[name].make(folder)
    return folder


# --- damage -------------------------------------------------------------------------------------------------


def damage_bytes(r: random.Random, content: bytes) -> bytes:
    """Of any file."""
    data = bytearray(content)
    for _ in range(r.choice([1, 1, 1, 2, 5])):
        place, length = r.randrange(len(data) + 1), r.choice([1, 2, 8, 64, 1000])
        how = r.choice(["flip", "flip", "flip", "cut", "insert", "remove", "double", "zero", "ones"])
        if how == "flip" and data:
            data[place % len(data)] ^= 1 << r.randrange(8)
        elif how == "cut":
            del data[place:]
        elif how == "insert":
            data[place:place] = r.randbytes(length)
        elif how == "remove":
            del data[place : place + length]
        elif how == "double":
            data[place:place] = data[place : place + length]
        elif how in ("zero", "ones"):
            data[place : place + length] = (b"\0" if how == "zero" else b"\xff") * length
    return bytes(data)


ODD: tuple[Any, ...] = (
    None, True, -1, 0, 2**40, 10**400, 1.5, float("nan"), float("inf"), "", "x", "\x1b[2J", "../evil", [],
    [1], {}, {"a": 1}, [[[]]], 4_000_000, "\ud800", 10**12,
)  # fmt: skip


def damage_value(r: random.Random, plain: Any) -> Any:
    """One value anywhere inside replaced, removed or renamed."""
    if isinstance(plain, dict) and plain and r.random() < 0.9:
        key = r.choice(list(plain))
        how = r.random()
        if how < 0.1:
            return {k: v for k, v in plain.items() if k != key}
        if how < 0.15:
            return {(f"{k}x" if k == key else k): v for k, v in plain.items()}
        return {k: damage_value(r, v) if k == key else v for k, v in plain.items()}
    if isinstance(plain, list) and plain and r.random() < 0.8:
        place = r.randrange(len(plain))
        how = r.random()
        if how < 0.15:
            return plain[:place] + plain[place + 1 :]
        if how < 0.3:
            return plain + [plain[place]] * r.choice([1, 1000])
        return [damage_value(r, x) if i == place else x for i, x in enumerate(plain)]
    return r.choice(ODD)


def damage_json(r: random.Random, content: bytes) -> bytes:
    roll = r.random()
    if roll < 0.1:
        deep = r.choice([100, 5000, 200_000])
        opened, closed = r.choice([(b"[", b"]"), (b'{"a":', b"}")])
        return opened * deep + r.choice([b"", (b"" if closed == b"]" else b"1") + closed * deep])
    if roll < 0.15:
        return content.replace(b":", b":" + b"[" * 5000 + b"]" * 5000 + b",", 1)
    plain = json.loads(content)
    for _ in range(r.choice([1, 1, 2])):
        plain = damage_value(r, plain)
    return json.dumps(plain).encode()


def damage_json_lines(r: random.Random, content: bytes) -> bytes:
    lines = content.splitlines()
    place = r.randrange(len(lines))
    lines[place] = damage_json(r, lines[place]) if r.random() < 0.8 else damage_bytes(r, lines[place])
    return b"\n".join(lines) + b"\n"


def damage_lines(r: random.Random, content: bytes) -> bytes:
    lines = content.split(b"\n")
    place = r.randrange(len(lines))
    other = (
        b"\xff\xfe\x80", b"\0", b"", b"x = " + b"[" * 5000, b"x = " + b"[" * 5000 + b"]" * 5000,
        b"a" * 100_000, b"nan", b"x = 1" + b"0" * 10_000, b"[[[[", b"\t\t\t", b"\xed\xa0\x80", b'"""',
        b"1,2,3", b"\x1b[2J", b"a.b.c.d = 1", b"name = \"../../evil\"", b"the nan inf 1e999", b"\xef\xbb\xbf",
    )  # fmt: skip
    how = r.random()
    if how < 0.6:
        lines.insert(place, r.choice(other))
    elif how < 0.8:
        lines[place] = r.choice(other)
    else:
        lines[place] = lines[place].replace(b"=", r.choice([b"", b"==", b"= -"]), 1)
    return b"\n".join(lines)


def damage_safetensors(r: random.Random, content: bytes) -> bytes:
    """Lies in the header, or numbers that are none."""
    if len(content) < 9 or content[8:9] != b"{":  # the checksum beside it
        return damage_bytes(r, content)
    size = struct.unpack("<Q", content[:8])[0]
    roll = r.random()
    if roll < 0.15:
        return struct.pack("<Q", r.choice([0, 1, size + 1, 2**31, 2**63, 2**64 - 1])) + content[8:]
    if roll < 0.3:  # keeps its layout
        start = 8 + size
        data = bytearray(content)
        for place in range(start, len(data) - 3, 4):
            if r.random() < 0.1:
                data[place : place + 4] = struct.pack("<f", r.choice([float("nan"), float("inf"), -1e38]))
        return bytes(data)
    header = damage_json(r, content[8 : 8 + size])
    return struct.pack("<Q", len(header)) + header + content[8 + size :]


MEMBERS = (
    "../evil", "/{outer}/evil", "../../../evil", "a/../../evil", "top/one.txt", "C:\\evil", "x" * 300,
    "link/evil", "a\nb", "a\x1bb", ".", "tiny-seed0/recipe.json", "tiny-seed0/../../evil-seed0/recipe.json",
)  # fmt: skip
SHAPES = (
    (2**40, 32, 32, 3), (2, 32, 32, 3), (), (-1, 32, 32, 3), (0, 32, 32, 3), (2**62, 2**62),
    (200_000, 32, 32, 3),
)  # fmt: skip


def damage_archive(r: random.Random, content: bytes, name: str) -> bytes:
    """Members that lie elsewhere, are links, are large, or do not have their checksum."""
    roll = r.random()
    if roll < 0.15 and name.endswith("gz"):
        return content[:-8] + r.randbytes(8)  # checksum and size
    if roll < 0.4:
        return damage_bytes(r, content)
    member = r.choice(MEMBERS)
    size = r.choice([4, 4, 4, 64 << 20])
    if name.endswith("zip"):
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as zipped:
            about = zipfile.ZipInfo(member)
            if r.random() < 0.3:
                about.external_attr = r.choice([0o120777, 0o010644, 0o060644]) << 16
            zipped.writestr(about, EVIL.ljust(size, b"\0"))
        return stream.getvalue()
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        if r.random() < 0.5:
            link = tarfile.TarInfo("link")
            link.type = r.choice([tarfile.SYMTYPE, tarfile.LNKTYPE])
            link.linkname = r.choice(["..", "/", "../.."])
            tar.addfile(link)
        about = tarfile.TarInfo(member)
        about.type = r.choice([tarfile.REGTYPE] * 5 + [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.DIRTYPE])
        about.size = size
        tar.addfile(about, io.BytesIO(EVIL.ljust(size, b"\0")))
    plain = stream.getvalue()
    return (
        gzip.compress(plain)
        if name.endswith("gz")
        else lzma.compress(plain)
        if name.endswith("xz")
        else plain
    )


def damage_pickle(r: random.Random, content: bytes) -> bytes:
    roll = r.random()
    if roll < 0.6:
        return damage_bytes(r, content)
    if roll < 0.7:  # lists in lists, each twice in the next: small to write, large to walk
        deep = r.choice([20, 40, 3000])
        twice = (b"](" + 2 * (b"h" + bytes([i % 250])) + b"eq" + bytes([(i + 1) % 250]) for i in range(deep))
        return b"\x80\x02}U\x04data]q\0" + b"".join(twice) + b"s."
    if roll < 0.8:
        return b"\x80\x02}U\x04data" + b"]" * 50_000 + b"a" * 49_999 + b"s."
    if roll < 0.9:
        return b"\x80\x04\x8d" + struct.pack("<Q", r.choice([2**40, 2**62])) + b"x."
    return b"\x80\x02cos\nsystem\nU\x04true\x85R."


def damage_npz(r: random.Random, content: bytes) -> bytes:
    """Arrays of other shapes and types than the bytes can be."""
    roll = r.random()
    if roll < 0.5:
        return damage_bytes(r, content)
    shape = r.choice(SHAPES)
    kind = r.choice(["|u1", "|O", "<f8", "|V9", "<M8[s]", "|S3", "|u1"])
    header = repr({"descr": kind, "fortran_order": r.random() < 0.3, "shape": shape}).encode()
    body = b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header
    body += bytes(r.choice([0, 6144, 64 << 20, 700 << 20 if r.random() < 0.2 else 0]))
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr(r.choice(["images.npy", "images", "other.npy"]), body)
    return stream.getvalue()


def damage_image(r: random.Random, content: bytes) -> bytes:
    """A picture that says it is much larger, or is of another kind."""
    if not content.startswith(b"\x89PNG") or r.random() < 0.5:
        return damage_bytes(r, content)
    side = r.choice([0, 1, 31, 33, 5000, 20_000, 60_000, 2**31 - 1])
    depth, colour = r.choice([(8, 2), (1, 0), (16, 0), (8, 3), (16, 6), (8, 6), (5, 2)])
    head = struct.pack(">IIBBBBB", side, r.choice([side, 1, 32]), depth, colour, 0, 0, 0)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    data = zlib.compress(b"\0" * r.choice([10, 10_000, 64 << 20]))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def damaged(r: random.Random, form: str, content: bytes, file: Path) -> bytes:
    if form == "bytes" or r.random() < 0.3:
        return damage_bytes(r, content)
    if form == "archive":
        return damage_archive(r, content, file.name)
    by_form: dict[str, Callable[[random.Random, bytes], bytes]] = {
        "json": damage_json, "json lines": damage_json_lines, "lines": damage_lines, "image": damage_image,
        "safetensors": damage_safetensors, "pickle": damage_pickle, "npz": damage_npz,
    }  # fmt: skip
    return by_form[form](r, content)


# --- the check ----------------------------------------------------------------------------------------------


def check(r: random.Random, tally: Tally) -> None:
    """One file of one kind, damaged."""
    name = r.choice(list(KINDS))
    kind = KINDS[name]
    with scratch() as inner:
        outer, folder = inner.parents[2], inner / "given"
        shutil.copytree(sound(name), folder)
        file = r.choice(sorted(f for f in folder.rglob(kind.damage) if f.is_file()))
        content = damaged(r, kind.form, file.read_bytes(), file).replace(
            b"{outer}", str(outer).strip("/").encode()
        )
        file.write_bytes(content)
        before = listing(outer, but=folder)
        outcome = in_child(functools.partial(_read, kind, folder), seconds=SECONDS, memory=MEMORY)
        place = f"{name}: {file.relative_to(folder)}"
        if outcome.kind == "returned":
            tally.add("loaded")
            if outcome.value:
                tally.fault(WRONG, f"{place} loaded with numbers that are none: {outcome.value}")
        elif outcome.refused or "CheckpointError" in outcome.family:
            tally.add("refusals")
            if file.name not in outcome.error and str(file.parent) not in outcome.error:
                tally.fault(WRONG, f"{place}: the error does not name the file: {outcome.error[:200]}")
        elif outcome.kind == "too slow":
            tally.fault(WRONG, f"{place}: took over {SECONDS:.0f} s")
        else:
            tally.fault(TRACEBACK, f"{place}: {outcome.error[:200] or outcome} at {outcome.where}")
        if listing(outer, but=folder) != before:
            tally.fault(OUTSIDE, f"{place}: {sorted(set(listing(outer, but=folder)) ^ set(before))[:2]}")


def _read(kind: Kind, folder: Path) -> str:
    """What the reader gave that it should not have."""
    os.chdir(folder)
    found = kind.read(folder)
    if isinstance(found, torch.nn.Module):
        numbers = {name: x for name, x in found.state_dict().items() if x.is_floating_point()}
        return ", ".join([name for name, x in numbers.items() if not bool(x.isfinite().all())][:3])
    return ""
