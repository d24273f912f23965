"""Where DSec is and who we are: arguments, then variables, then the context file."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from libdsec import DSecClient, InvalidArgument, Unavailable
from libdsec.context import Context, read_context
from libdsec.settings import ClientSettings, resolve

CREDS = "-----BEGIN NATS USER JWT-----\nabc\n------END NATS USER JWT------\n"


def resolved(
    arguments: Context | None = None, *, context: Path | None = None, **environ: str
) -> ClientSettings:
    return resolve(arguments or Context(), context=context, environ=environ)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "context.toml"
    Context(
        servers=("nats://file:4222",), project="from-file", user="f", password="pf",
    ).write(path)  # fmt: skip
    return path


def test_arguments_win_over_variables_and_variables_over_the_file(file: Path) -> None:
    variables = {"DSEC_SERVERS": "nats://a:1, nats://b:2", "DSEC_CONTEXT": str(file)}
    from_file = resolved(context=file)
    assert (from_file.servers, from_file.user) == (("nats://file:4222",), "f")
    both = resolved(**variables)
    assert both.servers == ("nats://a:1", "nats://b:2")
    assert (both.project, both.password) == ("from-file", "pf")
    told = resolved(Context(servers=("nats://arg:1",), project="p"), **variables)
    assert (told.servers, told.project) == (("nats://arg:1",), "p")


def test_who_one_is_belongs_together(file: Path, tmp_path: Path) -> None:
    other = resolved(Context(user="me"), context=file)
    assert (other.user, other.password) == ("me", None)
    creds = tmp_path / "me.creds"
    creds.write_text(CREDS)
    by_file = resolved(Context(credentials=creds), context=file)
    assert (by_file.user, by_file.password, by_file.credentials) == (None, None, creds)


def test_a_credentials_file_is_toml_or_nats_own(file: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('user = "alice"\npassword = "secret"\nproject = "team-a"\n')
    settings = resolved(context=file, DSEC_CREDENTIALS=str(mine))
    assert (settings.user, settings.password, settings.project) == ("alice", "secret", "team-a")
    assert settings.servers == ("nats://file:4222",)
    assert settings.inbox_prefix == "_INBOX.team-a.alice"
    assert "secret" not in repr(settings)


def test_paths_in_a_file_are_relative_to_it(tmp_path: Path) -> None:
    (tmp_path / "me.creds").write_text(CREDS)
    (tmp_path / "c.toml").write_text('servers = "tls://x:1"\ncredentials = "me.creds"\nca = "ca"\n')
    settings = resolved(context=tmp_path / "c.toml")
    assert settings.servers == ("tls://x:1",)
    assert (settings.credentials, settings.ca) == (tmp_path / "me.creds", tmp_path / "ca")
    with pytest.raises(InvalidArgument, match="CA file"):
        settings.tls()


def test_a_written_context_reads_back_and_is_private(tmp_path: Path) -> None:
    context = Context(
        servers=("nats://a:1", "nats://b:2"), project="p", user="u", password='q"\\ü\n'
    )
    context.write(tmp_path / "new" / "context.toml")
    path = tmp_path / "new" / "context.toml"
    assert read_context(path) == context
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("servers = [", "not valid TOML"),
        ('server = "x"', "unknown keys: server"),
        ("servers = [1]", "servers is a list"),
        ("servers = []", "servers is a list"),
        ("project = 3", "project is a string"),
        ('credentials = "nothing.toml"', "cannot be read"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = tmp_path / "c.toml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=complaint) as caught:
        resolved(context=path)
    assert str(tmp_path) in caught.value.message


def test_a_file_named_on_purpose_must_be_there(tmp_path: Path) -> None:
    for keywords in ({"context": tmp_path / "no"}, {"DSEC_CONTEXT": str(tmp_path / "no")}):
        with pytest.raises(InvalidArgument, match="no"):
            resolved(**keywords)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="DSEC_PASSWORD_FILE"):
        resolved(DSEC_PASSWORD_FILE=str(tmp_path / "no"))
    with pytest.raises(InvalidArgument, match="project"):
        resolved(DSEC_PROJECT="Not A Project")


async def test_without_any_configuration_opening_says_what_to_do(unconfigured: Path) -> None:
    with pytest.raises(Unavailable, match="no DSec is configured") as caught:
        await DSecClient().open()
    assert "dsec up" in caught.value.hint


async def test_the_default_context_file_is_read(unconfigured: Path) -> None:
    where = unconfigured / ".config/dsec/context.toml"
    Context(servers=("nats://127.0.0.1:1",), project="mine").write(where)
    assert DSecClient().project == "mine"
