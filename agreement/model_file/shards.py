"""The files of one model: a single GGUF, or all shards of a split one.

In: the path of any of its files.  Out: the headers of all of them, in order.
"""

from __future__ import annotations

import re
from pathlib import Path

from agreement.errors import ModelFileError
from agreement.model_file.header import Header, Scalar, read_header

_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<no>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


def read_shards(path: str) -> tuple[Header, ...]:
    """Read the headers of a model's files, whichever of them is given.

    Raises:
        ModelFileError: A file cannot be read; a shard is missing, of another split, or misnamed; tensors are missing.
    """
    given = read_header(path)
    count = _whole(given.scalars.get("split.count", 0))
    if count <= 1:
        return (given,)
    match = _SHARD_NAME.fullmatch(Path(path).name)
    if not match or int(match["count"]) != count:
        raise ModelFileError(
            f"{path}: one of {count} shards, but not named PREFIX-0000N-of-{count:05d}.gguf; rename it so, "
            "or the others cannot be found"
        )
    paths = [str(Path(path).with_name(f"{match['prefix']}-{i + 1:05d}-of-{count:05d}.gguf")) for i in range(count)]
    missing = [Path(p).name for p in paths if not Path(p).exists()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelFileError(f"{path}: shard {missing[0]}{more} of {count} is missing; put all shards in one folder")
    headers = tuple(given if p == str(Path(path)) else read_header(p) for p in paths)
    _check(headers, count)
    return headers


def _whole(value: Scalar) -> int:
    return value if isinstance(value, int) and value >= 0 else 0


def _check(headers: tuple[Header, ...], count: int) -> None:
    seen: set[str] = set()
    for i, header in enumerate(headers):
        no, of = header.scalars.get("split.no"), header.scalars.get("split.count")
        if (no, of) != (i, count):
            raise ModelFileError(
                f"{header.path}: says it is shard {no} (from 0) of {of}, its name says {i} of {count}; "
                "put shards of one split in one folder, with their own names"
            )
        again = seen.intersection(t.name for t in header.tensors)
        if again:
            raise ModelFileError(f"{header.path}: tensor {min(again)!r} is in another shard too; get the shards again")
        seen.update(t.name for t in header.tensors)
    expected = headers[0].scalars.get("split.tensors.count", len(seen))
    if expected != len(seen):
        raise ModelFileError(
            f"{headers[0].path}: its shards hold {len(seen)} tensors, the first says {expected}; get the shards again"
        )
