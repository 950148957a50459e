"""One file of named arrays: versioned, checked, written whole or not at all.

In: arrays by name and a JSON-able `meta`.  Out: a file, and from it the same again or a `StoreError`.

Layout, little endian: `magic` 8 bytes, `version` uint32, `header_bytes` uint32, `header_hash` uint64 (xxh3), then the
header as JSON, then each array at a multiple of 64 bytes.  The header gives each array's name, dtype, shape, offset
and xxh3 hash.  Equal content gives equal bytes: there is no time stamp.  A zip of `.npy` files was rejected: its CRC
costs more than the scoring on large vocabularies, and it stamps the time.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from agreement.errors import StoreError

MAGIC = b"agrmnt\r\n"  # a transfer that rewrites line ends breaks the magic, as PNG's does
VERSION = 1
ALIGN = 64
_HEAD = struct.Struct("<8sIIQ")

Arrays = dict[str, NDArray[Any]]


def write_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write `data` to `path` whole or not at all; see `write_arrays` for `durable`."""
    _write_parts(path, [data], durable=durable)


def write_arrays(path: Path, arrays: Arrays, meta: dict[str, Any], *, durable: bool = False) -> None:
    """Write named arrays and a JSON-able `meta` to `path`.

    The file appears under its name only when it is whole.  With `durable` it is also forced to the disk; chunk files
    are not, because a torn one is found by its hash and recorded again.

    Raises:
        StoreError: The disk is full or refuses; nothing is left under `path`.
    """
    entries, parts, offset = [], [], 0
    for name, array in arrays.items():
        block = np.asarray(array, order="C")  # ascontiguousarray would make a single number one row
        if block.dtype.byteorder == ">":
            block = block.astype(block.dtype.newbyteorder("<"))
        offset = -(-offset // ALIGN) * ALIGN
        entries.append(
            {
                "name": name,
                "dtype": block.dtype.str,
                "shape": list(block.shape),
                "offset": offset,
                "xxh3": xxhash.xxh3_64_hexdigest(_bytes_of(block)),
            }
        )
        parts.append((offset, block))
        offset += block.nbytes
    header = json.dumps({"arrays": entries, "meta": meta}, sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-(_HEAD.size + len(header)) % ALIGN)
    head = _HEAD.pack(MAGIC, VERSION, len(header), xxhash.xxh3_64_intdigest(header))
    pieces: list[Any] = [head + header]
    position = 0
    for start, block in parts:
        pieces += [b"\0" * (start - position), _bytes_of(block)]
        position = start + block.nbytes
    _write_parts(path, pieces, durable=durable)


def _bytes_of(block: NDArray[Any]) -> Any:
    return block.reshape(-1).data.cast("B") if block.size else b""


def _write_parts(path: Path, pieces: list[Any], *, durable: bool) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        reason = error.strerror or str(error)
        raise StoreError(f"cannot write {path}: {reason}; free space or choose another place, then --resume") from error


def read_arrays(path: Path, names: tuple[str, ...] | None = None) -> tuple[Arrays, dict[str, Any]]:
    """Read arrays (all, or those named) and the meta of a file; arrays are memory-mapped, read-only and verified.

    Raises:
        StoreError: The file is missing, not one of ours, of another version, cut short, or a byte of it has changed.
    """
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
    except FileNotFoundError:
        raise StoreError(f"{path} is missing; run again with --resume to record it") from None
    except (OSError, ValueError) as error:
        raise _damaged(path, f"cannot be read ({error})") from error
    header = _read_header(path, raw)
    end = _HEAD.size + int(raw[12:16].view("<u4")[0])
    body = end
    arrays: Arrays = {}
    for entry in header["arrays"]:
        dtype, shape = np.dtype(entry["dtype"]), tuple(entry["shape"])
        start = body + entry["offset"]
        n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        block = raw[start : start + n_bytes]
        if block.nbytes != n_bytes:
            raise _damaged(path, f"is cut short: array {entry['name']} needs {n_bytes} bytes, {block.nbytes} are left")
        if raw[end:start].any():  # no hash covers the filling between arrays
            raise _damaged(path, f"is damaged before array {entry['name']}")
        end = start + n_bytes
        if names is not None and entry["name"] not in names:
            continue
        if xxhash.xxh3_64_hexdigest(block.data if n_bytes else b"") != entry["xxh3"]:
            raise _damaged(path, f"is damaged: array {entry['name']} does not match its hash")
        arrays[entry["name"]] = block.view(dtype).reshape(shape)
    if raw.size > end:
        raise _damaged(path, f"has {raw.size - end} bytes too many")
    missing = set(names or ()) - arrays.keys()
    if missing:
        raise _damaged(path, f"has no array {min(missing)!r}")
    return arrays, header["meta"]


def array_names(path: Path) -> tuple[str, ...]:
    """Return the names of a file's arrays without reading them; errors as in `read_arrays`."""
    try:
        raw = np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:
        raise _damaged(path, f"cannot be read ({error})") from error
    return tuple(entry["name"] for entry in _read_header(path, raw)["arrays"])


def _read_header(path: Path, raw: NDArray[np.uint8]) -> dict[str, Any]:
    if raw.size < _HEAD.size:
        raise _damaged(path, f"is cut short ({raw.size} bytes)")
    magic, version, n_header, digest = _HEAD.unpack(raw[: _HEAD.size].tobytes())
    if magic != MAGIC:
        raise _damaged(path, "is not a recording of agreement")
    if version != VERSION:
        raise StoreError(f"{path} has format version {version}, this program reads {VERSION}; record it again")
    header = raw[_HEAD.size : _HEAD.size + n_header].tobytes()
    if len(header) != n_header or xxhash.xxh3_64_intdigest(header) != digest:
        raise _damaged(path, "has a damaged header")
    parsed: dict[str, Any] = json.loads(header)
    return parsed


def _damaged(path: Path, what: str) -> StoreError:
    return StoreError(f"{path} {what}; delete that file and run again with --resume")
