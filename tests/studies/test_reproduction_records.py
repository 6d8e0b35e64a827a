"""The archive of records: results without run folders, completed with further runs, and what is refused."""

import io
import json
import lzma
import re
import shutil
import tarfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from gpattention.cli.main import main
from gpattention.studies.reproduction import Plan, load_plan
from gpattention.studies.reproduction.results import ARCHIVE, write_results
from gpattention.studies.reproduction.results import archive as archive_module
from gpattention.studies.reproduction.results.archive import gather, packed, unpack
from tests.studies.reproduced import flat, write_plan, write_runs

SUITES = tuple(f"evaluation/{suite}.json" for suite in ("clean", "corrupted", "ood"))
OF_GP = tuple(f"gp-seed0/{suite}" for suite in SUITES)
NAMES = (*SUITES, "events.jsonl", "metrics.csv", "recipe.json")


def other(model: str, seed: int, predictor: str, place: str, metric: str) -> float:
    """Figures of a second training."""
    return flat(model, seed, predictor, place, metric) / 3


def contents(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}


def members(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as tar:
        return {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]


def gathered(plan: Plan, runs: Path, archive: Path, place: Path) -> dict[str, bytes]:
    place.mkdir()
    return contents(gather(plan, runs, archive, place).runs)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan, its runs and their results."""
    root = tmp_path_factory.mktemp("made")
    plan = write_plan(root, seeds=[0, 1])
    write_runs(plan, root / "runs", flat)
    for run in (root / "runs").iterdir():  # what a run has besides
        (run / "model").mkdir()
        (run / "model" / "model.safetensors").write_bytes(b"weights")
        (run / "evaluation" / "predictions").mkdir()
        (run / "evaluation" / "predictions" / "test.safetensors").write_bytes(b"predictions")
    write_results(plan, root / "runs", root / "out", plan_file=root / "plan.toml")
    return root


def test_the_archive_holds_records_and_nothing_else(made: Path) -> None:
    found = members(made / "out" / ARCHIVE)
    runs = ("gp-seed0", "gp-seed1", "softmax-seed0", "softmax-seed1")
    assert list(found) == [f"{run}/{name}" for run in runs for name in NAMES]
    for name, content in found.items():
        original = (made / "runs" / name).read_bytes()
        if not name.endswith(".json"):
            assert content == original
            continue
        plain = json.loads(original)
        if name.endswith("clean.json"):
            del plain["curves"]["gallery"]
        assert content == (json.dumps(plain, separators=(",", ":")) + "\n").encode()


def test_its_bytes_depend_on_nothing_else(made: Path, tmp_path: Path) -> None:
    with tarfile.open(made / "out" / ARCHIVE) as tar:
        assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in tar} == {(0, 0, 0, "", "", 0o644)}
    unpack(made / "out" / ARCHIVE, tmp_path / "all")
    (tmp_path / "all" / "gp-seed0" / "recipe.json").chmod(0o600)
    assert packed([tmp_path / "all"]) == (made / "out" / ARCHIVE).read_bytes()


def test_numbers_are_the_same_to_the_last_digit(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, ("gp",), seeds=[0])
    write_runs(plan, tmp_path / "runs", lambda *_: 0.1 + 0.2)
    file = tmp_path / "runs" / "gp-seed0" / "evaluation" / "ood.json"
    file.write_text(file.read_text().replace("0.30000000000000004", "NaN", 1))
    found = gathered(plan, tmp_path / "runs", tmp_path / "none", tmp_path / "place")
    assert b'"value":NaN' in found["gp-seed0/evaluation/ood.json"]
    assert b'"value":0.30000000000000004' in found["gp-seed0/evaluation/clean.json"]


def test_results_without_run_folders_are_the_same(made: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    shutil.copy(made / "out" / ARCHIVE, tmp_path / "out")
    archived: list[tuple[str, ...]] = []
    plan = load_plan(made / "plan.toml")
    write_results(
        plan, tmp_path / "runs", tmp_path / "out", plan_file="plan.toml", on_archived=archived.append
    )
    assert archived == [("softmax-seed0", "softmax-seed1", "gp-seed0", "gp-seed1")]
    assert contents(tmp_path / "out") == contents(made / "out")
    for name, content in contents(tmp_path / "out").items():
        assert b"gpattention-records-" not in content, name  # the folder of the call


def test_what_earlier_results_had_and_these_do_not_is_removed(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, seeds=[0])
    write_runs(plan, tmp_path / "runs", flat)
    out = tmp_path / "out"
    write_results(plan, tmp_path / "runs", out)
    (out / "notes.txt").write_text("somebody's own")
    (out / "training-mine.csv").write_text("not named in the README")
    before = set(contents(out))
    names = {file.name for file in write_results(plan.only(models=["gp"]), tmp_path / "runs", out)}
    assert "training-softmax.csv" in before - set(contents(out))
    assert set(contents(out)) == names | {"notes.txt", "training-mine.csv"}


def test_the_papers_tables_are_the_same_too(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, ("cifar10-cgpt",), seeds=[0], data="cifar10")
    write_runs(plan, tmp_path / "runs", flat)
    write_results(plan, tmp_path / "runs", tmp_path / "out")
    first = contents(tmp_path / "out")
    assert "table2.md" in first
    shutil.rmtree(tmp_path / "runs")
    write_results(plan, tmp_path / "runs", tmp_path / "out")
    assert contents(tmp_path / "out") == first


def test_further_runs_complete_them(made: Path, tmp_path: Path) -> None:
    plan = load_plan(made / "plan.toml")
    for model in ("gp", "softmax"):  # the runs of one at a time, the other's are gone
        for run in (made / "runs").glob(f"{model}-*"):
            shutil.copytree(run, tmp_path / "runs" / run.name)
        write_results(plan, tmp_path / "runs", tmp_path / "out", plan_file="plan.toml")
        shutil.rmtree(tmp_path / "runs")
    assert contents(tmp_path / "out") == contents(made / "out")


def test_runs_that_are_not_asked_for_are_kept(made: Path, tmp_path: Path) -> None:
    plan, archive = load_plan(made / "plan.toml"), made / "out" / ARCHIVE
    for part in (plan.only(["gp"]), plan.only(["softmax"], [1])):
        place = tmp_path / part.trainings[0].folder
        place.mkdir()
        found = gather(part, made / "runs", archive, place)
        assert {run.name for run in found.runs.iterdir()} == {t.folder for t in part.trainings}
        assert found.archive == archive.read_bytes()
        assert found.archived == ()


def test_a_part_of_a_plan_tells_which(made: Path, tmp_path: Path) -> None:
    part = load_plan(made / "plan.toml").only(["gp"], [1])
    write_results(part, made / "runs", tmp_path / "out", plan_file="plan.toml")
    told = (tmp_path / "out" / "README.md").read_text()
    assert "1 of 1 runs of this part of the plan are trained and evaluated" in told
    assert " --models gp --seeds 1 --stage train --device cuda\n" in told


def test_evaluated_run_folders_win(made: Path, tmp_path: Path) -> None:
    plan, archive = load_plan(made / "plan.toml"), made / "out" / ARCHIVE
    write_runs(plan.only(["gp"]), tmp_path / "runs", other)
    shutil.rmtree(tmp_path / "runs" / "gp-seed1" / "evaluation")  # trained again, not yet judged
    found = gathered(plan, tmp_path / "runs", archive, tmp_path / "place")
    old = members(archive)
    assert set(found) == set(old)
    differ = {name for name in old if found[name] != old[name]}
    assert differ == {f"gp-seed0/{name}" for name in SUITES}


def test_suites_that_the_run_folder_lacks_are_kept_if_of_the_same_weights(made: Path, tmp_path: Path) -> None:
    plan = load_plan(made / "plan.toml").only(["gp"], [0])
    archive, judged = made / "out" / ARCHIVE, tmp_path / "runs" / "gp-seed0" / "evaluation"
    write_runs(plan, tmp_path / "runs", other)
    (judged / "ood.json").unlink()
    found, old = gathered(plan, tmp_path / "runs", archive, tmp_path / "place"), members(archive)
    assert list(found) == [f"gp-seed0/{name}" for name in NAMES]
    assert found["gp-seed0/evaluation/ood.json"] == old["gp-seed0/evaluation/ood.json"]
    assert found["gp-seed0/evaluation/clean.json"] != old["gp-seed0/evaluation/clean.json"]
    for file in judged.iterdir():
        plain = json.loads(file.read_text())
        settings = json.loads(plain["environment"]["settings"])
        plain["environment"]["settings"] = json.dumps({**settings, "model": "trained on"})
        file.write_text(json.dumps(plain))
    with pytest.raises(ValueError, match=r"has ood of gp-seed0, of other weights .* evaluate the run by ood"):
        gathered(plan, tmp_path / "runs", archive, tmp_path / "again")


def test_runs_under_other_names_are_called_as_the_plan_does(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "runs", tmp_path / "runs")
    (tmp_path / "runs" / "gp-seed1").rename(tmp_path / "runs" / "elsewhere")
    plan = load_plan(made / "plan.toml")
    (tmp_path / "place").mkdir()
    found = gather(plan, tmp_path / "runs", tmp_path / "none", tmp_path / "place")
    assert found.archive == (made / "out" / ARCHIVE).read_bytes()


def test_galleries_of_texts_are_kept(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, ("gp",), seeds=[0], texts=True)
    write_runs(plan, tmp_path / "runs", flat)
    found = gathered(plan, tmp_path / "runs", tmp_path / "none", tmp_path / "place")
    assert "gallery" in json.loads(found["gp-seed0/evaluation/clean.json"])["curves"]


def break_off(run: Path, *further: str) -> None:
    """A run whose training failed and was never judged."""
    shutil.rmtree(run / "evaluation")
    failed = {"time": 5.0, "event": "failed", "step": 7, "reason": "the loss is nan"}
    lines = [json.dumps(failed), *(json.dumps({"time": 6.0, "event": event}) for event in further)]
    with (run / "events.jsonl").open("a") as events:
        events.writelines(f"{line}\n" for line in lines)


def test_runs_that_broke_off_are_told_and_kept(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, seeds=[0, 1])
    write_runs(plan, tmp_path / "runs", flat)
    break_off(tmp_path / "runs" / "gp-seed1")
    break_off(tmp_path / "runs" / "softmax-seed1", "phase", "resumed")  # somebody went on
    write_results(plan, tmp_path / "runs", tmp_path / "out")
    told = (tmp_path / "out" / "README.md").read_text()
    assert "2 of 4 runs of the plan are trained and evaluated: 2 models, seeds 0; 1 broke off." in told
    assert "| gp-seed1 | 7 | 2 | 50.00 | 1.190 | the loss is nan |" in told
    assert "- not trained or not evaluated: softmax-seed1\n" in told
    assert [name for name in members(tmp_path / "out" / ARCHIVE) if "gp-seed1" in name] == [
        f"gp-seed1/{name}" for name in ("events.jsonl", "metrics.csv", "recipe.json")
    ]
    first = contents(tmp_path / "out")
    shutil.rmtree(tmp_path / "runs")
    write_results(plan, tmp_path / "runs", tmp_path / "out")
    assert contents(tmp_path / "out") == first


def test_a_plan_of_which_every_run_broke_off_has_no_results(tmp_path: Path) -> None:
    plan = write_plan(tmp_path, ("gp",), seeds=[0])
    write_runs(plan, tmp_path / "runs", flat)
    break_off(tmp_path / "runs" / "gp-seed0")
    with pytest.raises(ValueError, match=r"expected evaluated runs of plan in .*runs, got none"):
        write_results(plan, tmp_path / "runs", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def tarred(files: Mapping[str, bytes], *further: tarfile.TarInfo) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in further:
            tar.addfile(member)
    return lzma.compress(stream.getvalue())


def link(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return member


FOREIGN = {
    "model": ({"gp-seed0/model/model.safetensors": b""}, "got 'gp-seed0/model/model.safetensors'"),
    "no run": ({"notes/recipe.json": b""}, "got 'notes/recipe.json'"),
    "above": ({"../gp-seed0/recipe.json": b""}, "got '../gp-seed0/recipe.json'"),
    "absolute": ({"/gp-seed0/recipe.json": b""}, "got '/gp-seed0/recipe.json'"),
    "below": ({"gp-seed0/evaluation/old/clean.json": b""}, "got 'gp-seed0/evaluation/old/clean.json'"),
    "no evaluation": (
        {"gp-seed0/recipe.json": b"{}"},
        "an evaluation of gp-seed0, or events.jsonl, got recipe.json",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_members_are_refused(tmp_path: Path, case: str) -> None:
    files, told = FOREIGN[case]
    (tmp_path / ARCHIVE).write_bytes(tarred(files))
    with pytest.raises(ValueError, match=rf"records\.tar\.xz: expected .*{re.escape(told)}"):
        unpack(tmp_path / ARCHIVE, tmp_path / "place")
    assert list((tmp_path / "place").iterdir()) == []


def test_links_and_second_files_are_refused(tmp_path: Path) -> None:
    files = {"gp-seed0/recipe.json": b"{}", "gp-seed0/evaluation/clean.json": b"{}"}
    (tmp_path / ARCHIVE).write_bytes(tarred(files, link("gp-seed0/metrics.csv")))
    with pytest.raises(ValueError, match=r"expected plain files, got a link .*: 'gp-seed0/metrics.csv'"):
        unpack(tmp_path / ARCHIVE, tmp_path / "place")
    (tmp_path / ARCHIVE).write_bytes(tarred(files, tarfile.TarInfo("gp-seed0/recipe.json")))
    with pytest.raises(ValueError, match=r"expected every name once, got 'gp-seed0/recipe.json' twice"):
        unpack(tmp_path / ARCHIVE, tmp_path / "place")
    assert list((tmp_path / "place").iterdir()) == []


def test_what_comes_out_has_a_limit_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"gp-seed0/recipe.json": b"{}", "gp-seed0/evaluation/clean.json": b" " * (3 << 20)}
    (tmp_path / ARCHIVE).write_bytes(tarred(files))
    unpack(tmp_path / ARCHIVE, tmp_path / "whole")
    monkeypatch.setattr(archive_module, "LARGEST", 2 << 20)
    with pytest.raises(ValueError, match=r"records\.tar\.xz: expected at most 2097152 bytes, got 3145728"):
        unpack(tmp_path / ARCHIVE, tmp_path / "place")
    assert list((tmp_path / "place").iterdir()) == []


@pytest.mark.parametrize("broken", ["short", "last byte", "empty", "other", "no tar", "altered"])
def test_broken_archives_are_refused_and_nothing_is_written(made: Path, tmp_path: Path, broken: str) -> None:
    whole = (made / "out" / ARCHIVE).read_bytes()
    middle = len(whole) // 2
    content = {
        "short": whole[:middle], "last byte": whole[:-1], "empty": b"", "other": b"not an archive",
        "no tar": lzma.compress(b"text" * 500),
        "altered": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
    }[broken]  # fmt: skip
    out = tmp_path / "out"
    out.mkdir()
    (out / ARCHIVE).write_bytes(content)
    (out / "summary.md").write_text("earlier")
    with pytest.raises(ValueError, match=r"out/records\.tar\.xz: expected a sound \.tar"):
        write_results(load_plan(made / "plan.toml"), made / "runs", out)
    assert contents(out) == {ARCHIVE: content, "summary.md": b"earlier"}


def test_records_that_cannot_be_read_are_told_without_the_folder_of_the_call(
    made: Path, tmp_path: Path
) -> None:
    files = {**members(made / "out" / ARCHIVE), "gp-seed0/evaluation/clean.json": b"{}"}
    (tmp_path / ARCHIVE).write_bytes(tarred(files))
    told = r"expected records of gp-seed0 to read, got: gp-seed0/evaluation/clean\.json is not an evaluation"
    (tmp_path / "place").mkdir()
    with pytest.raises(ValueError, match=told) as refused:
        gather(load_plan(made / "plan.toml"), tmp_path / "none", tmp_path / ARCHIVE, tmp_path / "place")
    assert "place" not in str(refused.value)


def test_records_of_a_run_that_neither_ended_nor_failed_are_refused(made: Path, tmp_path: Path) -> None:
    files = {name: x for name, x in members(made / "out" / ARCHIVE).items() if name not in OF_GP}
    (tmp_path / ARCHIVE).write_bytes(tarred(files))
    (tmp_path / "place").mkdir()
    with pytest.raises(ValueError, match=r"expected an evaluation or a failure of gp-seed0, got neither"):
        gather(load_plan(made / "plan.toml"), tmp_path / "none", tmp_path / ARCHIVE, tmp_path / "place")


def test_no_records_of_the_runs_asked_for(made: Path, tmp_path: Path) -> None:
    plan = write_plan(tmp_path, ("third",), seeds=[0])
    (tmp_path / "place").mkdir()
    with pytest.raises(ValueError, match=r"runs of plan in .*none or .*records\.tar\.xz, got none"):
        gather(plan, tmp_path / "none", made / "out" / ARCHIVE, tmp_path / "place")
    with pytest.raises(FileNotFoundError, match=r"no folder .*none"):
        write_results(plan, tmp_path / "none", tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_the_command_tells_what_comes_from_the_archive(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").mkdir()
    shutil.copy(made / "out" / ARCHIVE, tmp_path / "out")
    command = ["reproduce", str(made / "plan.toml"), "--runs", str(tmp_path / "runs"), "--stage", "results"]
    assert main([*command, "-o", str(tmp_path / "out"), "--models", "gp"]) == 0
    told = capsys.readouterr().out
    runs, archive = tmp_path / "runs", tmp_path / "out" / ARCHIVE
    line = f"results: 2 of 2 runs are not evaluated in {runs} and come from {archive}: gp-seed0, gp-seed1\n"
    assert told.startswith(line)
    assert archive.read_bytes() == (made / "out" / ARCHIVE).read_bytes()  # softmax is still there
    archive.write_bytes(b"x")
    assert main([*command, "-o", str(tmp_path / "out")]) == 2
    assert f"{archive}: expected a sound .tar" in capsys.readouterr().err
