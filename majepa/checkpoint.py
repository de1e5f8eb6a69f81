"""A whole run in one safetensors file: named leaves, nothing pickled.

A leaf is named by its path in the tree (`learner/critic/layers/0/weight`). Random keys are stored
as their data and Python numbers as scalars; the header says which. A file is written beside its
place and renamed, so that what is there is always complete.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import save_file

from . import __version__

FORMAT = 1
"""Raised when files of older versions can no longer be read as they are."""


class CheckpointError(ValueError):
    """A checkpoint does not fit; the message names the file and the leaf."""


def save(path: Path, tree: Any, meta: Mapping[str, Any] | None = None) -> None:
    """Write every leaf of a tree; `meta` is plain data to keep with it."""
    leaves = _named_leaves(tree)
    keys = {name: _key_impl(leaf) for name, leaf in leaves.items() if _is_key(leaf)}
    arrays = {name: _to_numpy(leaf) for name, leaf in leaves.items()}
    header = {
        "format": FORMAT,
        "majepa": __version__,
        "keys": keys,
        "dtypes": {name: array.dtype.name for name, array in arrays.items()},
        "meta": dict(meta or {}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file(arrays, partial, metadata={"majepa": json.dumps(header)})
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        partial.replace(path)
    except safetensors.SafetensorError as error:
        raise OSError(f"cannot write {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path, like: Any) -> Any:
    """The tree that was saved, in the structure of `like`, whose leaves may be shapes alone."""
    wanted = _named_leaves(like)
    header = _header(path)
    with _opened(path) as file:
        stored = set(file.keys())
        for name in wanted:
            if name not in stored:
                raise CheckpointError(f"{path} has no leaf {name!r}, which this run needs")
        for name in sorted(stored):
            if name not in wanted:
                raise CheckpointError(f"{path} has a leaf {name!r} that this run does not know")
        leaves = [
            _restore(path, name, file.get_tensor(name), header["keys"].get(name), leaf)
            for name, leaf in wanted.items()
        ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def read_meta(path: Path) -> dict[str, Any]:
    """The plain data that was kept with a checkpoint."""
    return _header(path)["meta"]


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


def _to_numpy(leaf: Any) -> np.ndarray:
    array = np.asarray(jax.device_get(jax.random.key_data(leaf) if _is_key(leaf) else leaf))
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def _opened(path: Path) -> Any:
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}")
    try:
        return safetensors.safe_open(path, framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is no complete checkpoint: {error}") from error


def _header(path: Path) -> dict[str, Any]:
    with _opened(path) as file:
        text = (file.metadata() or {}).get("majepa")
    try:
        header = json.loads(text or "")
        version = header["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of majepa") from error
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version}, written by majepa {header.get('majepa')}; "
            f"this is majepa {__version__}, which reads format {FORMAT}"
        )
    return header


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
