"""Settings: fields of structs, their descriptions, and the sources of their values.

A setting is a field of a msgspec.Struct annotated with `setting(...)`, which gives its help and its flag. Its default
is that of the field and is stated nowhere else. Its key in a file is its encoded name, after the name of its table.
Both the options of the command line and the tables of a file are derived from this.

`Given` contains the values that were given, by key, with their sources: a flag, or a key of a file. It merges several
sources, builds structs from them, and names settings in errors as the user wrote them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin

import msgspec

from kvarts.base.errors import ConfigError, did_you_mean, parts_of
from kvarts.base.files import PREFIX

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "INLINE",
    "OPTIONS",
    "SET",
    "AtLeastOne",
    "Flags",
    "Given",
    "KeySource",
    "Keywords",
    "Section",
    "Setting",
    "SettingError",
    "ValueSource",
    "Within",
    "Words",
    "given_by_flags",
    "given_by_keywords",
    "given_in",
    "inline_settings",
    "is_inline",
    "keyword_of",
    "param_of",
    "param_of_inline",
    "parts_of_error",
    "setting",
    "settings_by_param",
    "settings_of",
    "value_kind",
]

StructT = TypeVar("StructT", bound=msgspec.Struct)

AtLeastOne = Annotated[int, msgspec.Meta(ge=1)]
"""The type of a setting with a minimum of 1, enforced in files and on the command line."""

_NAME = r"\{(\w+(?:\.\w+)*)\}"  # compiled on first use


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One setting: the field of a struct, its key in a file, its flag on the command line, and its default.

    `default_text`: shown in the help instead of the default. `replaces`: keys of settings that it drops when it is
    merged over them. `is_name`: not a value, but the name of a table chosen by the user. `name`: short, as an option
    and as an argument of a Python call would have it.
    """

    field: str
    key: str
    kind: Any
    help: str
    default: Any = None
    default_text: str | None = None
    flag: str | None = None
    metavar: str | None = None
    replaces: tuple[str, ...] = ()
    is_name: bool = False
    name: str = ""


class Words(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a field by `setting`. In a signature, it appears as the first sentence of its help."""

    help: str
    flag: str | None
    metavar: str | None
    default: str | None
    replaces: tuple[str, ...]
    kind: Any

    def __repr__(self) -> str:
        return repr(self.help.split(". ")[0].rstrip("."))


def setting(
    help: str,  # noqa: A002
    *,
    flag: str | None = "",
    metavar: str | None = None,
    default: str | None = None,
    replaces: tuple[str, ...] = (),
    kind: Any = None,
) -> Words:
    """Return the annotation that makes the field of a struct a setting.

    `kind`: the type of given values, if it differs from the field's type. `flag`: derived from the key by default;
    None: no flag; INLINE: in the option of the table. `default`: text for the help, if the field's default does not
    explain itself. `replaces`: fields of the same struct, or keys, see Setting.
    """
    return Words(help=help, flag=flag, metavar=metavar, default=default, replaces=replaces, kind=kind)


OPTIONS = frozenset(
    [
        "model",
        "device",
        "tensor_parallel",
        "kv_memory",
        "kv_dtype",
        "pipeline_parallel",
        "data_parallel",
        "pages",
        "page_size",
        "max_batched_tokens",
        "max_seqs",
        "cost",
        "replicas",
        "router",
        "concurrency",
        "speedup",
        "engine",
        "frontend_ms",
        "step_by_step",
        "audit",
        "kv_groups",
        "eviction",
        "profile",
        "slo.ttft_ms",
        "slo.tpot_ms",
        "trace_block_size",
        "offload.host_pages",
        "offload.host_memory",
        "offload.policy",
    ]
)
"""The settings with an option of their own, by key. All others are given as `--set KEY=VALUE`, or in a file."""

SET = "--set "
"""How the flag of a setting without an option of its own begins."""

INLINE = " "
"""The flag of a setting that is given in the option of its table: `--transfer rate=25GB/s,latency_ms=2`."""


def is_inline(setting: Setting) -> bool:
    """Return whether a setting is given in the option of its table; its flag is then that option and its field."""
    return setting.flag is not None and INLINE in setting.flag and not setting.flag.startswith(SET)


@cache
def settings_of(struct: type[msgspec.Struct], table: str = "") -> tuple[Setting, ...]:
    """Return the settings among the fields of `struct`, with keys in `table`; an empty `table` is the top of a file."""
    found = []
    prefix = f"{table}." if table else ""
    _evaluate_annotations(struct)
    for field in msgspec.structs.fields(struct):
        words = _words_of(field.type)
        if words is None:
            continue
        key = prefix + field.encode_name
        flag = _flag_of(words, table, field.encode_name)
        default = field.default if field.default_factory is msgspec.NODEFAULT else None
        found.append(
            Setting(
                field=field.name,
                key=key,
                kind=field.type if words.kind is None else words.kind,
                help=words.help,
                default=default,
                default_text=words.default,
                flag=flag if flag is None or INLINE in flag or key in OPTIONS else SET + key,
                metavar=words.metavar,
                replaces=tuple(prefix + name for name in words.replaces),
                name=(flag or key).removeprefix("--"),
            )
        )
    return tuple(found)


def _flag_of(words: Words, table: str, name: str) -> str | None:
    if words.flag == INLINE:
        return f"--{table} {name}"
    if words.flag == "":
        return "--" + ".".join(filter(None, (table, name))).replace(".", "-").replace("_", "-")
    return words.flag


def _evaluate_annotations(struct: type[msgspec.Struct]) -> None:
    """Evaluate the annotations of a struct and its bases where they are texts, as msgspec would.

    msgspec compiles each text, and the first `compile` of a process makes the classes of all nodes of syntax trees,
    which takes a twentieth of a short replay's time; `eval` does without.
    """
    for each in struct.__mro__:
        kinds = getattr(each, "__annotations__", {})
        for name, kind in kinds.items():
            if isinstance(kind, str):
                kinds[name] = eval(kind, vars(sys.modules[each.__module__]), dict(vars(each)))


def _words_of(kind: Any) -> Words | None:
    """Return the annotation of a field of type `kind`; None if the field is not a setting."""
    if get_origin(kind) is not Annotated:
        return None
    return next((meta for meta in get_args(kind)[1:] if isinstance(meta, Words)), None)


def _choices(kind: Any) -> list[str]:
    """Return the texts that a type permits, if it permits some alone."""
    if get_origin(kind) is Literal:
        return [each for each in get_args(kind) if isinstance(each, str)]
    return [each for part in get_args(kind) for each in _choices(part)]


class Section(msgspec.Struct, frozen=True, kw_only=True):
    """A group of settings: those of `struct`, in `table` of a file, under `title` in the help.

    `is_named`: the file has one such table per name, such as `[models.chat]`. `is_listed`: these tables form a list,
    `[[pool]]`; the key `name` names each, else `name_of` its values, if that is given and returns a name, else its
    position, from 1. `into`: the setting that has this list. `instead_of`: settings of the same struct as `into` that a
    list replaces, and the key of a table that says the same.
    """

    struct: type[msgspec.Struct]
    title: str
    table: str = ""
    is_named: bool = False
    is_listed: bool = False
    into: str = ""
    name_of: Callable[[Mapping[str, Any]], str] | None = None
    instead_of: Mapping[str, str] = {}

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The settings of a section without names."""
        return settings_of(self.struct, self.table)


# Errors ---------------------------------------------------------------------------------------------------


class SettingError(ConfigError):
    """A value that a setting cannot have, or settings that exclude each other.

    `fields`: the settings at fault. The error names the first of them that was given; with a struct `of`, the first
    that differs from its default. `{name}` in a text stands for another field, and is replaced by the user's spelling.
    """

    def __init__(self, what: str, *fields: str, hint: str | None = None, of: msgspec.Struct | None = None) -> None:
        self.texts = what, hint
        self.fields = fields
        super().__init__(
            _spelled(what, lambda name: name),
            hint=None if hint is None else _spelled(hint, lambda name: name),
            field=_first_changed(of, fields),
        )


def parts_of_error(error: ConfigError) -> tuple[str, str | None, tuple[str, ...]]:
    """Return the problem and the hint, as texts in which `{name}` stands for a field, and the fields at fault."""
    if isinstance(error, SettingError):
        return *error.texts, error.fields
    return error.what, error.hint, () if error.field is None else (error.field,)


def _first_changed(of: msgspec.Struct | None, fields: Sequence[str]) -> str:
    defaults = {} if of is None else {field.name: field.default for field in msgspec.structs.fields(of)}
    for name in fields:
        if name in defaults and getattr(of, name) != defaults[name]:
            return name
    return fields[0]


def _spelled(text: str, spell: Callable[[str], str]) -> str:
    spelled = re.sub(_NAME, lambda match: spell(match[1]), text)
    # A value follows an option after a space, and a key of --set after "=".
    return re.sub(r"(--set [\w.]+) (?=\d)", r"\1=", spelled)


class KeySource(msgspec.Struct, frozen=True):
    """A file, or a mapping with the keys of one."""

    path: Path | None = None

    def spell(self, setting: Setting, inner: str = "") -> str:
        """Return the key."""
        return f"{setting.key}.{inner}" if inner else setting.key


class Flags(msgspec.Struct, frozen=True):
    """The command line. `spellings`: for keys without a flag."""

    spellings: Mapping[str, str] = {}
    path: None = None

    def spell(self, setting: Setting, inner: str = "") -> str:
        """Return the flag."""
        flag = self.spellings.get(setting.key) or setting.flag or setting.key
        return f"{flag}: {inner}" if inner else flag


class Within(msgspec.Struct, frozen=True):
    """The value of another setting, which implies a value for this one.

    `is_alike`: that setting is the same one of a pool, and errors name it as the user wrote it. `others`: settings that
    say the same as others next to this one, by the keys of these.
    """

    source: ValueSource
    setting: Setting
    is_alike: bool = False
    others: Mapping[str, Setting] = {}

    @property
    def path(self) -> Path | None:
        """The file in which that other setting was given."""
        return self.source.path

    def spell(self, setting: Setting, inner: str = "") -> str:
        """Return the spelling of the other setting, with the key in it; of a pool, of the setting as it is there."""
        if setting.key in self.others:
            return self.source.spell(self.others[setting.key], inner)
        if not self.is_alike:
            return self.source.spell(self.setting, f"{setting.key}.{inner}" if inner else setting.key)
        is_mine = self.setting.key.rpartition(".")[2] == setting.key.rpartition(".")[2]
        return self.source.spell(self.setting if is_mine else setting, inner)


class Keywords(msgspec.Struct, frozen=True):
    """Arguments of a Python call, named like the options of the command line."""

    path: None = None

    def spell(self, setting: Setting, inner: str = "") -> str:
        """Return the argument."""
        return f"{keyword_of(setting)}.{inner}" if inner else keyword_of(setting)


ValueSource: TypeAlias = KeySource | Flags | Within | Keywords
"""The source of values. `path`: the file, if it is one. `spell`: returns how a setting or a part of it is spelled."""


def keyword_of(setting: Setting) -> str:
    """Return the argument name of a setting: `host_memory` for `--host-memory`; its key if it has no option."""
    return setting.name.translate(AS_WORD)


AS_WORD = str.maketrans("-. ", "___")


# Given values ---------------------------------------------------------------------------------------------


class _Value(msgspec.Struct, frozen=True):
    setting: Setting
    value: Any
    source: ValueSource


class Given:
    """Values of settings by key, with the source of each."""

    def __init__(self) -> None:
        self._values: dict[str, _Value] = {}

    def add(self, setting: Setting, value: Any, source: ValueSource) -> None:
        """Add one value."""
        self._values[setting.key] = _Value(setting, value, source)

    def __bool__(self) -> bool:
        """Return whether any value was given."""
        return bool(self._values)

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value as `[key]` does, or `default` if it is not given."""
        return default if key not in self._values else self[key]

    def __getitem__(self, key: str) -> Any:
        """Return the value, converted to the type of its setting. Raise ConfigError if that fails."""
        given = self._values[key]
        try:
            return msgspec.convert(given.value, given.setting.kind)
        except msgspec.ValidationError as error:
            what, inner = parts_of(error)
            choices = [] if inner or not what.startswith("Invalid enum value") else _choices(given.setting.kind)
            raise ConfigError(
                what,
                path=given.source.path,
                field=given.source.spell(given.setting, inner or ""),
                hint=f"Use one of {', '.join(choices)}." if choices else None,
            ) from error

    def source_of(self, key: str) -> ValueSource:
        """Return the source of the value."""
        return self._values[key].source

    def setting_of(self, key: str) -> Setting:
        """Return the setting of the value."""
        return self._values[key].setting

    def value_of(self, key: str) -> Any:
        """Return the value before conversion."""
        return self._values[key].value

    def path_of(self, key: str) -> Path:
        """Return the value as a path, relative to the file that contains it, if any; sample names stay as they are."""
        from pathlib import Path

        file = self._values[key].source.path
        return Path(self[key]) if file is None or self[key].startswith(PREFIX) else file.parent / self[key]

    def in_table(self, table: str) -> list[str]:
        """Return the keys given in `table`, in order."""
        return [key for key, given in self._values.items() if key.startswith(f"{table}.") and not given.setting.is_name]

    def names(self, table: str) -> list[str]:
        """Return the names of the tables `[table.NAME]`, in order."""
        return [
            given.value for given in self._values.values() if given.setting.is_name and given.setting.field == table
        ]

    def add_name(self, table: str, name: str, source: ValueSource) -> None:
        """Record that there is a table `[table.name]`."""
        self.add(Setting(field=table, key=f"[{table}.{name}]", kind=str, help="", is_name=True), name, source)

    def over(self, below: Given) -> Given:
        """Merge with `below`; values given here take precedence.

        Tables are merged key by key. A value that `replaces` others drops them from below: host_pages drops a
        host_memory of the file and vice versa, pages and kv_memory drop each other, and concurrency drops speedup. If
        one source gives both, both stay, and the struct built from them refuses the combination.
        """
        replaced = {key for given in self._values.values() for key in given.setting.replaces}
        merged = Given()
        merged._values = {key: given for key, given in below._values.items() if key not in replaced}
        merged._values.update(self._values)
        return merged

    def without(self, keys: Collection[str]) -> Given:
        """Return all values but those with `keys`."""
        kept = Given()
        kept._values = {key: given for key, given in self._values.items() if key not in keys}
        return kept

    def implied(self, key: str, settings: Iterable[Setting], facts: Mapping[str, Any]) -> Given:
        """Return the values that `key` implies for other settings. `facts`: by key; None: no value."""
        given = self._values[key]
        said = Given()
        for setting in settings:
            if facts.get(setting.key) is not None:
                said.add(setting, facts[setting.key], Within(given.source, given.setting))
        return said

    def build(
        self, struct: type[StructT], table: str = "", *, facts: Mapping[str, Any] | None = None, **values: Any
    ) -> StructT:
        """Build a `struct` from the given values, else from `facts` by field, else from its defaults.

        `values` of fields take precedence over given ones. Raise ConfigError that names settings as they were given.
        """
        settings = settings_of(struct, table)
        known = facts or {}
        for setting in settings if self._values or known else ():
            if setting.field in values:
                continue
            if setting.key in self:
                values[setting.field] = self[setting.key]
            elif setting.field in known:
                values[setting.field] = known[setting.field]
        try:
            return struct(**values)
        except ConfigError as error:
            named = self._values.get(f"[{table}]")
            if named is not None:
                settings = (*settings, msgspec.structs.replace(named.setting, field="name"))
            raise self.named(error, settings) from error

    def listed(self, struct: type[StructT], table: str) -> tuple[StructT, ...]:
        """Build a `struct` of each table `[[table]]`, in order."""
        return tuple(self.build_named(struct, table, name) for name in self.names(table))

    def build_named(self, struct: type[StructT], table: str, name: str) -> StructT:
        """Build a `struct` of one table `[[table]]`."""
        return self.build(struct, f"{table}.{name}", name=name)

    def error(self, key: str, what: str, *, hint: str | None = None) -> ConfigError:
        """Return an error about the value given for `key`."""
        given = self._values[key]
        return ConfigError(what, path=given.source.path, field=given.source.spell(given.setting), hint=hint)

    def named(self, error: ConfigError, settings: Iterable[Setting]) -> ConfigError:
        """Return `error`, which names fields of `settings`, with the user's spelling of these names."""
        if error.path is not None or error.field is None:
            return error
        of_struct = list(settings)
        by_name = {setting.key: setting for setting in of_struct}
        by_name.update({given.setting.key: given.setting for given in self._values.values()})
        # A field of the struct may have the name of a given setting elsewhere, as `pages` of a store has.
        by_name.update({each.field: each for each in of_struct if each.key in self or each.field not in by_name})
        what, hint, fields = parts_of_error(error)
        guilty, inner = self._first_given(fields, by_name)
        if guilty is None:
            return error
        source = guilty.source

        def spell(name: str) -> str:
            other = by_name.get(name)
            if other is None:
                return name
            given = self._values.get(other.key)
            if given is None or given.source == source:
                return source.spell(other)
            where = "" if given.source.path is None else f" of {given.source.path}"
            return given.source.spell(other) + where

        return ConfigError(
            _spelled(what, spell),
            hint=None if hint is None else _spelled(hint, spell),
            path=source.path,
            field=source.spell(guilty.setting, inner),
        )

    def _first_given(self, fields: Sequence[str], by_name: Mapping[str, Setting]) -> tuple[_Value | None, str]:
        for field in fields:
            root, _, rest = field.partition(".")
            for name, inner in ((field, ""), (f"[{field}]", ""), (root, rest)):
                setting = by_name.get(name)
                if setting is not None and setting.key in self:
                    return self._values[setting.key], inner
            in_table = self.in_table(field)
            if in_table:
                return self._values[in_table[0]], ""
        return None, ""


def given_in(values: Mapping[str, Any], sections: Sequence[Section], path: Path | None = None) -> Given:
    """Convert `values`, in the form of a file, to Given. Raise ConfigError for an unknown key."""
    source = KeySource(path)
    given = Given()
    known = {setting.key: setting for section in sections if not section.is_named for setting in section.settings}
    tables = {section.table for section in sections if section.table}
    named = {section.table for section in sections if section.is_named}
    listed = {section.table: section for section in sections if section.is_listed}
    for name, value in values.items():
        if name not in tables:
            _add(given, known, name, value, source, {*(key for key in known if "." not in key), *tables})
            continue
        tables_of = _listed(value, listed[name], path) if name in listed else _table(value, name, path)
        for inner, item in tables_of.items():
            key = f"{name}.{inner}"
            if name not in named:
                _add(given, known, key, item, source, _in_table(known, name))
                continue
            given.add_name(name, inner, source)
            of_name = {
                setting.key: setting
                for section in sections
                if section.table == name
                for setting in settings_of(section.struct, key)
            }
            for last, leaf in _table(item, key, path).items():
                names = _in_table(of_name, key) | ({"name"} if name in listed else set())
                _add(given, of_name, f"{key}.{last}", leaf, source, names)
    return given


def settings_by_param(sections: Iterable[Section]) -> dict[str, Setting]:
    """Return the settings that have a flag, by the name of the option's parameter."""
    return {
        param_of(setting): setting
        for section in sections
        if not section.is_named
        for setting in section.settings
        if setting.flag is not None and not is_inline(setting)
    }


def inline_settings(sections: Iterable[Section]) -> dict[str, dict[str, Setting]]:
    """Return the settings that are given in the option of their table, by that option and by their names in it."""
    found: dict[str, dict[str, Setting]] = {}
    for section in sections:
        for setting in () if section.is_named else section.settings:
            if is_inline(setting):
                assert setting.flag is not None
                option, _, name = setting.flag.partition(INLINE)
                found.setdefault(option, {})[name] = setting
    return found


def given_by_flags(params: Mapping[str, Any], sections: Iterable[Section]) -> Given:
    """Return the settings given by options, by the names of their parameters; other keys of `params` are ignored."""
    given = Given()
    sections = list(sections)
    for param, setting in settings_by_param(sections).items():
        value = params.get(param)
        if value is not None and value != ():
            given.add(setting, value, Flags())
    for option, known in inline_settings(sections).items():
        for text in params.get(param_of_inline(option)) or ():
            _add_inline(given, option, text, known)
    return given


def _add_inline(given: Given, option: str, text: str, known: Mapping[str, Setting]) -> None:
    """Add the settings of `KEY=VALUE,...`. A comma before anything but a known KEY= belongs to the value before it."""
    for part in re.split(rf",(?=(?:{'|'.join(known)})=)", text):
        name, equals, value = part.partition("=")
        setting = known.get(name.strip())
        if setting is None or not equals:
            hint = f"Known: {', '.join(known)}, each with =VALUE."
            raise ConfigError(f"{part!r} is not known", field=option, hint=hint)
        if setting.key in given:
            raise ConfigError("is given twice", field=setting.flag, hint="Keep one of them.")
        given.add(setting, _typed(value, setting), Flags())


def _typed(text: str, setting: Setting) -> Any:
    """Return the value of a setting that `text` is. Raise ConfigError if it is none of its type."""
    kind = value_kind(setting.kind)
    is_whole = kind is int or isinstance(kind, range)
    try:
        if is_whole or kind is float:
            return int(text) if is_whole else float(text)
    except ValueError:
        what = f"{text!r} is not a {'whole ' if is_whole else ''}number"
        raise ConfigError(what, field=setting.flag) from None
    return text


def param_of_inline(option: str) -> str:
    """Return the name of the parameter of a table's option."""
    return "set_" + option.removeprefix("--")


def param_of(setting: Setting) -> str:
    """Return the name of the parameter of a setting's option."""
    assert setting.flag is not None
    return "set_" + keyword_of(setting)


def value_kind(kind: Any) -> Any:
    """Return how an option of a type is written: a number (int, float), a flag (bool), one of a range of whole numbers,
    one of a tuple of words, or any text (str); None if the option can be repeated.

    A union of several types becomes text, which the struct parses.
    """
    if get_origin(kind) is Annotated:
        kind, *metas = get_args(kind)
        least = next((meta.ge for meta in metas if isinstance(meta, msgspec.Meta) and meta.ge is not None), None)
        return value_kind(kind) if least is None else range(int(least), sys.maxsize)
    if get_origin(kind) is Literal:
        return get_args(kind)
    if get_origin(kind) is tuple:
        return None
    of_union = [part for part in get_args(kind) if part is not type(None)]
    if of_union:
        return value_kind(of_union[0]) if len(of_union) == 1 else str
    return kind if kind in (bool, int, float) else str


def given_by_keywords(values: Mapping[str, Any], sections: Sequence[Section]) -> Given:
    """Convert `values`, by option names, to Given. Raise ConfigError for a name that no section has."""
    given = Given()
    settings = [setting for section in sections if not section.is_named for setting in section.settings]
    known = {keyword_of(setting): setting for setting in settings}
    known.update({setting.field: setting for setting in settings if "." not in setting.key})
    listed = {section.table: section for section in sections if section.into}
    for name, value in values.items():
        if name in listed:
            if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
                raise ConfigError("must be a list of tables", field=name, hint="Give a list of dictionaries.")
            tables = [
                {key: each for key, each in dict(msgspec.to_builtins(table)).items() if each is not None}
                for table in value
            ]
            given = given_in({name: tables}, [listed[name]]).over(given)
            continue
        if name not in known:
            hint = did_you_mean(name, list(known)) or f"Known: {', '.join(sorted(map(keyword_of, settings)))}."
            raise ConfigError("unknown setting", field=name, hint=hint)
        given.add(known[name], value, Keywords())
    return given


def _table(value: Any, name: str, path: Path | None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"must be a table, got {value!r}", path=path, field=name)
    return value


def _listed(value: Any, section: Section, path: Path | None) -> Mapping[str, Any]:
    """Return the tables of a list by their names."""
    name = section.table
    if not isinstance(value, list):
        raise ConfigError("must be a list of tables", path=path, field=name, hint=f"Write [[{name}]].")
    found: dict[str, Any] = {}
    for place, item in enumerate(value, 1):
        table = dict(_table(item, f"{name}.{place}", path))
        own = "" if section.name_of is None else section.name_of(table)
        inner = table.pop("name", own or str(place))
        if not isinstance(inner, str) or not inner or "." in inner:
            raise ConfigError(f"{inner!r} is not a name", path=path, field=f"{name}.{place}.name")
        if inner in found:
            hint = "Name each." if own else None
            what = f"two tables have the name {inner!r}"
            raise ConfigError(what, path=path, field=f"{name}.{place}.name", hint=hint)
        found[inner] = table
    return found


def _in_table(known: Mapping[str, Setting], table: str) -> set[str]:
    return {key.removeprefix(f"{table}.") for key in known if key.startswith(f"{table}.")}


def _add(given: Given, known: Mapping[str, Setting], key: str, value: Any, source: KeySource, names: set[str]) -> None:
    if key not in known:
        raise ConfigError("unknown key", path=source.path, field=key, hint=f"Known: {', '.join(sorted(names))}.")
    given.add(known[key], value, source)
