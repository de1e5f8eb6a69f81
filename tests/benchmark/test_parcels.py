"""Runs on their way between machines that share no disk."""

import io
import tarfile

import pytest
from tiny_grids import TINY, begin, finish, progress

from majepa.benchmark import node, parcels
from majepa.benchmark.folder import claim
from majepa.benchmark.jobs import jobs_of, write_job
from majepa.benchmark.parcels import Changes, files_of, pack, receive, recover

JOB = jobs_of(TINY.cells())[0]
NAMES = [cell.name for cell in JOB.cells]


@pytest.fixture
def root(tmp_path):
    """Two runs with checkpoints, and a log."""
    claim(tmp_path / "there", TINY)
    for cell in JOB.cells:
        folder = finish(tmp_path / "there", cell)
        (folder / "checkpoints").mkdir()
        (folder / "checkpoints" / "last.safetensors").write_bytes(cell.name.encode())
        (folder / "checkpoints" / ".last.12.safetensors").write_bytes(b"torn")
    (tmp_path / "there" / "jobs" / "mappo-3m.log").write_text("attempt 1\n")
    return tmp_path / "there"


@pytest.fixture
def home(tmp_path):
    claim(tmp_path / "home", TINY)
    return tmp_path / "home"


def contents(root):
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in files_of(root, JOB.name, NAMES)
    }


def test_what_is_sent_arrives(root, home):
    receive(home, JOB.name, pack(root, files_of(root, JOB.name, NAMES)))
    assert contents(home) == contents(root)
    assert JOB.is_finished(home)
    assert "jobs/mappo-3m.log" in contents(home)
    assert not any("torn" in str(content) for content in contents(home).values())


def test_checkpoints_are_packed_before_what_may_be_ahead_of_them(root):
    names = [path.name for path in files_of(root, JOB.name, NAMES)]
    assert names[:2] == ["last.safetensors"] * 2
    assert "last.safetensors" not in names[2:]


def test_only_changes_are_sent(root, home):
    changes = Changes(root, JOB.name, NAMES)
    assert changes.take() is None
    progress(root / "cells" / NAMES[0], 500, 0.5)
    parcel = changes.take()
    with tarfile.open(fileobj=io.BytesIO(parcel)) as tar:
        assert tar.getnames() == ["cells/mappo-3m-1/metrics.jsonl"]
    assert changes.take() is None


def test_a_parcel_that_was_being_unpacked_when_killed_is_unpacked_again(root, home, monkeypatch):
    begin(home, JOB.cells[0])
    parcel = pack(root, files_of(root, JOB.name, NAMES))
    write, count = parcels.written_beside, iter(range(5))

    def dies_at_the_fifth(path):
        if next(count, None) is None:
            raise KeyboardInterrupt
        return write(path)

    monkeypatch.setattr(parcels, "written_beside", dies_at_the_fifth)
    with pytest.raises(KeyboardInterrupt):
        receive(home, JOB.name, parcel)
    assert contents(home) != contents(root)
    monkeypatch.undo()
    recover(home)
    assert contents(home) == contents(root)
    assert not list((home / "jobs").glob("*.parcel"))


def test_nothing_is_written_elsewhere(home):
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../elsewhere"))
    with pytest.raises(ValueError, match="does not belong"):
        receive(home, JOB.name, archive.getvalue())
    assert not (home.parent / "elsewhere").exists()


def order(root, home, **changes):
    path = write_job(home, JOB)
    default = {
        "job": JOB.name, "text": path.read_text(), "home": str(home), "proof": None,
        "parcel": pack(root, files_of(root, JOB.name, NAMES)), "threads": 1, "on_gpu": False,
        "every": 0.01,
    }  # fmt: skip
    return node.Order(**{**default, **changes})


def test_a_machine_works_where_it_sees_the_folder_and_on_a_copy_elsewhere(root, home):
    (home / "jobs" / ".proof").touch()
    with node._workplace(order(root, home, proof="jobs/.proof")) as (place, is_home):
        assert (place, is_home) == (home, True)
    for proof in (None, "jobs/.other"):
        with node._workplace(order(root, home, proof=proof)) as (place, is_home):
            assert not is_home and place != home
            assert contents(place) == contents(root)
            assert (place / "jobs" / "mappo-3m.json").is_file()
        assert not place.exists()


def test_another_version_is_refused(root, home):
    with pytest.raises(RuntimeError, match=r"the grid is run by 9\.9; install the same"):
        node.work(order(root, home, majepa="9.9"), lambda machine, parcel: False)
