"""Options: frozen dataclasses out of a command line and a TOML file.

A field made with `option()` carries its help, unit and choices. `parse_flat` reads flat options, `parse_sections`
dotted ones (`--training.steps`) over a TOML file; `program.py` makes programs of both. In both `-` and `_` are the
same, a flag is on by `--flag` and off by `--flag false`, the last value given wins, and an unknown name is answered
with the nearest one.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from flame.errors import UsageError

Name = TypeVar("Name")
Value = TypeVar("Value")

_METADATA = "flame.option"
_SUFFIXES = {"k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}


@dataclass(frozen=True, kw_only=True)
class OptionInfo:
    """What a field knows of itself as an option."""

    help: str
    unit: str | None = None
    choices: tuple[str, ...] | None = None
    aliases: tuple[str, ...] = ()
    metavar: str | None = None
    parse: Callable[[str], Any] | None = None
    positional: bool = False
    repeat: bool = False


def option(
    default: Any = MISSING,
    *,
    help: str,
    unit: str | None = None,
    choices: Sequence[str] | None = None,
    aliases: Sequence[str] = (),
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    positional: bool = False,
    repeat: bool = False,
) -> Any:
    """Return a dataclass field that is an option.

    `parse` turns one text into one value (a `ValueError` or `UsageError` of it is told with the option's name);
    `repeat` collects the values of every time it is given into a tuple; `aliases` are other full names.
    """
    info = OptionInfo(
        help=help,
        unit=unit,
        choices=None if choices is None else tuple(choices),
        aliases=tuple(aliases),
        metavar=metavar,
        parse=parse,
        positional=positional,
        repeat=repeat,
    )
    return dataclasses.field(default=default, metadata={_METADATA: info})


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a program: its full printed name, its field and the type of its value."""

    name: str
    attribute: str
    type: Any
    default: Any
    info: OptionInfo

    @property
    def is_flag(self) -> bool:
        return self.type is bool or self.type == (bool | None)


def options_of(config_class: type, prefix: str = "") -> list[Option]:
    """Return a dataclass's options in order; nested dataclasses become sections, `prefix` names them."""
    hints = typing.get_type_hints(config_class)
    options: list[Option] = []
    for field in dataclasses.fields(config_class):
        if dataclasses.is_dataclass(hints[field.name]):
            options += options_of(hints[field.name], f"{prefix}{field.name}.")
        elif _METADATA in field.metadata:
            options.append(
                Option(
                    name=prefix + field.name.rstrip("_"),  # a name that is a word of Python is spelled `from_`
                    attribute=field.name,
                    type=hints[field.name],
                    default=field.default,
                    info=field.metadata[_METADATA],
                )
            )
    return options


def parse_flat(config_class: type, argv: Sequence[str], *, program: str) -> Any:
    """Return the dataclass that `argv` describes; `UsageError` for anything wrong with it."""
    options = options_of(config_class)
    texts, positionals = read_arguments(options, argv, program=program)
    values = {option.attribute: convert(option, texts[option.name]) for option in options if option.name in texts}
    _take_positionals(options, positionals, values, program)
    missing = [option for option in options if option.default is MISSING and option.attribute not in values]
    if missing:
        names = ", ".join(option.name if option.info.positional else f"--{option.name}" for option in missing)
        command = program.split()[-1]  # the message begins with the program's own name
        raise UsageError(f"{command} needs {names}", fix=f"{program} -h explains every option")
    return config_class(**values)


def parse_sections(
    config_class: type,
    argv: Sequence[str],
    *,
    program: str,
    translate: Callable[[dict[str, list[str]], str], dict[str, list[str]]] | None = None,
) -> Any:
    """Return nested sections from a TOML file (`--job.config_file`) and, over it, the command line.

    `translate` sees the raw texts of each origin (the file's path, or "the command line") before they are converted:
    there old spellings become new ones, or are refused.
    """
    options = options_of(config_class)
    known = {option.name: option for option in options}
    given, positionals = read_arguments(options, argv, program=program)
    if positionals:
        raise UsageError(f"{program} takes options only", got=positionals[0], expected="--section.name value")
    origins: list[tuple[dict[str, list[str]], str]] = []
    if "job.config_file" in given:
        path = Path(given["job.config_file"][-1])
        origins.append((read_toml(path, options), str(path)))
    origins.append((given, "the command line"))
    texts: dict[str, list[str]] = {}
    for found, origin in origins:
        texts |= found if translate is None else translate(found, origin)
    values = {name: convert(known[name], text) for name, text in texts.items()}
    return _build_sections(config_class, values)


def _build_sections(config_class: type, values: Mapping[str, Any], prefix: str = "") -> Any:
    hints = typing.get_type_hints(config_class)
    arguments: dict[str, Any] = {}
    for field in dataclasses.fields(config_class):
        name = prefix + field.name
        if dataclasses.is_dataclass(hints[field.name]):
            arguments[field.name] = _build_sections(hints[field.name], values, name + ".")
        elif name in values:
            arguments[field.name] = values[name]
    return config_class(**arguments)


def read_arguments(
    options: Sequence[Option], argv: Sequence[str], *, program: str
) -> tuple[dict[str, list[str]], list[str]]:
    """Split `argv` into the texts given for each option, in order, and what stands alone."""
    names = _spellings(options)
    texts: dict[str, list[str]] = {}
    positionals: list[str] = []
    rest = list(argv)
    index = 0
    while index < len(rest):
        word = rest[index]
        index += 1
        if word == "--":
            positionals += rest[index:]
            break
        if not word.startswith("--"):
            positionals.append(word)
            continue
        name, equals, value = word[2:].partition("=")
        option = names.get(normal_name(name))
        if option is None:
            raise unknown_option(name, names, program)
        if not equals:
            follows = rest[index] if index < len(rest) else None
            if option.is_flag:
                takes = follows is not None and follows.lower() in _TRUTHS
                value = follows if takes and follows is not None else "true"
                index += takes
            elif follows is None or _is_option(follows, names):
                raise UsageError(f"--{option.name} needs a value", expected=describe_type(option))
            else:
                value = follows
                index += 1
        texts.setdefault(option.name, []).append(value)
    return texts, positionals


def convert(option: Option, texts: Sequence[str]) -> Any:
    """Return the value that the last text (all texts, for a repeated option) stands for."""
    if option.info.repeat:
        return tuple(_convert_one(option, _item_type(option.type), text) for text in texts)
    return _convert_one(option, option.type, texts[-1])


def _convert_one(option: Option, kind: Any, text: str) -> Any:
    if type(None) in typing.get_args(kind) and text.strip().lower() in ("none", "null"):
        return None
    try:
        value = option.info.parse(text) if option.info.parse is not None else _parse_as(kind, text)
    except UsageError as error:
        raise UsageError(f"--{option.name} cannot be {text!r}: {error.what}", expected=error.expected) from error
    except ValueError as error:
        detail = str(error) if option.info.parse is not None else None
        expected = describe_type(option)
        raise UsageError(
            f"--{option.name} cannot be {text!r}" + (f": {detail}" if detail else ""),
            expected=None if detail and expected == "a value" else expected,
        ) from error
    if option.info.choices is not None and value is not None and value not in option.info.choices:
        near = difflib.get_close_matches(str(value), option.info.choices, 1, 0.5)
        raise UsageError(
            f"--{option.name} cannot be {text!r}",
            expected="one of " + ", ".join(option.info.choices),
            fix=f"Did you mean {near[0]}?" if near else None,
        )
    return value


def _parse_as(kind: Any, text: str) -> Any:
    arguments = typing.get_args(kind)
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next(argument for argument in arguments if argument is not type(None))
        return _parse_as(kind, text)
    if typing.get_origin(kind) is tuple:
        return tuple(_parse_as(arguments[0], part.strip()) for part in text.split(",") if part.strip())
    if kind is bool:
        return _TRUTHS[text.strip().lower()] if text.strip().lower() in _TRUTHS else _no_truth()
    if kind is int:
        return int(text.strip())
    return kind(text.strip()) if kind is float else kind(text)


def _no_truth() -> bool:
    raise ValueError


def _item_type(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else kind


_TRUTHS = {"true": True, "false": False, "yes": True, "no": False, "on": True, "off": False, "1": True, "0": False}


def parse_count(text: str) -> int:
    """Return a whole number written as `10B`, `1.5M`, `2e9`, `100_000` or `4096`; `UsageError` otherwise."""
    plain = text.strip().replace("_", "").replace(",", "")
    factor = _SUFFIXES.get(plain[-1:].lower(), 1)
    digits = plain[:-1] if factor > 1 else plain
    try:
        value = Decimal(digits) * factor
    except ArithmeticError as error:
        raise UsageError("it is no count", expected="a number such as 4096, 100_000, 1.5M, 10B or 2e9") from error
    if not value.is_finite() or value < 0 or value != int(value):
        raise UsageError("it is no whole count", expected="a number such as 4096, 100_000, 1.5M, 10B or 2e9")
    return int(value)


def by_name(pairs: Iterable[tuple[Name, Value]], option: str) -> dict[Name, Value]:
    """Return what an option that may be given several times says of each name; `UsageError` for a name said twice."""
    values: dict[Name, Value] = {}
    for name, value in pairs:
        if name in values:
            twice = "all" if name is None else name
            raise UsageError(
                f"{option} speaks of {twice} twice", got=f"{values[name]}, then {value}", fix="Say it once"
            )
        values[name] = value
    return values


def normal_name(name: str) -> str:
    """Return an option's name with `_` for `-`."""
    return name.replace("-", "_")


def _spellings(options: Sequence[Option]) -> dict[str, Option]:
    names = {option.name: option for option in options}
    return names | {alias: option for option in options for alias in option.info.aliases}


def _is_option(word: str, names: Mapping[str, Option]) -> bool:
    return word.startswith("--") and normal_name(word[2:].partition("=")[0]) in names


def unknown_option(name: str, names: Iterable[str], where: str) -> UsageError:
    """Return the error for a name that no option has, with the nearest that one has."""
    wanted = normal_name(name)
    names = list(names)
    near = difflib.get_close_matches(wanted, names, 1, 0.6)
    if not near:  # the right name under the wrong section
        last = wanted.rpartition(".")[2]
        near = [known for known in names if known.rpartition(".")[2] == last][:1]
    return UsageError(
        f"there is no option {name!r}",
        where=where,
        fix=f"Did you mean {near[0]!r}?" if near else "-h lists every option",
    )


def describe_type(option: Option) -> str:
    """Return what an option takes, in words."""
    if option.info.choices is not None:
        return "one of " + ", ".join(option.info.choices)
    if option.info.parse is parse_count:
        return "a count such as 4096, 1.5M or 10B"
    arguments = [argument for argument in typing.get_args(option.type) if argument not in (type(None), Ellipsis)]
    kind = arguments[0] if arguments else option.type
    words = {bool: "true or false", int: "a whole number", float: "a number", Path: "a path", str: "a text"}
    return words.get(kind, "a value") + (" (several, separated by commas)" if _is_list(option) else "")


def metavar(option: Option) -> str:
    """Return the word that stands for an option's value in its help."""
    if option.info.metavar is not None:
        return option.info.metavar
    kinds = {*typing.get_args(option.type), option.type}
    numbers = {int: "N", float: "X"}
    return next((word for kind, word in numbers.items() if kind in kinds), option.attribute.upper())


def _is_list(option: Option) -> bool:
    return typing.get_origin(option.type) is tuple and not option.info.repeat


def _take_positionals(options: Sequence[Option], words: Sequence[str], values: dict[str, Any], program: str) -> None:
    left = list(words)
    for option in (option for option in options if option.info.positional):
        if option.info.repeat:
            if left:
                values[option.attribute] = convert(option, left)
            left = []
        elif left and option.attribute not in values:
            values[option.attribute] = convert(option, [left.pop(0)])
    if left:
        raise UsageError(f"{program} does not know what to do with {left[0]!r}", fix="Options begin with --")


def read_toml(path: Path, options: Sequence[Option]) -> dict[str, list[str]]:
    """Return the texts of a TOML file's options by dotted name; lists become comma-separated texts."""
    if not path.is_file():
        raise UsageError("the configuration file does not exist", where=path, fix="Check --job.config_file")
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration file is no TOML: {error}", where=path) from error
    names = _spellings(options)
    texts: dict[str, list[str]] = {}
    for name, value in _flatten(tables):
        if normal_name(name) not in names:
            raise unknown_option(name, names, str(path))
        texts[names[normal_name(name)].name] = [_toml_text(value)]
    return texts


def _flatten(tables: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tables.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _toml_text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ",".join(_toml_text(item) for item in value)
    return str(value)
