"""Complete commands, options, settings and recipe names in a shell, by argcomplete.

The script of `wmse completion` makes the shell call `wmse` with the environment variable _ARGCOMPLETE and the line that the
user types in COMP_LINE. The parser of a command then prints the possible words instead of parsing.
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import argcomplete


def typed_words() -> list[str]:
    """Return the words of the command line that is being completed, after the program; the last one may be incomplete."""
    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    try:
        words = shlex.split(line)
    except ValueError:  # a quotation mark is still open
        words = line.split()
    return words[1:] + ([""] if line.endswith(" ") else [])


def complete_command(commands: Iterable[str]) -> None:
    """Print the commands that begin with the typed word, and end the process."""
    parser = argparse.ArgumentParser("wmse")
    parser.add_argument("command", choices=list(commands))
    argcomplete.autocomplete(parser)


def complete_options(parser: argparse.ArgumentParser) -> None:
    """Print what may follow the typed words of a command, and end the process."""
    os.environ["_ARGCOMPLETE"] = "2"  # The words of this parser begin at the second one, the command.
    argcomplete.autocomplete(parser)


def add_completions(parsers: Sequence[argparse.ArgumentParser]) -> None:
    """Let the parsers know all settings as options, and the recipes as values of --config."""
    from trainer.config.help import describe
    from trainer.config.schema import METHODS

    for parser in parsers:
        for action in parser._actions:
            if "--config" in action.option_strings:
                action.completer = _recipes  # type: ignore[attr-defined]
        for setting in describe():
            name = f"--{setting.key}"
            if name not in parser._option_string_actions:  # some commands have options such as --run_dir
                choices = METHODS if setting.key == "method" else setting.choices
                parser.add_argument(
                    name,
                    choices=choices or None,
                    default=argparse.SUPPRESS,
                    help=setting.text,
                )


def _recipes(prefix: str, **_: Any) -> list[str]:
    """Return the names of the shipped recipes, and the files that begin with the prefix."""
    from trainer.files import shipped_folder

    recipes = [path.stem for path in shipped_folder("configs").glob("*.yaml")]
    return [*recipes, *argcomplete.FilesCompleter(["yaml"])(prefix)]
