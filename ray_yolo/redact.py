"""Makes text fit to be shown: secrets taken out, and nothing left that a terminal would obey.

What is known to carry them: the user part of a URL (`https://user:password@host`) and named values
(`token=...`, `AWS_SECRET_ACCESS_KEY=...`). A secret in any other form is not recognised.
"""

import re

MASK = "***"

# Greedy up to the last '@' before the path: passwords with an '@' in them are common, and wrong, and still secret.
_URL_USER = re.compile(r"(?<=://)[^/\s]*@")
_NAMED_VALUE = re.compile(
    r"((?:token|secret|passwo?r?d|credential|api[_-]?key)[\w-]*[\"']?\s*[=:]\s*[\"']?)[^\s&,;\"']+", re.IGNORECASE
)


def printable(text: str) -> str:
    """The text on one line, with every control character, direction mark and broken code as its escape.

    For other people's words in messages: file names may hold line ends and a terminal's commands.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def redact(text: str) -> str:
    """The text with the user part of every URL and the value of every named secret replaced by `***`."""
    return _NAMED_VALUE.sub(rf"\1{MASK}", _URL_USER.sub(f"{MASK}@", text))
