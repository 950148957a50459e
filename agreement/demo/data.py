"""The demo model's training text: the running Python's standard library, as tokens.

In: nothing but the installed standard library.  Out: `TrainingData`, token ids of the training files and of
a few whole files held back from training.
"""

from __future__ import annotations

import hashlib
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 2048
END_OF_TEXT = "<|endoftext|>"

# Test suites repeat the same phrases thousands of times, and lib2to3 and the pydoc topics are tables, not code.
SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"})
SKIPPED_FOLDER_PREFIXES = ("config-",)
HELD_OUT_SHARE = 0.03


@dataclass(frozen=True)
class TrainingData:
    """Token ids of the standard library.

    Attributes:
        tokenizer: The byte-level BPE trained on the training files alone.
        train: (n,) uint16, all training files, each followed by the end-of-text token.
        held_out: (m,) uint16, whole files that neither the tokenizer nor the model saw.
        n_files: Files in `train` and in `held_out`.
        sha256: Digest of all file texts in order: what the recipe was run on.
    """

    tokenizer: Tokenizer
    train: np.ndarray
    held_out: np.ndarray
    n_files: tuple[int, int]
    sha256: str


def standard_library_files(root: Path | None = None) -> list[Path]:
    """Return the standard library's own Python sources without its tests, sorted by relative path."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts[:-1]
        if any(f in SKIPPED_FOLDERS or f.startswith(SKIPPED_FOLDER_PREFIXES) for f in folders):
            continue
        files.append(path)
    return sorted(files, key=lambda p: p.relative_to(root).as_posix())


def is_held_out(relative_path: str) -> bool:
    """Say whether a file is kept from training: by a digest of its name, so that the answer never drifts."""
    digest = hashlib.sha256(relative_path.encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < HELD_OUT_SHARE


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Train a byte-level BPE with GPT-2's pre-tokeniser, which llama.cpp knows as `gpt-2`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def load() -> TrainingData:
    """Read the standard library, train the tokenizer on its training files and encode both parts."""
    root = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[str], list[str]] = ([], [])
    digest = hashlib.sha256()
    for path in standard_library_files(root):
        name = path.relative_to(root).as_posix()
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        digest.update(name.encode() + b"\0" + text.encode() + b"\0")
        parts[is_held_out(name)].append(text)
    tokenizer = train_tokenizer(parts[0])
    end = tokenizer.token_to_id(END_OF_TEXT)

    def encode(texts: list[str]) -> np.ndarray:
        rows = [np.array([*e.ids, end], dtype=np.uint16) for e in tokenizer.encode_batch(texts)]
        return np.concatenate(rows)

    return TrainingData(
        tokenizer=tokenizer,
        train=encode(parts[0]),
        held_out=encode(parts[1]),
        n_files=(len(parts[0]), len(parts[1])),
        sha256=digest.hexdigest(),
    )
