"""Takes secrets out of text before it goes into a log, a tracking server or a message.

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


def redact(text: str) -> str:
    """The text with the user part of every URL and the value of every named secret replaced by `***`."""
    return _NAMED_VALUE.sub(rf"\1{MASK}", _URL_USER.sub(f"{MASK}@", text))
