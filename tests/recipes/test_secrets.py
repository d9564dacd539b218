"""What is taken for a secret, by name and by look, and what is not."""

from __future__ import annotations

import pytest

from recipes.secrets import HIDDEN, is_secret, is_secret_name, without_secret_values

LETTERS = "Abc123Def456Ghi789Jkl012Mno345Pqr678Stu9"


@pytest.mark.parametrize(
    "name", ["WANDB_API_KEY", "HF_TOKEN", "db.password", "MY_SECRETS", "AWS_SECRET_ACCESS_KEY", "privatekey", "passwd"]
)
def test_names_that_say_so(name: str) -> None:
    assert is_secret_name(name)
    assert is_secret(name, "x")


@pytest.mark.parametrize("name", ["NCCL_DEBUG", "data.tokenizer.kind", "TOKENIZERS_PARALLELISM", "run.seed", "author"])
def test_names_that_do_not(name: str) -> None:
    assert not is_secret_name(name)
    assert not is_secret(name, "an ordinary value")


# put together here, so that nobody's scanner takes this file for a leak
@pytest.mark.parametrize(
    "value",
    [
        "hf_" + LETTERS,
        "sk-" + LETTERS,
        "ghp_" + LETTERS,
        "AKIA" + "ABCDEFGH12345678",
        "xoxb-" + LETTERS,
        "eyJ" + LETTERS + "." + LETTERS + "." + LETTERS,
        "-----BEGIN RSA PRIVATE KEY-----\n" + LETTERS + "\n-----END RSA PRIVATE KEY-----",
    ],
    ids=lambda value: value[:5],
)
def test_values_that_look_like_keys(value: str) -> None:
    assert without_secret_values(f"run.notes='{value}' and more") == f"run.notes='{HIDDEN}' and more"
    assert is_secret("NOTES", value)


def test_a_password_in_an_address() -> None:
    hidden = without_secret_values("pip install --index https://me:hunter2@example.org/simple data.path=/a:b@c")
    assert hidden == f"pip install --index https://me:{HIDDEN}@example.org/simple data.path=/a:b@c"


@pytest.mark.parametrize("text", ["model=gpt_tiny", "0123456789abcdef" * 3, "/home/me/sk-learn", "s3://bucket/data"])
def test_ordinary_text_stays(text: str) -> None:
    assert without_secret_values(text) == text
