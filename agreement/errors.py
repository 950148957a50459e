"""Every trouble a user can cause or meet, as one exception tree.

```
AgreementError
├── UsageError          an argument that cannot be carried out
├── ModelFileError      a model file that is not one, is cut short, dense, or lacks a shard
├── CorpusError         no usable text, or too little of it
├── SettingError        a setting that is malformed or impossible for this model
├── EngineError         the engine refused, crashed or gave numbers that are no numbers
│   ├── ContextError    no context of that size, for lack of memory
│   ├── EngineDiedError  the engine's process ended in the middle of its work
│   │   └── KilledForMemoryError  the system ended it because memory ran out
│   ├── NoEffectError   a setting that changed no logit
│   └── UnstableEngineError  an engine that does not repeat itself
├── StoreError          a run directory or recording that is damaged, of another format, or in use
│   └── IdentityError   two passes that may not be compared, naming the field
├── LogitsFileError     a llama-perplexity logits file that lies or is cut short
└── GateError           a requirement that cannot be read or judged
```

A message is one line: what is wrong, with the offending value, and what to do next.
"""

from __future__ import annotations


class AgreementError(Exception):
    """Base of everything this package raises on purpose; the command line prints it and exits with 1."""


class UsageError(AgreementError):
    """An argument that cannot be carried out as given."""


class ModelFileError(AgreementError):
    """A model file that cannot be used: not a GGUF, cut short, a shard missing, or dense."""


class CorpusError(AgreementError):
    """A corpus without usable text, or with too little of it."""


class SettingError(AgreementError):
    """A setting that is malformed, or impossible for this model."""


class EngineError(AgreementError):
    """The engine could not do its work: load failure, crash, or logits that are NaN or infinite."""


class ContextError(EngineError):
    """The engine could not make a context of the size asked for; a smaller one may do."""


class EngineDiedError(EngineError):
    """The engine's process ended in the middle of its work.

    Attributes:
        what: What happened, one clause.
        left: What there is of the run, one clause.
        advice: What to do about it, one clause or none.
        resumable: A run directory is there that can be gone on with.
    """

    def __init__(self, what: str, *, left: str = "", advice: str = "", resumable: bool = False) -> None:
        super().__init__("; ".join(part for part in (what, left, advice) if part))
        self.what, self.left, self.advice, self.resumable = what, left, advice, resumable


class KilledForMemoryError(EngineDiedError):
    """The system killed the engine's process because memory ran out; less held or a smaller micro-batch may do."""


class NoEffectError(EngineError):
    """A setting left every logit of a whole chunk bit-identical to the baseline."""


class UnstableEngineError(EngineError):
    """The engine gave different logits for the same tokens in the same batch shape."""


class StoreError(AgreementError):
    """A run directory or recording that is damaged, incomplete, in use, or of another format."""


class IdentityError(StoreError):
    """Two passes differ in something that must be equal; the message names the field."""


class LogitsFileError(AgreementError):
    """A llama-perplexity logits file that is malformed or cut short."""


class GateError(AgreementError):
    """A requirement that cannot be read, or names what the run does not have."""
