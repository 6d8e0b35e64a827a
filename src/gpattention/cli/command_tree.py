"""The command line as data: commands, their options, and what each takes; read off argparse."""

import argparse
from dataclasses import dataclass
from typing import Literal

from gpattention.attention import list_attention
from gpattention.data import known

Takes = Literal["nothing", "words", "files", "folders", "anything"]

# by the name under which the help shows an argument
FILES = ("FILE", "RECIPE", "INPUT", "PATH", "OUT", "OUTPUT")
FOLDERS = ("FOLDER", "RUN", "RUNS", "RUNS_FOLDER")


@dataclass(frozen=True)
class Argument:
    """An option with its flags, or a positional argument without."""

    flags: tuple[str, ...]
    about: str
    takes: Takes
    words: tuple[str, ...] = ()  # what it may be


@dataclass(frozen=True)
class Command:
    """One command; `path` is what is typed to get there."""

    path: str
    arguments: tuple[Argument, ...]
    below: tuple[tuple[str, str], ...]  # commands below this one, and what they do

    @property
    def options(self) -> tuple[Argument, ...]:
        """Arguments with flags."""
        return tuple(argument for argument in self.arguments if argument.flags)

    @property
    def positionals(self) -> tuple[Argument, ...]:
        """Arguments without."""
        return tuple(argument for argument in self.arguments if not argument.flags)


def command_tree(parser: argparse.ArgumentParser) -> list[Command]:
    """The parser's command and all below it, each before those below it."""
    return _commands(parser, parser.prog)


def _commands(parser: argparse.ArgumentParser, path: str) -> list[Command]:
    arguments: list[Argument] = []
    below: list[tuple[str, str]] = []
    deeper: list[Command] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                below.append((name, about.get(name, "")))
                deeper += _commands(child, f"{path} {name}")
        elif action.help != argparse.SUPPRESS:
            arguments.append(_argument(parser, action))
    return [Command(path, tuple(arguments), tuple(below)), *deeper]


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> Argument:
    about = parser._get_formatter()._expand_help(action) if action.help else ""
    takes, words = _taken(action)
    return Argument(tuple(action.option_strings), " ".join(about.split()), takes, words)


def _taken(action: argparse.Action) -> tuple[Takes, tuple[str, ...]]:
    if action.nargs == 0:
        return "nothing", ()
    if action.choices is not None:
        return "words", tuple(str(choice) for choice in action.choices)
    shown = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
    if shown in FILES:
        return "files", ()
    if shown in FOLDERS:
        return "folders", ()
    words = _known_words(shown)
    return ("words", words) if words else ("anything", ())


def _known_words(shown: str) -> tuple[str, ...]:
    """Names that the library knows, where argparse was not told to insist on them."""
    if shown == "NAME":
        return tuple(entry.name for entry in known())
    if shown in ("KINDS", "MODELS"):
        return list_attention()
    return ("auto", "cpu", "cuda") if shown == "DEVICE" else ()
