"""The logits files of `llama-perplexity --kl-divergence-base`: read, write, tell the writer, score two of them.

In: files of any size, read in blocks of rows, so that memory stays bounded.  Out: `LogitsFile` (what the header and
the row heads say), chunks of quantised log-probabilities, and `PositionScores` of one file against another.
Every lie in a file raises `LogitsFileError` before anything of the size it claims is allocated.
"""

from __future__ import annotations

from agreement.kld.comparison import ScoredChunk, score_files
from agreement.kld.logits_file import LogitsFile, Writer, facts, open_logits_file
from agreement.kld.reader import LogitsChunk, iter_chunks, read_chunk
from agreement.kld.rows import IK_LLAMA_NATS, LLAMA_CPP_NATS, QuantisedRows, dequantise, quantise
from agreement.kld.writer import write_logits_file

__all__ = [
    "IK_LLAMA_NATS",
    "LLAMA_CPP_NATS",
    "LogitsChunk",
    "LogitsFile",
    "QuantisedRows",
    "ScoredChunk",
    "Writer",
    "dequantise",
    "facts",
    "iter_chunks",
    "open_logits_file",
    "quantise",
    "read_chunk",
    "score_files",
    "write_logits_file",
]
