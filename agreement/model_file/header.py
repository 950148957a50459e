"""The header of one GGUF file: its keys, and the names, shapes and sizes of its tensors.

In: a path.  Out: `Header`, or a `ModelFileError` that names what is wrong.  No tensor data is read.

Why not `gguf.GGUFReader`: it makes several NumPy objects of every token and every merge.  On a header with 151,936
tokens it took 6.4 s and 329 MB where this takes 0.03 s, and the header is read before every run.  It also refuses any
file with a tensor type it does not know, among them the quantisations that only ik_llama.cpp writes, and answers a cut
file with whatever exception NumPy raises first.  The sizes of tensor types still come from `gguf`.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian.
"""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import stat
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

from agreement.errors import ModelFileError

Scalar = int | float | bool | str

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
STRING, ARRAY = 8, 9
SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}


@dataclass(frozen=True)
class Tensor:
    """One tensor as the header describes it.

    Attributes:
        name: Its name, e.g. `blk.0.ffn_up_exps.weight`.
        shape: Its dimensions, fastest first, as GGUF stores them.
        n_bytes: Size of its data.
        start: Where its data begins in the file, bytes.
        kind: Number of its type in ggml.
    """

    name: str
    shape: tuple[int, ...]
    n_bytes: int
    start: int
    kind: int


@dataclass(frozen=True)
class Key:
    """Where the value of a key lies in the file.

    Attributes:
        kind: Number of its type in GGUF: one of `SCALARS`, `STRING` or `ARRAY`.
        start: First byte after the type: of an array, its element type.
        stop: One past the last byte.
    """

    kind: int
    start: int
    stop: int


@dataclass(frozen=True)
class Header:
    """What one GGUF file says before its tensor data.

    Attributes:
        path: The file.
        scalars: Keys that hold one value.
        array_lengths: Number of elements of each key that holds an array.
        keys: Where each value lies, in the file's order.
        tensors: In the file's order.
        data_offset: Where tensor data begins, bytes.
        file_size: Bytes.
    """

    path: str
    scalars: dict[str, Scalar]
    array_lengths: dict[str, int]
    keys: dict[str, Key]
    tensors: tuple[Tensor, ...]
    data_offset: int
    file_size: int


class _DamagedError(Exception):
    """The header contradicts itself; the message says how."""


class _Cursor:
    """A place in the mapped file; every read checks that the file is long enough.

    `struct.error` (and `OverflowError`, for a position beyond any address) means that it is not.
    """

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def number(self, layout: struct.Struct) -> Any:
        (value,) = layout.unpack_from(self.data, self.at)
        self.at += layout.size
        return value

    def skip(self, n_bytes: int) -> None:
        if self.at + n_bytes > len(self.data):
            raise struct.error
        self.at += n_bytes

    def text(self) -> str:
        start = self.at + _U64.size
        self.skip(_U64.size + _U64.unpack_from(self.data, self.at)[0])
        return self.data[start : self.at].decode("utf-8", errors="replace")

    def skip_strings(self, n: int) -> None:
        # The one hot loop: a vocabulary and its merges are some 300,000 strings.
        at, data, unpack = self.at, self.data, _U64.unpack_from
        for _ in range(n):
            at += 8 + unpack(data, at)[0]
        self.at = at
        self.skip(0)


def read_header(path: str) -> Header:
    """Read the header of one GGUF file.

    Raises:
        ModelFileError: The path cannot be read, is no file, no GGUF, of another version or byte order, damaged, or
            shorter than its own header says.
    """
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116  (paths travel as text in the records); opening a pipe would wait
        if stat.S_ISDIR(mode):
            raise ModelFileError(f"{path}: is a folder; give the .gguf file in it")
        if not stat.S_ISREG(mode):
            raise ModelFileError(f"{path}: not a regular file; give a .gguf file")
        with open(path, "rb") as file:  # noqa: PTH123  (the same)
            _check_start(path, file.read(8))
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, data)
    except (OSError, ValueError) as error:  # ValueError: a path with a zero byte, a file emptied meanwhile
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelFileError(f"{path}: cannot be read ({reason})") from error


def _check_start(path: str, start: bytes) -> None:
    if len(start) < 8 and _MAGIC.startswith(start[:4]):
        raise ModelFileError(f"{path}: cut short, only {len(start)} bytes long; get the file again")
    if start[:4] != _MAGIC:
        raise ModelFileError(f"{path}: not a GGUF file, it begins with {start[:4]!r}; give a .gguf file")
    version = _U32.unpack(start[4:])[0]
    if version & 0xFFFF == 0:
        raise ModelFileError(f"{path}: a big-endian GGUF; convert it for this machine with gguf-convert-endian")
    if version not in _VERSIONS:
        raise ModelFileError(f"{path}: GGUF version {version}; versions 2 and 3 are read, convert the model again")


def _parse(path: str, data: mmap.mmap) -> Header:
    cursor = _Cursor(data)
    cursor.skip(8)
    try:
        n_tensors, n_keys = cursor.number(_U64), cursor.number(_U64)
        scalars, array_lengths, keys = _keys(cursor, n_keys)
        alignment = _alignment(scalars)
        infos = [_tensor_info(cursor) for _ in range(n_tensors)]
        data_offset = -(-cursor.at // alignment) * alignment
    except (struct.error, OverflowError) as error:
        raise ModelFileError(
            f"{path}: cut short or damaged, its header does not end within its {len(data)} bytes; get the file again"
        ) from error
    except _DamagedError as error:
        raise ModelFileError(f"{path}: damaged, {error}; get the file again") from error
    tensors = _with_sizes(path, infos, data_offset, len(data))
    return Header(path, scalars, array_lengths, keys, tensors, data_offset, len(data))


def _keys(cursor: _Cursor, n_keys: int) -> tuple[dict[str, Scalar], dict[str, int], dict[str, Key]]:
    scalars: dict[str, Scalar] = {}
    array_lengths: dict[str, int] = {}
    keys: dict[str, Key] = {}
    for _ in range(n_keys):
        key = cursor.text()
        if key in keys:
            raise _DamagedError(f"key {key!r} is there twice")
        kind, start = cursor.number(_U32), cursor.at
        if kind == STRING:
            scalars[key] = cursor.text()
        elif kind in SCALARS:
            scalars[key] = cursor.number(SCALARS[kind])
        elif kind == ARRAY:
            array_lengths[key] = _skip_array(cursor, key)
        else:
            raise _DamagedError(f"key {key!r} is of unknown type {kind}")
        keys[key] = Key(kind, start, cursor.at)
    return scalars, array_lengths, keys


def _skip_array(cursor: _Cursor, key: str) -> int:
    kind, length = cursor.number(_U32), int(cursor.number(_U64))
    if kind == STRING:
        cursor.skip_strings(length)
    elif kind in SCALARS:
        cursor.skip(length * SCALARS[kind].size)
    else:
        raise _DamagedError(f"key {key!r} is an array of unknown type {kind}")
    return length


def _alignment(scalars: dict[str, Scalar]) -> int:
    value = scalars.get("general.alignment", 32)
    if not isinstance(value, int) or value <= 0 or value & (value - 1):
        raise _DamagedError(f"general.alignment is {value!r}, not a power of two")
    return value


@dataclass(frozen=True)
class _Info:
    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


def _tensor_info(cursor: _Cursor) -> _Info:
    name = cursor.text()
    n_dimensions = cursor.number(_U32)
    if n_dimensions > _MAX_DIMENSIONS:
        raise _DamagedError(f"tensor {name!r} has {n_dimensions} dimensions")
    shape = tuple(cursor.number(_U64) for _ in range(n_dimensions))
    return _Info(name, shape, cursor.number(_U32), cursor.number(_U64))


@functools.cache
def type_sizes() -> dict[int, tuple[int, int]]:
    """Return, for each tensor type that `gguf` knows, elements a block and bytes a block."""
    import gguf  # noqa: PLC0415  (not needed for `--help`)

    return {int(kind): (int(block), int(size)) for kind, (block, size) in gguf.GGML_QUANT_SIZES.items()}


def _with_sizes(path: str, infos: list[_Info], data_offset: int, file_size: int) -> tuple[Tensor, ...]:
    """Give each tensor its size, and check that its data lies within the file.

    A type that `gguf` does not know is taken to be as large as the gap to the next tensor, which may hold padding too.
    """
    ends = sorted({info.offset for info in infos} | {max(file_size - data_offset, 0)})
    following = dict(itertools.pairwise(ends))
    tensors: dict[str, Tensor] = {}
    for info in infos:
        if info.name in tensors:
            raise ModelFileError(f"{path}: damaged, tensor {info.name!r} is there twice; get the file again")
        block, size = type_sizes().get(info.kind, (0, 0))
        gap = following.get(info.offset, info.offset) - info.offset
        n_bytes = prod(info.shape) // block * size if block else gap
        start = data_offset + info.offset
        end = start + n_bytes
        if end > file_size:
            raise ModelFileError(
                f"{path}: cut short, tensor {info.name!r} ends at byte {end} of {file_size}; get the file again"
            )
        tensors[info.name] = Tensor(info.name, info.shape, n_bytes, start, info.kind)
    return tuple(tensors.values())
