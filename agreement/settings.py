"""Settings: parsing what a user types, canonical names, and what they mean for a model.

In: `7,6,4,2`, `experts=6` or `kv:KEY=TYPE:VALUE`.  Out: `Setting`.  A routing policy is a `Setting` of that name alone;
its text is read in `routing`.
"""

from __future__ import annotations

import math
import re

from agreement.errors import NoEffectError, SettingError
from agreement.records import MetadataOverride, ModelFile, OverrideType, Setting
from agreement.routing import POLICY_STARTS, parse_policy, refuse_joined

BASELINE = Setting(name="baseline")
MAX_TEXT_BYTES = 127  # llama_model_kv_override keeps 128 bytes of a key or a text, the closing zero included
AGAIN = "again"  # ends the name of the noise floor's setting

# Where settings are joined: a value may hold a plus of its own, such as 1e+5.
_PLUS = re.compile(rf"\+(?=\s*(?:experts=|kv:|{'|'.join(POLICY_STARTS)}))")
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
        setting = experts_setting(_whole(part, f"--experts {text}", "a list such as 7,6,4,2"))
        if setting in settings:
            raise SettingError(f"--experts {text}: {setting.experts} is given twice; name each number once")
        settings.append(setting)
    return tuple(settings)


def _whole(text: str, where: str, example: str) -> int:
    """Return a whole number, or raise SettingError with where it stands and what to give."""
    token = text.strip()
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", token):
        raise SettingError(f"{where}: {token!r} is not a whole number; give {example}")
    return int(token)


def parse_override(text: str) -> MetadataOverride:
    """Parse `KEY=TYPE:VALUE` as llama.cpp's `--override-kv` takes it.

    Raises:
        SettingError: The text is not of that form, or the value is not of the type.
    """
    match = _OVERRIDE.fullmatch(text)
    if not match:
        raise SettingError(f"override {text!r}: expected KEY=TYPE:VALUE with TYPE one of int, float, bool, str")
    key, kind, value = match["key"], match["type"], match["value"]
    if len(key) > MAX_TEXT_BYTES:
        raise SettingError(f"override {text!r}: a key of {len(key)} bytes; llama.cpp keeps at most {MAX_TEXT_BYTES}")
    try:
        return MetadataOverride(key, _override_type(kind), _override_value(kind, value))
    except ValueError as error:
        raise SettingError(f"override {text!r}: {value!r} is not of type {kind}") from error


def _override_type(kind: str) -> OverrideType:
    kinds: dict[str, OverrideType] = {"int": "int", "float": "float", "bool": "bool", "str": "str"}
    return kinds[kind]


def _override_value(kind: str, value: str) -> int | float | bool | str:
    if kind == "int":
        number = int(value)
        if "_" in value or not -(2**63) <= number < 2**63:  # ctypes would wrap it around without a word
            raise ValueError(value)
        return number
    if kind == "float":
        if "_" in value or not math.isfinite(float(value)):
            raise ValueError(value)
        return float(value)
    if kind == "bool":
        if value not in ("true", "false"):
            raise ValueError(value)
        return value == "true"
    if len(value.encode()) > MAX_TEXT_BYTES:
        raise SettingError(f"override value of {len(value.encode())} bytes: llama.cpp keeps at most {MAX_TEXT_BYTES}")
    return value


def parse_setting(text: str) -> Setting:
    """Parse `experts=6`, `kv:KEY=TYPE:VALUE`, or several of them joined with `+`.

    Raises:
        SettingError: The text is none of these, sets something twice, or joins a routing policy to something.
    """
    experts: int | None = None
    overrides: list[MetadataOverride] = []
    for part in _PLUS.split(text):
        name, _, value = part.strip().partition("=")
        if name == "experts":
            if experts is not None:
                raise SettingError(f"setting {text!r}: experts is given twice")
            if "," in value:
                raise SettingError(f"setting {text!r}: one number of experts a setting")
            experts = experts_setting(_whole(value, f"setting {text!r}", "one such as experts=6")).experts
        elif part.strip().startswith("kv:"):
            override = parse_override(part.strip()[3:])
            if any(o.key == override.key for o in overrides):
                raise SettingError(f"setting {text!r}: {override.key} is given twice; llama.cpp takes only the first")
            overrides.append(override)
        else:
            refuse_joined(text, part)
            raise SettingError(f"setting {text!r}: expected experts=N, kv:KEY=TYPE:VALUE, topp=P or ser=K,T")
    return Setting(name=_name(experts, tuple(overrides), None), experts=experts, overrides=tuple(overrides))


def noise_floor(model: ModelFile) -> Setting:
    """Return the setting that runs the baseline again, in another batch shape and with other threads."""
    used = model.n_expert_used
    return Setting(name=AGAIN if used is None else f"experts={used},{AGAIN}", again=True)


def with_model(setting: Setting, model: str, label: str) -> Setting:
    """Return `setting` run on another model file, named by `label`.

    Raises:
        SettingError: A routing policy: nothing but its name would be left of it there.
    """
    if setting.name.startswith(POLICY_STARTS):
        raise SettingError(
            f"{setting.name} is a routing policy, which only `agreement sweep` can run; sweep {model} by itself"
        )
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
        SettingError: More experts than the model has, exactly as many as its file already uses, or their number
            given once as `experts=` and once more as an override; a policy that keeps more than the file uses.
        NoEffectError: The file keeps one expert count a layer, so that the override would be ignored.
    """
    if setting.name.startswith(POLICY_STARTS) and setting.experts is None:
        _check_policy(setting.name, model)
    n = setting.experts
    if n is None:
        return
    if model.n_expert_used is None:
        raise NoEffectError(
            f"experts={n} would have no effect: {model.name} keeps one expert count a layer, and llama.cpp does not "
            "override such an array; convert the model with a single count"
        )
    key = f"{model.architecture}.expert_used_count"
    if any(o.key == key for o in setting.overrides):
        raise SettingError(f"{setting.name}: experts= and {key} say the same thing; leave one out")
    if n > model.n_expert:
        raise SettingError(
            f"experts={n}: {model.name} has {model.n_expert} experts a layer; give 1 to {model.n_expert}"
        )
    if n == model.n_expert_used and not setting.overrides and setting.model is None:
        raise SettingError(f"experts={n} is what {model.name} uses by itself; it is the baseline, leave it out")


def _check_policy(name: str, model: ModelFile) -> None:
    """Refuse a policy that keeps more experts than the router selects; without a single count, the hook will."""
    policy, used = parse_policy(name), model.n_expert_used
    if used is not None and policy.keep > used:
        raise SettingError(
            f"{name}: {model.name} uses {used} experts a token and a policy only drops some of them; give K from 1 to "
            f"{used}, such as ser={max(1, used // 2)},0.2, or more experts without a policy as experts=N"
        )


def metadata_overrides(setting: Setting, architecture: str) -> tuple[MetadataOverride, ...]:
    """Return every override that carries out `setting` on a model of `architecture`, the expert count first."""
    if setting.experts is None:
        return setting.overrides
    count = MetadataOverride(f"{architecture}.expert_used_count", "int", setting.experts)
    return (count, *setting.overrides)
