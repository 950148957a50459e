"""The engine's log: whole lines from fragments, and what they prove."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agreement.engine.log import KEPT_LINES, EngineLog, lacks_memory

# As llama.cpp prints it at load with `--override-kv`, in its own spacing.
LOAD = """llama_model_loader: loaded meta data with 28 key-value pairs and 75 tensors
validate_override: Using metadata override (  int) 'qwen3moe.expert_used_count' = 6
validate_override: Using metadata override (float) 'qwen3moe.expert_weights_scale' = 0.850000
print_info: n_expert         = 32
print_info: n_expert_used    = 6
........................................
llama_context: n_ctx = 512
"""


def feed(*fragments: str) -> EngineLog:
    log = EngineLog()
    for fragment in fragments:
        log.feed(fragment)
    return log


def test_what_a_load_proves() -> None:
    proof = feed(LOAD).proof()
    assert proof.overrides == ("qwen3moe.expert_used_count=int:6", "qwen3moe.expert_weights_scale=float:0.850000")
    assert proof.n_expert_used == 6


def test_an_override_in_fragments_and_said_twice() -> None:
    # The library logs each piece of that line by itself, and validates the count once for the layers and once more.
    pieces = ["validate_override: Using metadata override (", "  int) 'a.b' = ", "6", "\n"]
    log = feed(*pieces)
    assert log.proof().overrides == ("a.b=int:6",)
    assert feed(*pieces, *pieces).proof().overrides == ("a.b=int:6",)


def test_a_line_without_its_end_proves_nothing_yet() -> None:
    log = feed("validate_override: Using metadata override (  int) 'a.b' = 1")
    assert log.proof().overrides == ()
    log.feed("2\n")
    assert log.proof().overrides == ("a.b=int:12",)


def test_the_first_count_stands() -> None:
    assert feed("print_info: n_expert_used = 6\nprint_info: n_expert_used = 8\n").proof().n_expert_used == 6


def test_a_load_that_changes_nothing() -> None:
    proof = feed("print_info: n_expert = 32\nUsing metadata of nothing\n").proof()
    assert proof.overrides == ()
    assert proof.n_expert_used is None


@given(st.lists(st.integers(0, len(LOAD)), max_size=6))
def test_where_fragments_end_does_not_matter(cuts: list[int]) -> None:
    ends = [0, *sorted(cuts), len(LOAD)]
    fragments = [LOAD[a:b] for a, b in pairwise(ends)]
    heard: list[str] = []
    log = EngineLog(heard.append)
    for fragment in fragments:
        log.feed(fragment)
    assert heard == LOAD.split("\n")[:-1] == list(log.lines)
    assert log.proof() == feed(LOAD).proof()


def test_last_words_leave_out_dots_and_blanks() -> None:
    log = feed("one\n", "two\n\n", ".....\n", " three \n", "four\n")
    assert log.last_words() == "two | three | four"
    assert log.last_words(1) == "four"
    assert EngineLog().last_words() == "the engine logged nothing"


def test_last_words_of_an_abort() -> None:
    """The check that failed, and not the stack that a debugger prints after it."""
    log = EngineLog()
    log.feed("sched_reserve: a line\n")
    log.feed("/x/y 1/llama.cpp/src/llama-context.cpp:2273: GGML_ASSERT(a <= b.n_max) failed\n[New LWP 7]\n")
    log.feed("#1  0x7f in abort () at ./stdlib/abort.c:79\n79\t./stdlib/abort.c: No such file or directory.\n")
    log.feed("#44 0x55 in _start ()\n[Inferior 1 (process 9) detached]\n")
    assert log.last_words() == "llama-context.cpp:2273: GGML_ASSERT(a <= b.n_max) failed"


def test_last_words_since() -> None:
    log = feed("one\n", "two\n")
    loaded = log.n_lines
    assert log.last_words(since=loaded) == "the engine logged nothing"
    log.feed("three\n")
    assert log.last_words(since=loaded) == "three"
    log.feed("x\n" * (KEPT_LINES + 1) + "end\n")  # what came before is kept no more
    assert log.last_words(2, since=loaded) == "x | end"


# As the engine's sources word them (llama-context.cpp, llama-kv-cache.cpp), and what C++ says of itself.
@pytest.mark.parametrize(
    ("words", "memory"),
    [
        ("failed to initialize the context: failed to allocate buffer for kv cache", True),
        ("graph_reserve: failed to allocate compute buffers", True),
        ("failed to initialize the context: failed to reserve graph for Flash Attention check", True),
        ("failed to initialize the context: std::bad_alloc", True),
        ("the engine logged nothing", True),
        ("llama_init_from_model: quantized V cache requires flash_attn to be enabled", False),
        ("llama_init_from_model: K cache type q8_0 with block size 32 does not divide n_embd_head_k=8", False),
        ("llama_init_from_model: model does not support different K (q8_0) and V (f16) cache types", False),
    ],
)
def test_which_last_words_tell_of_memory(words: str, memory: bool) -> None:
    assert lacks_memory(words) is memory


def test_memory_of_a_long_log_is_bounded_but_its_proof_is_kept() -> None:
    log = feed(LOAD, "x\n" * (KEPT_LINES + 10))
    assert len(log.lines) == KEPT_LINES
    assert log.proof() == feed(LOAD).proof()
