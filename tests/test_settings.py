"""Settings: what is typed, what it is called, and what a model can do with it."""

from __future__ import annotations

import pytest
from fakes import fake_model
from hypothesis import given
from hypothesis import strategies as st

from agreement import settings as s
from agreement.errors import NoEffectError, SettingError
from agreement.records import MetadataOverride, Setting

KEYS = st.from_regex(r"[a-z0-9_.\-]{1,20}", fullmatch=True)
VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1).map(lambda v: ("int", v)),
    st.floats(allow_nan=False, allow_infinity=False).map(lambda v: ("float", v)),
    st.booleans().map(lambda v: ("bool", v)),
    st.from_regex(r"[a-z+=:,%ü]{1,10}", fullmatch=True)
    .filter(lambda v: not any(f"+{start}" in v for start in ("kv:", "experts=", "ser=", "topp=")))
    .map(lambda v: ("str", v)),
)


@st.composite
def any_setting(draw: st.DrawFn) -> Setting:
    experts = draw(st.none() | st.integers(1, 10**6))
    keys = draw(st.lists(KEYS, unique=True, min_size=int(experts is None), max_size=3))
    overrides = tuple(MetadataOverride(key, *draw(VALUES)) for key in keys)  # type: ignore[arg-type]  # drawn
    parts = ([f"experts={experts}"] if experts is not None else []) + [f"kv:{o}" for o in overrides]
    return Setting("+".join(parts), experts, overrides)


@given(any_setting())
def test_a_name_is_read_back_as_the_same_setting(setting: Setting) -> None:
    assert s.parse_setting(setting.name) == setting


@given(st.lists(st.integers(1, 999), unique=True, min_size=1, max_size=5))
def test_lists_of_experts(numbers: list[int]) -> None:
    parsed = s.parse_experts(" , ".join(map(str, numbers)))
    assert [one.experts for one in parsed] == numbers
    assert [one.name for one in parsed] == [f"experts={n}" for n in numbers]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not a whole number"),
        ("7,,6", "'' is not a whole number"),
        ("7;6", "'7;6' is not a whole number; give a list such as 7,6,4,2"),
        ("7.0", "is not a whole number"),
        ("1" * 5000, "is not a whole number"),  # Python itself refuses to read that many digits
        ("1_0", "is not a whole number"),
        ("0", "experts=0: at least one expert"),
        ("-3", "experts=-3: at least one expert"),
        ("7,6,7", "7 is given twice"),
        ("7,07", "7 is given twice"),
    ],
)
def test_bad_lists_of_experts(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        s.parse_experts(text)


@pytest.mark.parametrize(
    ("text", "override"),
    [
        ("a.b_c=int:5", MetadataOverride("a.b_c", "int", 5)),
        ("a=int:-9223372036854775808", MetadataOverride("a", "int", -(2**63))),
        ("a=float:0.85", MetadataOverride("a", "float", 0.85)),
        ("a=float:1e+5", MetadataOverride("a", "float", 100000.0)),
        ("a=bool:false", MetadataOverride("a", "bool", False)),
        ("a=str:x=y:z", MetadataOverride("a", "str", "x=y:z")),
        ("a=str:" + "x" * 127, MetadataOverride("a", "str", "x" * 127)),
        ("k" * 127 + "=int:1", MetadataOverride("k" * 127, "int", 1)),
    ],
)
def test_overrides(text: str, override: MetadataOverride) -> None:
    assert s.parse_override(text) == override
    assert s.parse_override(str(override)) == override


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected KEY=TYPE:VALUE"),
        ("a", "expected KEY=TYPE:VALUE"),
        ("a=5", "expected KEY=TYPE:VALUE"),
        ("a=u32:5", "expected KEY=TYPE:VALUE with TYPE one of int, float, bool, str"),
        ("=int:5", "expected KEY=TYPE:VALUE"),
        ("a=int:", "expected KEY=TYPE:VALUE"),
        ("a=int:5.0", "'5.0' is not of type int"),
        ("a=int:1_000", "is not of type int"),
        ("a=int:9223372036854775808", "is not of type int"),  # 2^63, which C would read as -2^63
        ("a=float:x", "'x' is not of type float"),
        ("a=float:nan", "is not of type float"),
        ("a=float:inf", "is not of type float"),
        ("a=bool:1", "'1' is not of type bool"),
        ("a=str:" + "ü" * 64, "value of 128 bytes: llama.cpp keeps at most 127"),
        ("k" * 128 + "=int:1", "a key of 128 bytes"),
    ],
)
def test_bad_overrides(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        s.parse_override(text)


def test_experts_come_first_in_the_name() -> None:
    setting = s.parse_setting(" kv:a=float:1 + experts=06 ")
    assert setting.name == "experts=6+kv:a=float:1.0"
    assert setting == s.parse_setting("experts=6+kv:a=float:1.0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected experts=N, kv:KEY=TYPE:VALUE, topp=P or ser=K,T"),
        ("baseline", "expected experts=N"),
        ("experts", "is not a whole number"),
        ("experts=6,4", "one number of experts a setting"),
        ("experts=6+experts=5", "experts is given twice"),
        ("kv:a=int:1+kv:a=int:2", "a is given twice; llama.cpp takes only the first"),
        ("experts=6+", "setting 'experts=6\\+': '6\\+' is not a whole number; give one such as experts=6"),
        ("experts=7+topp=0.9", "setting 'experts=7\\+topp=0.9': a routing policy cannot be joined with '\\+'"),
        ("kv:a=int:1 + ser=4,0.2", "cannot be joined with '\\+'; give each as a setting of its own"),
        ("topp=0.9", "expected experts=N"),
        ("kv:a", "expected KEY=TYPE:VALUE"),
    ],
)
def test_bad_settings(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        s.parse_setting(text)


@given(st.text(max_size=30))
def test_any_text_is_a_setting_or_an_error_of_one_line(text: str) -> None:
    for parse in (s.parse_setting, s.parse_experts, s.parse_override):
        message = "fine"
        try:
            parse(text)
        except SettingError as error:
            message = str(error)
        assert message
        assert message.isprintable() or not text.isprintable()


def test_another_model_is_part_of_the_name() -> None:
    assert s.with_model(s.BASELINE, "q4.gguf", "q4").name == "model=q4"
    both = s.with_model(s.experts_setting(6), "q4.gguf", "q4")
    assert (both.name, both.experts, both.model) == ("experts=6+model=q4", 6, "q4.gguf")


def test_a_policy_is_not_run_on_another_model() -> None:
    with pytest.raises(SettingError, match=r"ser=4,0\.2 is a routing policy, which only `agreement sweep` can run"):
        s.with_model(Setting("ser=4,0.2"), "q4.gguf", "q4")


def test_what_a_model_can_run() -> None:
    model = fake_model()  # 8 of 32 experts
    for text in ("experts=1", "experts=7", "experts=9", "experts=32", "experts=8+kv:a=int:1", "kv:a=int:1"):
        s.check_against_model(s.parse_setting(text), model)
    s.check_against_model(s.with_model(s.experts_setting(8), "other.gguf", "other"), model)
    for text in ("ser=1,0.2", "ser=8,0.2", "topp=0.9"):
        s.check_against_model(Setting(text), model)
    s.check_against_model(Setting("ser=9,0.2"), fake_model(n_expert_used=None))  # the router hook will know


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experts=33", "experts=33: fake has 32 experts a layer; give 1 to 32"),
        ("experts=8", "experts=8 is what fake uses by itself; it is the baseline, leave it out"),
        ("experts=6+kv:qwen3moe.expert_used_count=int:5", "say the same thing; leave one out"),
    ],
)
def test_what_a_model_cannot_run(text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        s.check_against_model(s.parse_setting(text), fake_model())


def test_a_policy_that_keeps_more_than_the_model_uses() -> None:
    with pytest.raises(
        SettingError, match=r"ser=9,0.2: fake uses 8 experts a token .*; give K from 1 to 8, such as ser=4"
    ):
        s.check_against_model(Setting("ser=9,0.2"), fake_model())


def test_a_count_a_layer_cannot_be_overridden() -> None:
    with pytest.raises(NoEffectError, match="experts=6 would have no effect"):
        s.check_against_model(s.experts_setting(6), fake_model(n_expert_used=None))


def test_overrides_that_carry_out_a_setting() -> None:
    extra = MetadataOverride("qwen3moe.expert_weights_scale", "float", 0.9)
    count = MetadataOverride("qwen3moe.expert_used_count", "int", 6)
    assert s.metadata_overrides(s.BASELINE, "qwen3moe") == ()
    assert s.metadata_overrides(s.experts_setting(6), "qwen3moe") == (count,)
    assert s.metadata_overrides(s.parse_setting(f"kv:{extra}+experts=6"), "qwen3moe") == (count, extra)
    assert s.metadata_overrides(s.parse_setting(f"kv:{extra}"), "qwen3moe") == (extra,)
