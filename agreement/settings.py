"""Settings: parsing what a user types, canonical names, and what they mean for a model.

In: `7,6,4,2`, `experts=6` or `kv:KEY=TYPE:VALUE`.  Out: `Setting`.
"""

from __future__ import annotations

import re

from agreement.errors import NoEffectError, SettingError
from agreement.records import MetadataOverride, ModelFile, OverrideType, Setting

BASELINE = Setting(name="baseline")

_OVERRIDE = re.compile(r"(?P<key>[A-Za-z0-9_.\-]+)=(?P<type>int|float|bool|str):(?P<value>.+)")


def experts_setting(n: int) -> Setting:
    """Return the setting that uses `n` experts per token."""
    if n < 1:
        raise SettingError(f"experts={n}: at least one expert must be used; give a number from 1 on")
    return Setting(name=f"experts={n}", experts=n)


def parse_experts(text: str) -> tuple[Setting, ...]:
    """Parse a list such as `7,6,4,2`.

    Raises:
        SettingError: An empty list, something that is not a whole number, a number below 1, or one given twice.
    """
    settings: list[Setting] = []
    for part in text.split(","):
        token = part.strip()
        if not re.fullmatch(r"[+-]?[0-9]+", token):
            raise SettingError(f"--experts {text}: {token!r} is not a whole number; give a list such as 7,6,4,2")
        setting = experts_setting(int(token))
        if setting in settings:
            raise SettingError(f"--experts {text}: {int(token)} is given twice; name each number once")
        settings.append(setting)
    return tuple(settings)


def parse_override(text: str) -> MetadataOverride:
    """Parse `KEY=TYPE:VALUE` as llama.cpp's `--override-kv` takes it.

    Raises:
        SettingError: The text is not of that form, or the value is not of the type.
    """
    match = _OVERRIDE.fullmatch(text)
    if not match:
        raise SettingError(f"override {text!r}: expected KEY=TYPE:VALUE with TYPE one of int, float, bool, str")
    key, kind, value = match["key"], match["type"], match["value"]
    try:
        return MetadataOverride(key, _override_type(kind), _override_value(kind, value))
    except ValueError as error:
        raise SettingError(f"override {text!r}: {value!r} is not of type {kind}") from error


def _override_type(kind: str) -> OverrideType:
    kinds: dict[str, OverrideType] = {"int": "int", "float": "float", "bool": "bool", "str": "str"}
    return kinds[kind]


def _override_value(kind: str, value: str) -> int | float | bool | str:
    if kind == "int":
        return int(value)
    if kind == "float":
        return float(value)
    if kind == "bool":
        if value not in ("true", "false"):
            raise ValueError(value)
        return value == "true"
    if len(value.encode()) > 127:  # llama_model_kv_override keeps 128 bytes with the closing zero
        raise SettingError(f"override value of {len(value.encode())} bytes: llama.cpp keeps at most 127")
    return value


def parse_setting(text: str) -> Setting:
    """Parse `experts=6`, `kv:KEY=TYPE:VALUE`, or several of them joined with `+`.

    Raises:
        SettingError: The text is none of these.
    """
    experts: int | None = None
    overrides: list[MetadataOverride] = []
    for part in text.split("+"):
        name, _, value = part.strip().partition("=")
        if name == "experts":
            if experts is not None:
                raise SettingError(f"setting {text!r}: experts is given twice")
            (one,) = parse_experts(value) if "," not in value else (None,)
            if one is None:
                raise SettingError(f"setting {text!r}: one number of experts a setting")
            experts = one.experts
        elif part.strip().startswith("kv:"):
            overrides.append(parse_override(part.strip()[3:]))
        else:
            raise SettingError(f"setting {text!r}: expected experts=N or kv:KEY=TYPE:VALUE")
    return Setting(name=_name(experts, tuple(overrides), None), experts=experts, overrides=tuple(overrides))


def with_model(setting: Setting, model: str, label: str) -> Setting:
    """Return `setting` run on another model file, named by `label`."""
    name = f"model={label}" if setting.name == BASELINE.name else f"{setting.name}+model={label}"
    return Setting(name=name, experts=setting.experts, overrides=setting.overrides, model=model)


def _name(experts: int | None, overrides: tuple[MetadataOverride, ...], model: str | None) -> str:
    parts = [f"experts={experts}"] if experts is not None else []
    parts += [f"kv:{o}" for o in overrides]
    parts += [f"model={model}"] if model is not None else []
    return "+".join(parts) or BASELINE.name


def check_against_model(setting: Setting, model: ModelFile) -> None:
    """Refuse a setting that this model cannot run or that would change nothing.

    Raises:
        SettingError: More experts than the model has, or exactly as many as its file already uses.
        NoEffectError: The file keeps one expert count a layer, so that the override would be ignored.
    """
    n = setting.experts
    if n is None:
        return
    if model.n_expert_used is None:
        raise NoEffectError(
            f"experts={n} would have no effect: {model.name} keeps one expert count a layer, and llama.cpp does not "
            "override such an array; convert the model with a single count"
        )
    if n > model.n_expert:
        raise SettingError(
            f"experts={n}: {model.name} has {model.n_expert} experts a layer; give 1 to {model.n_expert}"
        )
    if n == model.n_expert_used and not setting.overrides and setting.model is None:
        raise SettingError(f"experts={n} is what {model.name} uses by itself; it is the baseline, leave it out")


def metadata_overrides(setting: Setting, architecture: str) -> tuple[MetadataOverride, ...]:
    """Return every override that carries out `setting` on a model of `architecture`, the expert count first."""
    if setting.experts is None:
        return setting.overrides
    count = MetadataOverride(f"{architecture}.expert_used_count", "int", setting.experts)
    return (count, *setting.overrides)
