"""A whole run in one safetensors file: named leaves, checksums, nothing pickled.

A leaf is named by its path in the tree (`learner/critic/layers/0/weight`). Random keys are stored
as their data and Python numbers as scalars; the header says which. A file is written beside its
place and renamed, so that what is there is always complete, and `Writer` does that in the
background: training waits for the copy to the host alone.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import zlib
from collections import Counter
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from . import __version__
from .files import written_beside

FORMAT = 3
"""Raised when files of older versions can no longer be read as they are."""

DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
"""Names of types in safetensors."""


class CheckpointError(ValueError):
    """A checkpoint does not fit; the message names the file and the leaf."""


class Snapshot(NamedTuple):
    """A tree copied to the host: what happens to the original no longer matters."""

    arrays: dict[str, np.ndarray]
    keys: dict[str, str]
    """Kind of generator, for random keys."""
    meta: dict[str, Any]
    omitted: tuple[str, ...] = ()
    """Leaves that were left out; whoever loads the file gets zeros for them."""


def snapshot(
    tree: Any, meta: Mapping[str, Any] | None = None, *, without: str | None = None
) -> Snapshot:
    """Copy the leaves of a tree, except for a branch; `meta` is plain data to keep with them."""
    every = _named_leaves(tree)
    leaves = {name: leaf for name, leaf in every.items() if not _is_under(name, without)}
    keys = {name: _key_impl(leaf) for name, leaf in leaves.items() if _is_key(leaf)}
    plain = {
        name: jax.random.key_data(leaf) if _is_key(leaf) else leaf for name, leaf in leaves.items()
    }
    arrays = {name: np.array(array) for name, array in jax.device_get(plain).items()}
    omitted = tuple(name for name in every if name not in leaves)
    return Snapshot(arrays, keys, dict(meta or {}), omitted)


def _is_under(name: str, branch: str | None) -> bool:
    return branch is not None and f"{name}/".startswith(f"{branch}/")


def prune(path: Path, branch: str) -> None:
    """Write a checkpoint again without a branch of its tree, if it has that branch."""
    header = _header(path)
    with _opened(path) as file:
        names = [name for name in file.keys() if _is_under(name, branch)]  # noqa: SIM118
        if not names:
            return
        rest = [name for name in file.keys() if name not in names]  # noqa: SIM118
        arrays = {name: _intact(path, name, file, header) for name in rest}
    keys = {name: impl for name, impl in header["keys"].items() if name in arrays}
    write(path, Snapshot(arrays, keys, header["meta"], (*header["omitted"], *names)))


def save(path: Path, tree: Any, meta: Mapping[str, Any] | None = None) -> None:
    """Write a tree; it is on the disk when this returns."""
    write(path, snapshot(tree, meta))


def write(path: Path, taken: Snapshot, *, twin: Path | None = None) -> None:
    """Put a file in its place, or leave what is there; `twin` is a second name for the new one."""
    try:
        with written_beside(path) as partial:
            with partial.open("wb") as file:
                _write_safetensors(file, taken)
                file.flush()
                os.fsync(file.fileno())
            if twin is not None:
                _share(partial, twin)
    except OSError as error:
        raise OSError(f"{error}; what was there is as it was") from error


def _share(file: Path, twin: Path) -> None:
    """Give a file a second name; where there are no links, copy it."""
    with written_beside(twin) as second:
        second.unlink(missing_ok=True)
        try:
            second.hardlink_to(file)
        except OSError:
            shutil.copyfile(file, second)


class Writer:
    """Writes snapshots one after the other in the background; an error comes with the next call."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def write(self, path: Path, taken: Snapshot, *, twin: Path | None = None) -> None:
        self.wait()
        # Not a daemon: an interpreter that ends waits for it.
        self._thread = threading.Thread(target=self._write, args=(path, taken, twin))
        self._thread.start()

    def wait(self) -> None:
        """Until the last snapshot is on the disk."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _write(self, path: Path, taken: Snapshot, twin: Path | None) -> None:
        try:
            write(path, taken, twin=twin)
        except Exception as error:
            self._error = error


def _write_safetensors(file: Any, taken: Snapshot) -> None:
    # The largest types first: then every array begins where its type may.
    order = sorted(taken.arrays.items(), key=lambda item: (-item[1].itemsize, item[0]))
    text = json.dumps({
        "format": FORMAT,
        "majepa": __version__,
        "keys": taken.keys,
        "dtypes": {name: array.dtype.name for name, array in order},
        "checksums": {name: _checksum(array) for name, array in order},
        "omitted": taken.omitted,
        "meta": taken.meta,
    })  # fmt: skip
    header: dict[str, Any] = {
        "__metadata__": {"majepa": text, "checksum": str(zlib.crc32(text.encode()))}
    }
    end = 0
    for name, array in order:
        begin, end = end, end + array.nbytes
        header[name] = {
            "dtype": DTYPES[array.dtype.name],
            "shape": array.shape,
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little"))
    file.write(encoded)
    for _, array in order:
        file.write(_bytes(array))


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(_bytes(np.ascontiguousarray(array)))


def load(path: Path, like: Any) -> Any:
    """The tree that was saved, in the structure of `like`, whose leaves may be shapes alone."""
    wanted = _named_leaves(like)
    header = _header(path)
    with _opened(path) as file:
        stored = set(file.keys())
        omitted = set(header["omitted"])
        sources = {name: _source(name, stored) for name in wanted}
        for name, (source, _) in sources.items():
            if source not in stored | omitted:
                raise CheckpointError(f"{path} has no leaf {name!r}, which this run needs")
        for name in sorted(stored - {source for source, _ in sources.values()}):
            raise CheckpointError(f"{path} has a leaf {name!r} that this run does not know")
        layers = Counter(source for source, layer in sources.values() if layer is not None)
        together = {source: _intact(path, source, file, header) for source in layers}
        leaves = []
        for name, leaf in wanted.items():
            source, layer = sources[name]
            if source not in stored:
                leaves.append(jnp.zeros(leaf.shape, leaf.dtype))
                continue
            impl = header["keys"].get(source)
            if layer is None:
                array = _intact(path, source, file, header)
            elif together[source].shape[:1] == (layers[source],):
                array = np.ascontiguousarray(together[source][layer])
            else:
                found = _describe(together[source], impl)
                raise _misfit(path, source, found, f"{layers[source]} layers")
            leaves.append(_restore(path, name, array, impl, leaf))
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _source(name: str, stored: Set[str]) -> tuple[str, int | None]:
    """The leaf that holds one of this name: itself, or that of all layers together, with the
    number of its layer, in checkpoints from before layers were held apart."""
    together, _, layer = name.rpartition("/")
    if name not in stored and together in stored and layer.isdecimal():
        return together, int(layer)
    return name, None


def _intact(path: Path, name: str, file: Any, header: Mapping[str, Any]) -> np.ndarray:
    array = file.get_tensor(name)
    if _checksum(array) != header["checksums"].get(name):
        raise CheckpointError(f"{path} is damaged: leaf {name!r} is not what was written")
    return array


def read_meta(path: Path) -> dict[str, Any]:
    """The plain data that was kept with a checkpoint."""
    return _header(path)["meta"]


def read_omitted(path: Path) -> list[str]:
    """Names of the leaves that a checkpoint was written without."""
    return _header(path)["omitted"]


def _named_leaves(tree: Any) -> dict[str, Any]:
    named: dict[str, Any] = {}
    for place, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(place, simple=True, separator="/") or "value"
        if name in named:
            raise CheckpointError(f"two leaves of the tree have the same name, {name!r}")
        named[name] = leaf
    return named


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(key: Any) -> str:
    return str(jax.random.key_impl(key))


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no complete checkpoint: {error}") from error


def _header(path: Path) -> dict[str, Any]:
    with _opened(path) as file:
        stored = file.metadata() or {}
    try:
        header = json.loads(stored["majepa"])
        version = header["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of majepa") from error
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, written by majepa {header.get('majepa')}; "
            f"this is majepa {__version__}, which reads format {FORMAT}"
        )
    if stored.get("checksum") != str(zlib.crc32(stored["majepa"].encode())):
        raise CheckpointError(f"{path} is damaged: its header is not what was written")
    return {"omitted": [], **header}


def _restore(path: Path, name: str, array: np.ndarray, impl: str | None, like: Any) -> Any:
    """A stored array as the kind of leaf that `like` is."""
    if isinstance(like, bool | int | float):
        kind = type(like)
        if array.shape != () or array.dtype != np.asarray(like).dtype:
            raise _misfit(path, name, _describe(array, impl), f"a Python {kind.__name__}")
        return kind(array.item())
    wants_key = _is_key(like)
    if wants_key != (impl is not None):
        raise _misfit(path, name, _describe(array, impl), f"{like.dtype}{like.shape}")
    leaf = jax.random.wrap_key_data(jnp.array(array), impl=impl) if wants_key else array
    if leaf.shape != like.shape or leaf.dtype != like.dtype:
        raise _misfit(path, name, f"{leaf.dtype}{leaf.shape}", f"{like.dtype}{like.shape}")
    return leaf if wants_key or isinstance(like, np.ndarray) else jnp.array(leaf)


def _describe(array: np.ndarray, impl: str | None) -> str:
    return f"{'key data ' if impl else ''}{array.dtype}{array.shape}"


def _misfit(path: Path, name: str, found: str, wanted: str) -> CheckpointError:
    return CheckpointError(f"{path}: leaf {name!r} is {found}, this run needs {wanted}")
