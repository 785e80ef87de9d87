"""Makes text safe to show: masks secrets and escapes terminal control sequences.

Recognised secrets:

- the user part of a URL (`https://user:password@host`);
- named values (`token=...`, `AWS_SECRET_ACCESS_KEY=...`);
- bearer tokens and signatures of presigned URLs;
- keys of a known form: AWS, GitHub, GitLab, Google, Hugging Face, Slack, Databricks, OpenAI, JSON web tokens, PEM.

Other secrets pass through.
"""

import re

from ray_yolo.core.errors import RayYoloError

MASK = "***"
_LONGEST_REASON = 300  # characters; some libraries put whole HTML pages into their messages

# Greedy up to the last '@' before the path: passwords often contain an unescaped '@'.
_URL_USER = re.compile(r"(?<=://)[^/\s]*@")
_NAMED_VALUE = re.compile(
    r"((?:token|secret|passwo?r?d|credential|signature|(?:api|access|account)[_-]?key|\bsig(?==))[\w-]*[\"']?\s*[=:]\s*[\"']?)"
    r"[^\s&,;\"']+", re.IGNORECASE
)
_BEARER = re.compile(r"(\bbearer\s+|\bauthorization[\"']?\s*[=:]\s*[\"']?\w+\s+)[\w.~+/-]{8,}=*", re.IGNORECASE)
_BARE_KEY = re.compile(
    r"\b(?:(?:AKIA|ASIA)[0-9A-Z]{16}|gh[opusr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|AIza[\w-]{30,}|hf_\w{20,}"
    r"|xox[a-z]-[\w-]{10,}|dapi[0-9a-f]{32}|sk-[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)", re.DOTALL
)


def printable(text: str) -> str:
    """The text on one line, with control characters, direction marks and surrogates escaped.

    For text from outside in messages: file names may contain line ends and terminal control sequences.
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def without_secrets(error: Exception) -> Exception:
    """The error itself, or one of the same type whose message has no secrets."""
    text = str(error)
    redacted = redact(text)
    if redacted == text:
        return error
    try:
        return type(error)(redacted).with_traceback(error.__traceback__)
    except TypeError:  # its constructor takes other arguments
        return RuntimeError(f"{type(error).__name__}: {redacted}").with_traceback(error.__traceback__)


def redact(text: str) -> str:
    """The text with `***` in place of the user part of URLs, the values of named secrets and known keys."""
    text = _URL_USER.sub(f"{MASK}@", text)
    text = _BARE_KEY.sub(MASK, text)
    text = _BEARER.sub(rf"\1{MASK}", text)
    return _NAMED_VALUE.sub(rf"\1{MASK}", text)


def reason_of(error: BaseException) -> str:
    """The first line of an exception's message, without secrets; exceptions of other packages with their type."""
    kind = "" if isinstance(error, RayYoloError) else f"{type(error).__name__}: "
    return redact(f"{kind}{error}".splitlines()[0][:_LONGEST_REASON])
