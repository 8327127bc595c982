"""Parsers of the commands: options with hyphens or underscores, settings with full or short names, help in two lengths."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.config.names import with_full_names
from trainer.tools.usage import USAGE

Words = Sequence[str]


def with_underscores(word: str) -> str:
    """Return an option with underscores instead of hyphens in its name; any other word is returned unchanged."""
    # Hyphens in the value are part of it.
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else word


class _CommandParser(argparse.ArgumentParser):
    """Parser of a command. While a shell completes a line, it prints the possible words instead of parsing."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        # The shell sets this variable while it completes a line.
        if os.environ.get("_ARGCOMPLETE") == "1":
            from trainer.tools.completion import complete_options

            complete_options(self)
        return super().parse_known_args(args, namespace)


def command_parser(command: Callable[[Words], int]) -> argparse.ArgumentParser:
    """Build the parser of a command, with the name and the docstring of its function."""
    name = command.__name__.replace("_", "-")
    formatter = argparse.RawDescriptionHelpFormatter
    return _CommandParser(
        f"wmse {name}",
        description=command.__doc__,
        allow_abbrev=False,
        formatter_class=formatter,
    )


def parse_with_settings(
    parser: argparse.ArgumentParser, words: Words, sub_parsers: Sequence[argparse.ArgumentParser] = ()
) -> tuple[argparse.Namespace, list[str]]:
    """Split the words into the options of a command and the other words, which are settings."""
    command = parser.prog.split()[1]
    usage = USAGE[command]
    # Sub-commands print the same help of settings.
    for each in (parser, *sub_parsers):
        each.add_argument("--help_all", action="help", help="show this help and all settings, and exit")
    if "_ARGCOMPLETE" in os.environ:
        from trainer.tools.completion import add_completions

        add_completions([parser, *sub_parsers])
    # Only a command that shows its help waits for this import.
    if {"-h", "--help", "--help_all"}.intersection(words):
        from trainer.config.help import common_settings, settings_text

        if "--help_all" in words:
            text = f"settings, each as --section.key value:\n\n{settings_text()}"
        else:
            text = usage.text(command, common_settings(usage.settings, short_names=usage.trains))
        for each in (parser, *sub_parsers):
            each.epilog = text
    own, rest = parser.parse_known_args(words)
    return own, with_full_names(rest) if usage.trains else rest


def add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        action="append",
        metavar="FILE",
        help="YAML file with settings, or name of a recipe in configs/; if repeated, a later file overrides earlier ones",
    )
