"""The command line as data: every command with its options, and words parsed without running anything."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from typer.core import TyperGroup

from gpattention.cli.main import command_line


@dataclass(frozen=True)
class Option:
    flags: tuple[str, ...]  # empty: it is given by its place
    takes: str  # "nothing", or what its value is called


@dataclass(frozen=True)
class Command:
    path: str  # `gpattention data get`
    parameters: tuple[Option, ...]
    examples: str
    is_group: bool

    @property
    def options(self) -> list[Option]:
        return [each for each in self.parameters if each.flags]

    @property
    def places(self) -> list[Option]:
        return [each for each in self.parameters if not each.flags]


def commands() -> Iterator[Command]:
    """Every command, each before those below it."""
    yield from _walk(command_line(), "gpattention")


def _walk(command: Any, path: str) -> Iterator[Command]:
    context = command.make_context(path, [], resilient_parsing=True)
    parameters = tuple(
        Option(
            tuple(p.opts) if p.param_type_name == "option" else (),
            "nothing" if getattr(p, "is_flag", False) else (p.metavar or p.name.upper()),
        )
        for p in command.params
    )
    is_group = isinstance(command, TyperGroup)
    yield Command(path, parameters, command.epilog or "", is_group)
    if is_group:
        for name in command.list_commands(context):
            yield from _walk(command.get_command(context, name), f"{path} {name}")


def parsed(words: list[str]) -> Any:
    """The context of the command that these words name, its parameters checked and converted."""
    context: Any = command_line().make_context("gpattention", list(words))
    while isinstance(context.command, TyperGroup) and (rest := [*context._protected_args, *context.args]):
        name, command, left = context.command.resolve_command(context, rest)
        context = command.make_context(name, left, parent=context)
    return context
