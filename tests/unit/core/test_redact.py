import json

import pytest

from ray_yolo.core.errors import TrainingError
from ray_yolo.core.redact import printable, redact, without_secrets


@pytest.mark.parametrize("secret", [
    "https://ann:s3cr3t@host/path",
    "postgresql://ann:s3cr3t@host:5432/db",
    "https://ann:p@s3cr3t@host",
    "https://s3cr3t@host",
    "https://host/x?access_token=s3cr3t&epochs=3",
    "AWS_SECRET_ACCESS_KEY=s3cr3t",
    "AZURE_STORAGE_ACCOUNT_KEY=s3cr3t",
    "DefaultEndpointsProtocol=https;AccountKey=s3cr3t;AccountName=a",
    'password: "s3cr3t"',
    "api-key=s3cr3t",
    "Authorization: Bearer s3cr3t-s3cr3t",
    "a header of bearer s3cr3ts3cr3t==",
    "'Authorization': 'Basic czNjcjN0s3cr3t'",
    "https://b.s3.amazonaws.com/k?X-Amz-Credential=s3cr3t%2F20260101&X-Amz-Signature=s3cr3t&X-Amz-Security-Token=s3cr3t",
    "https://a.blob.core.windows.net/c/b?sv=2024&sp=r&sig=s3cr3t%3D",
    "https://storage.googleapis.com/b/o?X-Goog-Signature=s3cr3t",
    "-----BEGIN RSA PRIVATE KEY-----\ns3cr3t\n-----END RSA PRIVATE KEY-----",
    "ghp_s3cr3ts3cr3ts3cr3ts3cr3t",
    "hf_s3cr3ts3cr3ts3cr3ts3cr3t",
    "xoxb-1234-s3cr3ts3cr3t",
    "eyJhbGciOiJIUzI1NiJ9.s3cr3ts3cr3t.s3cr3t",
])
def test_secrets_do_not_pass(secret):
    assert "s3cr3t" not in redact(f"could not reach {secret} today")


def test_what_a_reader_needs_stays():
    assert redact("https://ann:pw@host:5000/api?token=x&epochs=3") == "https://***@host:5000/api?token=***&epochs=3"


def test_other_text_passes_unchanged():
    for text in [
        "a bearer of good news", "basic augmentation", "sigma=0.2", "signs: 3", "AKIA", "task-aligned assignment",
        "runs/train/exp/weights/best.pt", "0123456789abcdef0123456789abcdef01234567",
        "sqlite:////data/ann@home/mlflow.db", "http://127.0.0.1:5000", "a token ring has no password",
        "mail ann@host.org",
    ]:
        assert redact(text) == text, text


def test_a_terminal_has_nothing_to_obey() -> None:
    for text, shown in [
        ("ü 漢字 😀 'x' \\", "ü 漢字 😀 'x' \\"), ("a\nb\tc", "a\\nb\\tc"), ("\x1b[31m", "\\x1b[31m"),
        ("\u202etxt", "\\u202etxt"), ("\udcff", "\\udcff"),
    ]:
        assert printable(text) == shown, text
        assert printable(text).encode().decode() == shown, text


def test_keys_are_known_by_their_form() -> None:
    for key in ("AKIAIOSFODNN7EXAMPLE", "AIza" + "x" * 35, "dapi" + "0a" * 16, "sk-" + "a" * 24):
        assert redact(f"no access with {key} to the bucket") == "no access with *** to the bucket", key


def test_an_error_without_secrets_is_one_of_its_kind() -> None:
    for kind in (OSError, RuntimeError, TrainingError, ValueError):
        assert without_secrets(error := kind("no space")) is error, kind
        shown = without_secrets(kind("token=s3cr3t is refused"))
        assert (type(shown), str(shown)) == (kind, "token=*** is refused"), kind


def test_an_error_that_is_made_of_more_than_text_says_what_it_was() -> None:
    shown = without_secrets(json.JSONDecodeError("token=s3cr3t", "{", 0))
    assert (type(shown), str(shown)) == (RuntimeError, "JSONDecodeError: token=*** line 1 column 1 (char 0)")
    assert "s3cr3t" not in str(without_secrets(FileNotFoundError(2, "No such file", "s3://b/k?sig=s3cr3t")))


def test_redacting_twice_is_redacting_once():
    once = redact("https://ann:pw@host?token=x")
    assert redact(once) == once
