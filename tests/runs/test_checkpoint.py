"""Checkpoints: every bit comes back, and whatever does not fit is refused by name."""

import json
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from majepa.checkpoint import CheckpointError, Writer, load, prune, read_meta, save, snapshot, write


class Pair(NamedTuple):
    first: object
    second: object


def tree():
    key = jax.random.key(7)
    return {
        "nets": Pair(jax.random.normal(key, (3, 2)), [jnp.arange(4, dtype=jnp.uint8)]),
        "half": jnp.asarray([0.1, -3.0, jnp.inf], jnp.bfloat16),
        "keys": jax.random.split(key, 3),
        "key": jax.random.key(5, impl="rbg"),
        "flags": jnp.asarray([True, False]),
        "scalar": jnp.asarray(2.5),
        "empty": jnp.zeros((0, 4)),
        "nothing": None,
        "host": np.asarray([1, 2], np.int64),
        "count": 2**40,
        "rate": 0.1,
        "done": False,
    }


def bits(leaf):
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), np.asarray(jax.random.key_data(leaf)).tobytes()
    return str(np.asarray(leaf).dtype), np.shape(leaf), np.asarray(leaf).tobytes()


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert isinstance(b, jax.Array) == isinstance(a, jax.Array)
        assert bits(a) == bits(b)


@pytest.fixture
def path(tmp_path):
    save(tmp_path / "deep" / "last.safetensors", tree(), {"seconds": 1.5})
    return tmp_path / "deep" / "last.safetensors"


def test_every_bit_comes_back(path):
    assert_same(tree(), load(path, tree()))
    assert read_meta(path) == {"seconds": 1.5}
    assert list(path.parent.iterdir()) == [path]


def test_shapes_alone_are_enough_to_load_into(path):
    shapes = jax.tree.map(
        lambda leaf: jax.eval_shape(lambda: leaf) if isinstance(leaf, jax.Array) else leaf, tree()
    )
    assert_same(tree(), load(path, shapes))


def test_what_was_loaded_may_be_donated(path):
    loaded = load(path, tree())["nets"].first
    expected = np.asarray(loaded) + 1
    np.testing.assert_array_equal(jax.jit(lambda x: x + 1, donate_argnums=0)(loaded), expected)


def test_names_are_paths(path):
    names = set(load_file(path))
    assert {"nets/first", "nets/second/0", "half", "count"} <= names and "nothing" not in names


def change(**changes):
    return {**tree(), **changes}


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (change(more=jnp.zeros(2)), "no leaf 'more'"),
        ({name: leaf for name, leaf in tree().items() if name != "scalar"}, "a leaf 'scalar' that"),
        (change(scalar=jnp.zeros(1)), r"'scalar' is float32\(\), this run needs float32\(1,\)"),
        (change(scalar=jnp.asarray(1)), r"'scalar' is float32\(\), this run needs int32\(\)"),
        (change(half=jnp.zeros(3)), r"'half' is bfloat16\(3,\), this run needs float32\(3,\)"),
        (change(keys=jnp.zeros((3, 2), jnp.uint32)), "'keys' is key data uint32"),
        (change(flags=jax.random.split(jax.random.key(0))), "'flags' is bool"),
        (change(key=jax.random.key(0)), r"'key' is key<rbg>\(\), this run needs key<fry>"),
        (change(count=0.5), "'count' is int64.*needs a Python float"),
    ],
)
def test_a_leaf_that_does_not_fit_is_named(path, like, message):
    with pytest.raises(CheckpointError, match=message):
        load(path, like)


def test_a_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*nowhere"):
        load(tmp_path / "nowhere", tree())


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_a_truncated_file(path, keep):
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load(path, tree())


def test_a_foreign_file(path):
    save_file({"a": np.zeros(2)}, path)
    with pytest.raises(CheckpointError, match="is not a checkpoint of majepa"):
        load(path, tree())


def test_a_newer_format(path):
    header = {"format": 99, "majepa": "9.0", "keys": {}, "meta": {}}
    save_file({"a": np.zeros(2)}, path, metadata={"majepa": json.dumps(header)})
    with pytest.raises(CheckpointError, match=r"format 99, written by majepa 9\.0"):
        load(path, tree())


def test_two_leaves_of_one_name(tmp_path):
    with pytest.raises(CheckpointError, match="same name, 'a/b'"):
        save(tmp_path / "x", {"a/b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}})


def test_a_failed_save_leaves_the_old_file(path, monkeypatch):
    before = path.read_bytes()

    def fail(file, taken):
        file.write(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("majepa.checkpoint._write_safetensors", fail)
    with pytest.raises(OSError, match=r"cannot write .*last.*No space left"):
        save(path, tree())
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_damage_never_goes_unnoticed(path):
    """Any one bit, anywhere: an error, or no difference at all."""
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for place in rng.choice(len(good), 150, replace=False):
        damaged = bytearray(good)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            loaded = load(path, tree())
        except CheckpointError as error:
            assert str(path) in str(error)
        else:
            assert_same(tree(), loaded)


def test_every_bit_of_the_arrays_is_watched(path):
    good = path.read_bytes()
    begin = 8 + int.from_bytes(good[:8], "little")
    for place in range(begin, len(good)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        with pytest.raises(CheckpointError, match="is damaged: leaf"):
            load(path, tree())


def test_what_is_written_in_the_background_is_what_was_there_when_asked(tmp_path):
    writer, path, best = Writer(), tmp_path / "last", tmp_path / "best"
    values = jnp.arange(1000.0)
    writer.write(path, snapshot({"x": values}), twin=best)
    jax.jit(lambda x: x + 1, donate_argnums=0)(values).block_until_ready()
    writer.write(path, snapshot({"x": jnp.zeros(2)}))
    writer.wait()
    assert load(path, {"x": jnp.zeros(2)})["x"].tolist() == [0, 0]
    kept = load(best, {"x": jnp.zeros(1000)})["x"]
    np.testing.assert_array_equal(kept, np.arange(1000.0))
    assert {file.name for file in tmp_path.iterdir()} == {"last", "best"}


def test_an_error_in_the_background_comes_up_with_the_next_call(tmp_path):
    (tmp_path / "file").write_text("")
    writer = Writer()
    writer.write(tmp_path / "file" / "last", snapshot({"x": jnp.zeros(1)}))
    with pytest.raises(OSError, match="cannot write"):
        writer.wait()
    writer.wait()


# Without a branch.


def pruned_tree():
    """What comes back of a tree whose `nets` were left out."""
    nets = Pair(jnp.zeros((3, 2)), [jnp.zeros(4, jnp.uint8)])
    return tree() | {"nets": nets}


def test_layers_that_were_stored_together_come_back_apart(tmp_path):
    """As they were in older files."""
    path, keys = tmp_path / "run.safetensors", np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    save(path, {"history": {"keys": keys}, "z": np.arange(3)})
    apart = {"history": {"keys": tuple(keys)}, "z": np.arange(3)}
    found = load(path, apart)
    jax.tree.map(np.testing.assert_array_equal, found, apart)
    for other in ((*keys, keys[0]), keys[:1]):
        with pytest.raises(CheckpointError, match=f"'history/keys' is .*needs {len(other)} layers"):
            load(path, {"history": {"keys": tuple(other)}, "z": np.arange(3)})


def test_a_branch_that_is_left_out_comes_back_as_zeros(tmp_path):
    path = tmp_path / "last"
    taken = snapshot(tree(), {"seconds": 1.5}, without="nets")
    assert set(taken.omitted) == {"nets/first", "nets/second/0"}
    write(path, taken)
    assert not any(name.startswith("nets") for name in load_file(path))
    assert_same(pruned_tree(), load(path, tree()))
    assert read_meta(path) == {"seconds": 1.5}
    with pytest.raises(CheckpointError, match="no leaf 'more'"):
        load(path, change(more=jnp.zeros(2)))


def test_a_branch_is_a_whole_name():
    arrays = snapshot({"net": jnp.zeros(1), "nets": jnp.zeros(1)}, without="net").arrays
    assert list(arrays) == ["nets"]


def test_pruning_drops_a_branch_and_nothing_else(path):
    twin = path.with_name("best.safetensors")
    twin.hardlink_to(path)
    before = load_file(path)
    prune(path, "nets")
    after = load_file(path)
    assert after.keys() == before.keys() - {"nets/first", "nets/second/0"}
    assert all(array.tobytes() == before[name].tobytes() for name, array in after.items())
    assert_same(pruned_tree(), load(path, tree()))
    assert read_meta(path) == {"seconds": 1.5}
    assert_same(tree(), load(twin, tree()))
    assert {file.name for file in path.parent.iterdir()} == {path.name, twin.name}


def test_pruning_again_changes_nothing(path):
    prune(path, "nets")
    kept, number = path.read_bytes(), path.stat().st_ino
    prune(path, "nets")
    prune(path, "nobody")
    assert path.read_bytes() == kept and path.stat().st_ino == number
    prune(path, "keys")
    assert_same(pruned_tree()["half"], load(path, tree() | {"keys": jnp.zeros(3)})["half"])


def test_a_pruned_file_is_watched_as_any_other(path):
    prune(path, "nets")
    good = path.read_bytes()
    place = good.index(b"omitted")
    path.write_bytes(good[:place] + b"0mitted" + good[place + 7 :])
    with pytest.raises(CheckpointError, match="its header is not what was written"):
        load(path, tree())


@pytest.mark.parametrize("damage", ["header", "array", "end"])
def test_a_damaged_file_is_not_pruned(path, damage):
    good = path.read_bytes()
    begin = 8 + int.from_bytes(good[:8], "little")
    if damage == "end":
        bad = good[:-1]
    else:
        # The arrays of the widest types come first; none of those is pruned here.
        place = good.index(b"seconds") if damage == "header" else begin
        bad = good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :]
    path.write_bytes(bad)
    with pytest.raises(CheckpointError, match=str(path)):
        prune(path, "nets")
    assert path.read_bytes() == bad and list(path.parent.iterdir()) == [path]
