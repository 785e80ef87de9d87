"""The errors of MLflow in one line: its last sentence, and the remedy. Nothing here imports MLflow.

MLflow wraps the errors of servers, HTTP clients, databases and registries. They share no types, so the text decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ray_yolo.core.errors import RayYoloError
from ray_yolo.core.redact import printable, redact
from ray_yolo.sinks.retry import RecordError

_LONGEST = 300  # characters of a sentence


class _Trouble(NamedTuple):
    """One kind of error."""

    pattern: re.Pattern[str]  # found in "TYPE CODE: MESSAGE"
    remedy: str  # `{uri}` is the server; named groups of the pattern are filled in


def _trouble(pattern: str, remedy: str) -> _Trouble:
    return _Trouble(re.compile(pattern, re.IGNORECASE | re.DOTALL), remedy)


_AGAIN = "then run the same command again"
_TROUBLES = (
    _trouble(r"The run (?P<id>\w+) must be in the 'active' state",
             f"restore it with `mlflow runs restore --run-id {{id}}`, {_AGAIN}"),
    _trouble(r"The experiment (?P<id>\w+) must be in the 'active' state",
             f"restore it with `mlflow experiments restore --experiment-id {{id}}`, {_AGAIN}; or give new trainings "
             "another --project or MLFLOW_EXPERIMENT_NAME"),
    _trouble(r"Run with id=(?P<id>\w+) not found|Run '?(?P<other>\w+)'? not found",
             "check MLFLOW_RUN_ID and the address of the server"),
    _trouble(r"no experiment with id|experiment.*does not exist",
             "check MLFLOW_EXPERIMENT_ID and the address of the server"),
    _trouble(r"UNAUTHENTICATED|error code 401|not authenticated",
             "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"),
    _trouble(r"PERMISSION_DENIED|error code 403", "ask for the right to write to this experiment"),
    _trouble(r"unsupported URI|UnsupportedModelRegistryStoreURI|Invalid url|Could not parse SQLAlchemy URL|"
             r"Could not find a registered",
             "give --mlflow-uri as http://HOST:PORT or sqlite:///FILE"),
    _trouble(r"databricks", "log in with `databricks auth login`, or set DATABRICKS_HOST and DATABRICKS_TOKEN"),
    _trouble(r"SSL|CERTIFICATE_VERIFY_FAILED", "check whether the server speaks https or http, and its certificate"),
    _trouble(r"Failed to resolve|Name or service not known|NameResolutionError",
             "check the name of the host in {uri}"),
    _trouble(r"Connection refused|Max retries exceeded|timed out|RemoteDisconnected|Connection aborted|"
             r"error code 5\d\d",
             f"start the server, or wait until it answers, {_AGAIN}"),
    _trouble(r"error code 404|ENDPOINT_NOT_FOUND|not in a valid JSON format",
             "check that {uri} is an MLflow server, with the path of its proxy if there is one"),
    _trouble(r"No module named '(?P<name>[\w.]+)'", "install {name} in this environment"),
    _trouble(r"database is locked", f"wait until other processes have released it, {_AGAIN}"),
    _trouble(r"out-of-date database schema|Can't locate revision|unknown schema",
             "use the release of MLflow that wrote the database, or upgrade it with `mlflow db upgrade {uri}`"),
    _trouble(r"readonly database|Permission denied|Read-only file system", "make the database and its folder writable"),
    _trouble(r"No space left|disk is full|QUOTA", f"free space there, {_AGAIN}"),
    _trouble(r"NoCredentials|Unable to locate credentials|AccessDenied|InvalidAccessKeyId",
             "set the credentials of the artifact store on this machine"),
)


def explain(error: BaseException, uri: str) -> str:
    """An error of MLflow, or of a library below it, in one line without secrets: its last sentence and a remedy.

    Args:
        uri: the server.
    """
    if isinstance(error, RayYoloError):
        return redact(str(error))
    shown = redact(uri)
    message = f"{type(error).__name__} {getattr(error, 'error_code', '')}: {error}"
    sentence = printable(redact(last_sentence(str(error)) or type(error).__name__))
    for trouble in _TROUBLES:
        if match := trouble.pattern.search(message):
            groups = {name: value or "" for name, value in match.groupdict().items()}
            return f"MLflow at {shown}: {sentence}; {trouble.remedy.format(uri=shown, **groups)}"
    return f"MLflow at {shown}: {sentence}"


def last_sentence(text: str) -> str:
    """The last sentence of an error that says what is wrong, without its wrapping and without examples.

    `API request to X failed with exception A (Caused by B("C: reason"))` gives `reason`.
    """
    paragraph = text.strip().partition("\n\n")[0].partition("\n[SQL")[0]  # examples and statements follow
    for advice in (r" Supported URI schemes are: .*", r" See https?://\S+ .*", r" Please (ensure|see) .*"):
        paragraph = re.sub(advice, "", paragraph, flags=re.DOTALL)
    line = paragraph.strip().splitlines()[-1].strip() if paragraph.strip() else ""
    if caused := re.search(r"\(Caused by \w+\((.*)\)\)$", line):
        reason = re.sub(r"^\w+\(.*?\): ", "", caused[1].strip("\"'"))  # HTTPConnection(host=..., port=...): reason
        quoted = re.fullmatch(r"\w+\(\d+, ['\"](.*)['\"]\)", reason)  # SSLError(1, 'reason')
        line = quoted[1] if quoted else reason
    if body := re.search(r"Response body: '(.*?)'?$", line):
        status = re.search(r"error code (\d+)", line)
        reply = re.sub(r"<[^>]*>", " ", body[1])
        line = " ".join(f"{status[1] if status else ''} {reply}".split())
    return line[:_LONGEST].rstrip(".")


@contextmanager
def explained(uri: str) -> Iterator[None]:
    """Context in which errors of MLflow, and of the libraries below it, become a RecordError with one line."""
    try:
        yield
    except RayYoloError:
        raise
    except Exception as error:
        raise RecordError(explain(error, uri)) from error
