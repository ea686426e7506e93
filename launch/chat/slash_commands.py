"""The commands of `allspan chat`: a line that begins with a slash."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from pathlib import Path

from allspan.launch.chat.conversation import Conversation
from allspan.protos.api.errors import AllspanError
from allspan.protos.config.flags import nearest

Answer = Generator[str, None, None]


@dataclass(frozen=True)
class SlashCommand:
    """One command: what it takes, what it does, and the function that does it, which may return an answer to show."""

    takes: str
    does: str
    run: Callable[[Conversation, str], Answer | None]


def tell(text: str) -> None:
    """Writes to standard error, where answers are not."""
    print(text, file=sys.stderr, flush=True)


def _help(conversation: Conversation, rest: str) -> None:
    width = max(len(f"{name} {command.takes}") for name, command in COMMANDS.items())
    for name, command in COMMANDS.items():
        tell(f"  {f'{name} {command.takes}':<{width}}  {command.does}")
    tell('Ctrl-C stops an answer. A backslash at the end of a line continues it; """ begins and ends several lines.')
    tell("A message that begins with // is sent with one slash.")


def _exit(conversation: Conversation, rest: str) -> None:
    raise EOFError


def _clear(conversation: Conversation, rest: str) -> None:
    conversation.clear()
    tell("The conversation begins anew.")


def _system(conversation: Conversation, rest: str) -> None:
    if rest:
        conversation.system = "" if rest == '""' else rest
    tell(f"The system message is {conversation.system!r}." if conversation.system else "There is no system message.")


def _set(conversation: Conversation, rest: str) -> None:
    if rest:
        name, _, value = rest.partition(" ")
        if not value.strip():
            tell("/set takes a field and a value, as in /set temperature 0.5; /set temperature default unsets it.")
            return
        conversation.set(name, value.strip())
    shown = ", ".join(f"{name} {value}" for name, value in conversation.settings.items())
    tell(f"Set: {shown or 'nothing; the defaults of the model apply'}.")


def _save(conversation: Conversation, rest: str) -> None:
    if not rest:
        tell("/save takes the name of a file.")
        return
    conversation.save(Path(rest).expanduser())
    tell(f"Saved {len(conversation.messages)} messages in {rest}.")


def _load(conversation: Conversation, rest: str) -> None:
    if not rest:
        tell("/load takes the name of a file that /save has written.")
        return
    conversation.load(Path(rest).expanduser())
    tell(f"Loaded {len(conversation.messages)} messages from {rest}.")


def _regenerate(conversation: Conversation, rest: str) -> Answer:
    return conversation.again()


COMMANDS: dict[str, SlashCommand] = {
    "/help": SlashCommand("", "shows these commands", _help),
    "/exit": SlashCommand("", "ends the conversation, as Ctrl-D does", _exit),
    "/clear": SlashCommand("", "forgets the conversation, but for the system message", _clear),
    "/system": SlashCommand("TEXT", 'sets the system message; "" removes it', _system),
    "/set": SlashCommand("FIELD VALUE", "sets how tokens are chosen, such as temperature 0.5", _set),
    "/save": SlashCommand("FILE", "saves the conversation as JSON", _save),
    "/load": SlashCommand("FILE", "goes on with a saved conversation", _load),
    "/regenerate": SlashCommand("", "makes the last answer again", _regenerate),
}
_ALIASES = {"/?": "/help", "/quit": "/exit", "/bye": "/exit", "/q": "/exit", "/retry": "/regenerate"}


def run_command(conversation: Conversation, line: str) -> Answer | None:
    """Runs the command of a line; a mistake in it is told, and the conversation goes on. EOFError: it was /exit."""
    name, _, rest = line.strip().partition(" ")
    command = COMMANDS.get(_ALIASES.get(name, name))
    if command is None:
        tell(f"There is no command {name}{nearest(name, list(COMMANDS))}; /help shows all, and // sends a slash.")
        return None
    try:
        return command.run(conversation, rest.strip())
    except AllspanError as error:
        tell(error.message)
    except OSError as error:
        tell(f"{error.filename or rest}: {error.strerror or error}")
    return None
