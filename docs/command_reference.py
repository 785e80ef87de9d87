"""The directive `commands`: every command with its flags, asked of the parsers that read them."""

from __future__ import annotations

import argparse
from contextlib import suppress
from unittest.mock import patch

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

from ray_yolo.cli import COMMANDS


def parsers() -> list[argparse.ArgumentParser]:
    """The parser of each command: whichever answers its --help."""
    found: list[argparse.ArgumentParser] = []
    with patch.object(argparse.ArgumentParser, "print_help", lambda parser: found.append(parser)):
        for command in COMMANDS.values():
            with suppress(SystemExit):
                command(["--help"])
    return found


def described(parser: argparse.ArgumentParser) -> nodes.section:
    """A command: what it does, and each group of its flags as a list."""
    section = nodes.section("", nodes.title(text=parser.prog), nodes.paragraph(text=parser.description),
                            ids=[nodes.make_id(parser.prog)])
    for group in parser._action_groups:
        if group.description or group._group_actions:
            section += nodes.rubric(text=group.title)
        if group.description:
            section += nodes.literal_block(text=group.description, language="text")
        if group._group_actions:
            section += nodes.definition_list("", *map(entry, group._group_actions))
    return section


def entry(action: argparse.Action) -> nodes.definition_list_item:
    """A flag in all its spellings, or an argument, and what it means."""
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest}"
    names = [f"{name}{value}" for name in action.option_strings] or [action.dest]
    term = nodes.term("", "", *(node for name in names for node in (nodes.literal(text=name), nodes.Text(" "))))
    return nodes.definition_list_item("", term, nodes.definition("", nodes.paragraph(text=action.help or "")))


class Commands(Directive):
    """The place of the command reference."""

    def run(self) -> list[nodes.Node]:
        """A section for each command."""
        return [described(parser) for parser in parsers()]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("commands", Commands)
    return {"parallel_read_safe": True}
