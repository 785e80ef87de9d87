"""What MLflow 3 raises, and the one line that users see."""

from __future__ import annotations

import pytest

from ray_yolo.core.errors import InputError
from ray_yolo.sinks.mlflow_errors import explain

POOL = "API request to http://h:5000/api/2.0/mlflow/runs/get failed with exception HTTPConnectionPool(host='h', " \
       "port=5000): Max retries exceeded with url: /api/2.0/mlflow/runs/get?run_id=1 (Caused by "
REPLY = "API request to endpoint /api/2.0/mlflow/runs/get failed with error code {} != 200. Response body: '{}'"
EXAMPLES = "\n\nThe cause of this error is typically due to repeated calls\n\nIncorrect Example:\n------\nwith x:"


@pytest.mark.parametrize(("text", "said", "remedy"), [
    (f"""{POOL}NewConnectionError("HTTPConnection(host='h', port=5000): Failed to establish a new connection: """
     """[Errno 111] Connection refused"))""", "Failed to establish a new connection: [Errno 111] Connection refused",
     "start the server"),
    (f"""{POOL}NameResolutionError("HTTPConnection(host='h', port=5000): Failed to resolve 'h' ([Errno -2] Name or """
     """service not known)"))""", "Failed to resolve 'h' ([Errno -2] Name or service not known)", "name of the host"),
    (f"{POOL}ResponseError('too many 502 error responses'))", "too many 502 error responses", "start the server"),
    (f"{POOL}SSLError(SSLError(1, '[SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006)')))",
     "wrong version number", "https or http"),
    (f"The run ab12 must be in the 'active' state. Current state is deleted.{EXAMPLES}", "Current state is deleted",
     "`mlflow runs restore --run-id ab12`"),
    ("The experiment 7 must be in the 'active' state. Current state is deleted.", "Current state is deleted",
     "`mlflow experiments restore --experiment-id 7`"),
    ("Run with id=ab12 not found", "Run with id=ab12 not found", "MLFLOW_RUN_ID"),
    (REPLY.format(401, "You are not authenticated. Please see https://x.org on how to authenticate."),
     "401 You are not authenticated", "MLFLOW_TRACKING_TOKEN"),
    (REPLY.format(403, "Permission denied"), "403 Permission denied", "right to write"),
    (REPLY.format(404, "<html><body>nope</body></html>"), "404 nope", "is an MLflow server"),
    (" Model registry functionality is unavailable; got unsupported URI 'ftp://x' for model registry data storage. "
     "Supported URI schemes are: ['', 'file', 'databricks']. See https://www.mlflow.org/x for how to run.",
     "got unsupported URI 'ftp://x' for model registry data storage", "sqlite:///FILE"),
    ("Could not parse SQLAlchemy URL from given URL string", "Could not parse SQLAlchemy URL", "sqlite:///FILE"),
    ("No module named 'psycopg2'", "No module named 'psycopg2'", "install psycopg2"),
    ("Something new.", "Something new", ""),
    ("", "RuntimeError", ""),
])
def test_an_error_is_one_line_with_its_last_sentence_and_the_remedy(text: str, said: str, remedy: str) -> None:
    line = explain(RuntimeError(text), "http://me:secret@h:5000")
    assert line.startswith("MLflow at http://***@h:5000: ")
    assert said in line
    assert remedy in line
    assert "\n" not in line
    for noise in ("API request", "Caused by", "secret", "Example", "Supported URI"):
        assert noise not in line


def test_an_error_of_ours_stays_as_it_is() -> None:
    assert explain(InputError("run: no such folder"), "http://h") == "run: no such folder"
