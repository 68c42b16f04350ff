"""Programs: subcommands with flat options, the text of -h, and errors that end a program with one paragraph."""

from __future__ import annotations

import difflib
import os
import shutil
import sys
import textwrap
import traceback
from collections.abc import Callable, Collection, Sequence
from dataclasses import MISSING, dataclass
from importlib import metadata
from typing import Any

from flame.config import Option, metavar, normal_name, options_of, parse_flat
from flame.errors import FlameError, UsageError


@dataclass(frozen=True, kw_only=True)
class Command:
    """A subcommand: its options dataclass, and what runs with a value of it and returns the exit code."""

    name: str
    options: type
    help: str
    run: Callable[[Any], int]


def run_program(program: str, description: str, commands: Sequence[Command], argv: Sequence[str] | None = None) -> int:
    """Run `program COMMAND --options` and return its exit code (0, 1, 2, 3 or 130)."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug, words = take_debug(words)

    def run() -> int:
        if not words or words[0] in ("-h", "--help"):
            print(_program_help(program, description, commands))
            return 0 if words else 2
        if words[0] == "--version":
            print(f"{program} {metadata.version('flame')}")
            return 0
        command = next((command for command in commands if normal_name(words[0]) == command.name), None)
        if command is None:
            names = [command.name for command in commands]
            near = difflib.get_close_matches(words[0], names, 1, 0.5)
            raise UsageError(
                f"{program} has no command {words[0]!r}",
                expected="one of " + ", ".join(names),
                fix=f"Did you mean {near[0]!r}?" if near else None,
            )
        name = f"{program} {command.name}"
        if any(word in ("-h", "--help") for word in words[1:]):
            print(help_text(command.options, usage=f"{name} {_operands(command.options)}", description=command.help))
            return 0
        return command.run(parse_flat(command.options, words[1:], program=name))

    return guarded(run, debug=debug, program=program)


def take_debug(words: Sequence[str]) -> tuple[bool, list[str]]:
    """Return whether `--debug` is among the words, and the words without it."""
    rest = [word for word in words if word != "--debug"]
    return len(rest) < len(words), rest


def guarded(run: Callable[[], int], *, debug: bool, program: str = "flame") -> int:
    """Call `run` and return its exit code; errors become one paragraph on stderr and their own code.

    Ctrl-C gives 130, a closed pipe ends quietly, and `debug` shows the traceback.
    """
    try:
        code = run()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        print(f"{program}: {_paragraph(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, FlameError) else 1


def _paragraph(error: Exception) -> str:
    if isinstance(error, FlameError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" (in {error.filename})" if error.filename else ""
        return f"{error.strerror}{where}."
    detail = " ".join(str(error).split())
    return f"unexpected {type(error).__name__}: {detail}. Run it again with --debug for the traceback."


def _operands(config_class: type) -> str:
    """Return what follows a command in its usage line: what it cannot do without, then its options."""
    words = []
    for option in options_of(config_class):
        name = option.attribute.upper()
        if option.info.positional:
            words.append(name if option.default is MISSING else f"[{name}]")
        elif option.default is MISSING:
            words.append(f"--{option.name} {metavar(option)}")
    return " ".join([*words, "[options]"])


def _program_help(program: str, description: str, commands: Sequence[Command]) -> str:
    lines = [f"usage: {program} COMMAND [options]", "", description, "", "commands:"]
    width = max(len(command.name) for command in commands) + 2
    lines += [f"  {command.name:<{width}}{command.help}" for command in commands]
    return "\n".join([*lines, "", f"{program} COMMAND -h explains a command's options."])


def help_text(config_class: type, *, usage: str, description: str, refused: Collection[str] = ()) -> str:
    """Return the text of -h: every option with its help, unit, choices and default, by section.

    `refused` are the names of options that are not available yet.
    """
    width = max(60, min(shutil.get_terminal_size().columns, 110))
    lines = [f"usage: {usage}", "", *textwrap.wrap(description, width)]
    section = None
    for option in options_of(config_class):
        head = option.name.rpartition(".")[0]
        if head != section:
            section = head
            lines += ["", f"{head}:" if head else "options:"]
        lines += _option_help(option, width, is_refused=option.name in refused)
    lines += ["", "  --debug", "      Show the traceback of an error."]
    return "\n".join(lines)


def _option_help(option: Option, width: int, *, is_refused: bool) -> list[str]:
    info = option.info
    value = "" if option.is_flag else " " + metavar(option)
    head = f"  {option.attribute.upper()}" if info.positional else f"  --{option.name}{value}"
    facts = ["not available yet"] if is_refused else []
    if info.unit:
        facts.append(f"unit: {info.unit}")
    if info.choices is not None:
        facts.append("one of " + ", ".join(info.choices))
    if info.repeat:
        facts.append("may be given several times")
    if option.default is MISSING:
        facts.append("required")
    elif not info.repeat and option.default not in (None, "", ()):
        facts.append(f"default: {_shown(option.default)}")
    if info.aliases:
        facts.append("also: " + ", ".join(f"--{alias}" for alias in info.aliases))
    text = info.help + (f" [{'; '.join(facts)}]" if facts else "")
    indent = " " * 6
    wrapped = textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    return [head, *wrapped]


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, float):
        return f"{value:g}"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
