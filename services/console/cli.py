"""The commands of `roost`: words in, the right part called, text or JSON out."""

from __future__ import annotations

import json
import sys
import time
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from services.console import logs as log_files
from services.console.chat import chat as talk
from services.console.control import ask, is_locked
from services.console.errors import ConsoleError, NotRunning
from services.console.gateway_client import GatewayClient
from services.console.render import services_table
from services.console.scale import parse_scale, replicas_of
from services.console.settings import ConsoleSettings
from services.console.up import own_name, run_detached, run_here
from shared.errors import RoostError
from shared.settings import read_settings

app = typer.Typer(
    name="roost",
    help="Run all of Roost on this machine, and talk to it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

DOWN_POLL_S: Final = 0.1
DOWN_MARGIN_S: Final = 10.0
WIDTH_OF_A_PIPE: Final = 240
EXIT_REFUSED: Final = 2
EXIT_INTERRUPTED: Final = 130

Scale = Annotated[list[str] | None, typer.Option("--scale", metavar="SERVICE=COUNT", help="Replicas of a service.")]
Without = Annotated[list[str] | None, typer.Option("--without", metavar="SERVICE", help="Leave a service out.")]
Url = Annotated[str | None, typer.Option("--url", help="A gateway elsewhere; else the one of `roost up`.")]
Session = Annotated[str | None, typer.Option("--session", help="Go on with this session, or open it.")]
Tool = Annotated[list[str] | None, typer.Option("--tool", help="A tool that Roost runs, such as python.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]


def _settings() -> ConsoleSettings:
    return read_settings(ConsoleSettings)


def _ask(command: str, **arguments: Any) -> dict[str, Any]:
    return ask(_settings().home_path, command, **arguments)


@app.command()
def up(
    scale: Scale = None,
    without: Without = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Come back once all are ready.")] = False,
) -> None:
    """Start everything, and stay until Ctrl-C."""
    settings = _settings()
    replicas = replicas_of(parse_scale(scale or ()), without or ())
    if detach:
        run_detached(settings, scale or (), without or (), out)
    else:
        raise typer.Exit(run_here(settings, replicas, out))


@app.command()
def down(now: Annotated[bool, typer.Option("--now", help="Kill instead of draining.")] = False) -> None:
    """Drain and stop everything."""
    settings = _settings()
    try:
        ask(settings.home_path, "down", now=now)
    except NotRunning:
        if is_locked(settings.home_path):
            raise ConsoleError("Roost is only just starting; try again in a moment") from None
        out.print(f"nothing runs in {settings.home_path}", markup=False, soft_wrap=True)
        return
    deadline = time.monotonic() + settings.console_stop_s + DOWN_MARGIN_S
    with err.status("stopping" if now else "draining"):
        while time.monotonic() < deadline:
            if not is_locked(settings.home_path):
                out.print("stopped")
                return
            time.sleep(DOWN_POLL_S)
    raise ConsoleError("it did not stop in time; `roost down --now` kills it")


@app.command()
def ps(as_json: AsJson = False) -> None:
    """Show services, replicas, health and load."""
    shown = _ask("ps")
    if as_json:
        typer.echo(json.dumps(shown))
        return
    # A pipe has no width; there a row is never folded.
    wide = out if out.is_terminal else Console(highlight=False, width=WIDTH_OF_A_PIPE)
    wide.print(services_table(shown, wide.width))
    memory_mib = shown["supervisor"]["memory_bytes"] / 2**20
    out.print(
        f"gateway {shown['gateway_url'] or '-'}  nats {shown['nats_url']}  home {shown['home']}  "
        f"supervisor {shown['supervisor']['pid']} ({memory_mib:.0f} MiB)",
        style="dim", soft_wrap=True,
    )  # fmt: skip


@app.command()
def scale(words: Annotated[list[str], typer.Argument(metavar="SERVICE=COUNT...")]) -> None:
    """Change how many replicas of a service run."""
    parse_scale(words)
    _ask("scale", words=words)
    _done(f"scaled to {' '.join(words)}; new replicas are starting, see `{own_name()} ps`")


@app.command()
def restart(replica: str) -> None:
    """Drain one replica and start it again."""
    _ask("restart", instance=replica)
    _done(f"{replica} drains and starts again")


@app.command()
def kill(replica: str) -> None:
    """Send SIGKILL to one replica, to see what happens."""
    _ask("kill", instance=replica)
    _done(f"{replica} was killed; it starts again by itself")


@app.command()
def logs(
    name: Annotated[str | None, typer.Argument(metavar="SERVICE|REPLICA")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what is added.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, max=100_000, help="Of each file.")] = 50,
) -> None:
    """Show the last lines of the logs of a service, of one replica, or of all."""
    ends = log_files.show(log_files.files_of(_settings().home_path / "logs", name), lines, typer.echo)
    if follow:
        log_files.follow(ends, typer.echo)


def _done(text: str) -> None:
    out.print(text, markup=False, soft_wrap=True)


def _client(url: str | None) -> GatewayClient:
    settings = _settings()
    key = settings.console_api_key.get_secret_value() if settings.console_api_key else None
    address = url or ask(settings.home_path, "ps")["gateway_url"]
    if address is None:
        raise ConsoleError("no gateway runs; start one with: roost scale gateway=1")
    return GatewayClient(address, key)


@app.command()
def turn(text: str, session: Session = None, tool: Tool = None, url: Url = None) -> None:
    """Run one turn and print the gateway's answer as JSON."""
    client = _client(url)
    answer = client.turn(client.open_session(session, "", tuple(tool or ())), text)
    typer.echo(json.dumps(answer, ensure_ascii=False, indent=2))


@app.command()
def chat(
    session: Session = None,
    tool: Tool = None,
    url: Url = None,
    system: Annotated[str, typer.Option("--system", help="Instructions for the model.")] = "",
) -> None:
    """Talk in the terminal; a receipt follows each turn."""
    client = _client(url)
    talk(client, client.open_session(session, system, tuple(tool or ())), out)


def main() -> None:
    """Entry of the `roost` command."""
    try:
        app()
    except RoostError as wrong:
        err.print(f"roost: {wrong}", markup=False, soft_wrap=True)
        sys.exit(EXIT_REFUSED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
