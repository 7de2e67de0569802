"""Errors in the words of the command: what Python code would pass is an option here.

The library's errors advise callers in Python. Before the command prints one, the parts that name
Python become what does the same on a command line. All of that is in one table, and a test looks
at every message of the rooms that commands reach.
"""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["in_command_words"]

_COMMAND: Final = "'icechunk-async {}'"

# What Python calls by these names has a command. Quotes around the name go with it.
_COMMANDS: Final = {
    "Repository.create": "init",
    "Repository.copy_to or icechunk-async copy": "copy",
    "Repository.copy_to": "copy",
    "icechunk_async.upkeep.upgrade": "migrate",
    "Repository.add_sums": "sums",
    "Repository.analyze": "analyze",
    "Repository.recorded_transactions": "transactions",
    "Repository.proposals": "review --all",
    "Repository.protect_branch": "protect",
    "Repository.unprotect_branch": "unprotect",
    "unprotect_branch": "unprotect",
    "repository.sessions()": "sessions",
    "rewrite_manifests": "rewrite-manifests",
}


def _authorized(found: re.Match[str]) -> str:
    prefixes = re.findall(r"('[^']*'): ", found[1])
    return "add " + " ".join(f"--authorize {it}" for it in prefixes)


_AUTHORIZED: Final = r"authorize_virtual_chunk_access=(\{.*?\})"

# Sentences and their parts that say it in another way, tried in order, before the names above.
_PHRASES: Final[tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]] = (
    (r"Repository\.propose that one", "propose that one ('icechunk-async propose')"),
    (r"\bcall (?:icechunk_async\.upkeep\.)?upgrade", "run 'icechunk-async migrate'"),
    (r"Call refresh, look at it again, and accept it then", "Propose it again, and accept that"),
    (r"accept it with when_moved='retry'", "accept it without --refuse-moved"),
    (r"pass (?:them|it) as checks=", "give --check NAME=COMMAND"),
    (r"Pass (?:them|it) as checks=(?: to the proposal's accept)?", "Give --check NAME=COMMAND"),
    (r"with force=True", "with --force"),
    (r"Use commit_method='new_commit'", "Leave out --amend"),
    (r"with discard_changes=True \(sync --discard-changes\)", "with --discard-changes"),
    (r"Pass a solver .* Repository\.begin_merge", "Make the two sides agree first"),
    (r"both began with: base=\.\.\.", "both began with, by --base"),
    (r"with paths=(?:\[\.\.\.\])?", "with --path"),
    (r"Ask for its chunks, with level='chunk'", "'icechunk-async diff' shows its chunks"),
    (r"layout='([a-z0-9-]+)'", r"--layout \1"),
    (r"with probe=False", "with --no-probe"),
    (r"with set_feature_flag\('([a-z_]+)', True\)", r"in Python, by setting the flag \1"),
    (r"with validity=True", "with --validity"),
    (r"With validity=True", "With --validity"),
    (r"\b([Ww]ith|[Ss]et) copy=True", r"\1 --copy"),
    (r"with attributes=\[\.\.\.\](?:, or read it .*? its values)?", "by naming --attribute"),
    (rf"open the repository with {_AUTHORIZED}, .*? in place of None", _authorized),
    (rf"open the repository with {_AUTHORIZED}, .*?icechunk_async\.credentials", _authorized),
    (rf"name it: {_AUTHORIZED}, .* without credentials", "set AWS_ENDPOINT_URL_S3 to it"),
    (r", and None was given\. Give one of .*$", ", and the command has none for it."),
    (r"Credentials are given with \w+=, .* opened", "Look at those in the environment"),
    (r"min_live_share must be", "--min-live-share must be"),
    (r": give it as .*? or ref='+[^']*'+", ""),
    (r" Write something first, or pass allow_empty=True\.", ""),
    (r" \('session\.collected_chunks' names them\)", ""),
    (r"Rebase the session \(rebase_with=\.\.\.\), or begin a new one", "Run the command again"),
    (r"Ask for the net changes, net=True", "'icechunk-async diff' shows the net changes"),
    (r" ?Repository\.lookup_branch and lookup_tag return .*? leads to\.", ""),
    (r", or call open_url of .*? in code that blocks", ""),
)

# An option of the backend, as Python passes it: allow_http=True, token=..., endpoint_url=.
_OPTION: Final = re.compile(
    r"(?:the option )?'?(?<![\w.(])(?P<name>[a-z]\w{3,})="
    r"(?P<value>True|False|None|\.\.\.|'[^']*'|\d[\w.]*|(?=[\s,.;:)]|$))'?"
)
_VALUES: Final = {"True": "true", "False": "false", "None": "null", "": "...", "...": "..."}
_VERBS: Final = re.compile(r"\b([Pp])ass(?= --option)")
_MOST_LETTERS: Final = 4_000
"""Of a message that is looked through; ours are shorter, unless a repository put more into them."""


# Compiled at the first error: a command that works does not wait for sixty patterns.
@cache
def _table() -> tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...]:
    phrases = [(re.compile(pattern), new) for pattern, new in _PHRASES]
    names = [
        (re.compile(rf"'?(?<![\w.]){re.escape(name)}(?!\w)'?"), _COMMAND.format(command))
        for name, command in _COMMANDS.items()
    ]
    return (*phrases, *names)


def in_command_words(message: str) -> str:
    """Return the message of an error with options and commands instead of Python.

    What a message says of the data stays unchanged, unless it looks like a call of this library.
    Messages of more than 4,000 letters stay as well.
    """
    # Some phrases have several gaps, so that looking takes time with the cube of the length: 20 ms
    # for 3,000 letters, and minutes for the URL of a container that is made of such a phrase.
    if len(message) > _MOST_LETTERS:
        return message
    for pattern, new in _table():
        message = pattern.sub(new, message)
    message = _OPTION.sub(_as_option, message)
    return _VERBS.sub(lambda it: "Give" if it[1] == "P" else "give", message)


def _as_option(found: re.Match[str]) -> str:
    value = found["value"]
    # token='x' -> --option token=x; allow_http=True -> --option allow_http=true
    return f"--option {found['name']}={_VALUES.get(value, value.strip(chr(39)))}"
