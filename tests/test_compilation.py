"""Where compiled programs are kept, and what happens where they cannot be."""

from pathlib import Path

import jax
import pytest

from majepa import checks, cli, doctor
from majepa.compilation import SWITCH, VARIABLE, cache_folder, keep_programs


@pytest.fixture(autouse=True)
def own_settings(monkeypatch, tmp_path):
    before = jax.config.values["jax_compilation_cache_dir"]
    for name in (VARIABLE, SWITCH):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    jax.config.update("jax_compilation_cache_dir", before)


def used() -> str | None:
    return jax.config.values["jax_compilation_cache_dir"]


def test_they_have_a_place_of_the_user(monkeypatch, tmp_path):
    assert keep_programs() is None
    assert used() == str(tmp_path / "cache" / "majepa" / "jax") and Path(used()).is_dir()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder({"HOME": str(tmp_path)}) == tmp_path / ".cache" / "majepa" / "jax"


def test_another_place_is_respected(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "mine"))
    assert keep_programs() is None
    assert used() == str(tmp_path / "mine")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(("name", "value"), [(VARIABLE, ""), (SWITCH, "false"), (SWITCH, "0")])
def test_it_can_be_switched_off(name, value, monkeypatch, tmp_path):
    monkeypatch.setenv(name, value)
    assert keep_programs() is None
    assert used() is None and not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_is_one_line(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file" / "below"))
    cli._keep_programs()
    said = capsys.readouterr()
    assert said.out == "" and len(said.err.splitlines()) == 1
    assert said.err.startswith("majepa: compiled programs are not kept: ")
    assert used() is None


def test_the_doctor_says_where(monkeypatch, tmp_path):
    keep_programs()
    (Path(used()) / "program").write_bytes(bytes(2000))
    check = doctor._cache({"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert check.state == "ok" and used() in check.seen and "2.0 kB" in check.seen
    assert doctor._cache({VARIABLE: ""}).state == "note"
    (tmp_path / "file").touch()
    broken = doctor._cache({VARIABLE: str(tmp_path / "file" / "below")})
    assert broken.state == "note" and "not kept" in broken.seen and VARIABLE in broken.fix
    assert checks.check_cache(None, None, 0).fix
