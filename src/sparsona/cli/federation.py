"""`sparsona keys` and `sparsona federation`: who takes part in a run on several machines, and what all agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sparsona.cli.options import check_names, flags_of, gather, method_flags, with_table
from sparsona.cli.terminal import echo, print_table
from sparsona.core.errors import SparsonaError
from sparsona.core.spec import shorten
from sparsona.deploy import identity

FILE = click.argument("path", metavar="FED.TOML", type=click.Path(path_type=Path))
DAYS = click.option(
    "--days", type=int, default=identity.DAYS, show_default=True, help="How long certificates are valid, in days."
)
ADDRESS = click.option(
    "--address", "addresses", multiple=True, metavar="HOST:PORT", help="Where others dial it; several if need be."
)


@click.group()
def keys() -> None:
    """Make the key by which a server, client or peer is known.

    \b
      sparsona keys new hospital-3
      sparsona keys show hospital-3.pub
    """


@keys.command("new")
@click.argument("name")
@click.option("--out", type=click.Path(path_type=Path), default=Path("."), help="Folder to put both into.  [this one]")
def new_keys(name: str, out: Path) -> None:
    """Make a client's key, and its request to be admitted.

    NAME.key is secret and stays on this machine. NAME.pub goes to whoever has the federation file:
    `sparsona federation admit fed.toml NAME.pub`.
    """
    from sparsona.deploy.identity import KeyFile, new_key

    private, request = new_key(name, out)
    echo(f"key:        {private} (secret: it stays here)\nrequest:    {request} (send this one)")
    echo(f"public key: {KeyFile.read(private).public}")


@keys.command("show")
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
def show_key(path: Path) -> None:
    """Show the public key in FILE, a NAME.key or NAME.pub.

    Compare it with the sender by telephone.
    """
    from sparsona.deploy.identity import KeyFile, read_request

    if path.suffix == ".pub":
        request = read_request(path)
        echo(f"name:       {request.name}")
        echo(f"public key: {request.key}")
    else:
        echo(f"public key: {KeyFile.read(path).public}")


@click.group()
def federation() -> None:
    """Make the file that describes a run on several machines. All sides agree on it, and clients are admitted to it.

    \b
      sparsona federation new fed.toml --method fedspa --model cnn28 --rounds 100 --classes 10
      sparsona federation admit fed.toml hospital-3.pub --capacity 0.2
      sparsona federation show fed.toml

    Then give the file to everybody: it contains no secrets.
    """


def _new_flags() -> list[click.Option]:
    """The flags of what is agreed on: of every run, and of methods."""
    from sparsona.runs.options import AGREED, OPTIONS

    return [*flags_of({name: OPTIONS[name] for name in ("preset", *AGREED)}), *method_flags()]


@federation.command(cls=with_table(_new_flags))
@FILE
@click.option("--method", required=True, help="A row of `sparsona methods`, with options after a colon if need be.")
@click.option("--model", required=True, help="Network, a row of `sparsona models`.")
@click.option("--classes", type=int, help="Number of outputs: classes, tokens, labels or numbers.  [that of the names]")
@click.option("--class-names", metavar="A,B,...", help="What they are called, in order, at every client.  [not fixed]")
@click.option("--input", "shape", metavar="CxHxW", help="Shape of an example.  [what the papers gave the network]")
@click.option(
    "--predicts",
    metavar="classes|binary|labels|numbers|tokens",
    help="What is predicted.  [tokens if the network takes them]",
)
@click.option("--name", help="Of the federation.  [the file's]")
@ADDRESS
@DAYS
def new(
    path: Path,
    method: str,
    model: str,
    classes: int | None,
    class_names: str | None,
    shape: str | None,
    predicts: str | None,
    name: str | None,
    addresses: tuple[str, ...],
    days: int,
    config: Path | None,
    pairs: tuple[str, ...],
    **flags: Any,
) -> None:
    """Make a federation file, and the keys of authority and server.

    All options are written out, so that sides with other defaults agree. --address says where clients find the server;
    it may be changed later. The keys are put beside the file: FED.authority.key admits clients, FED.server.key is the
    server's. Both are secret. Methods of peers have no server.

    \b
      sparsona federation new fed.toml --method fedspa --model cnn28 --rounds 100 --classes 10
      sparsona federation new fed.toml --method dispfl --model resnet18 --classes 100 --input 3x32x32 --graph ring
    """
    options = gather(config, pairs, flags, method)
    check_names([method], {"model": model, **options})
    from sparsona.core.spec import as_count
    from sparsona.deploy.addresses import split_address
    from sparsona.deploy.federation_file import FederationFile, Server, key_path
    from sparsona.experiment.agreement import agree
    from sparsona.methods import card

    if "model" in options:
        raise SparsonaError("a model twice", expected="--model alone", hint="leave it out of the file and of --set")
    input_shape = None if shape is None else [as_count(part) or 0 for part in shape.split("x")]
    if input_shape is not None and not all(input_shape):
        raise SparsonaError(f"an input of '{shape}'", expected="a shape like 3x32x32, or a length for text")
    name = identity.check_name(path.stem if name is None else name)
    hosts = [split_address(address)[0] for address in addresses]
    identity.check_days(days)
    names = None if class_names is None else [one.strip() for one in class_names.split(",")]
    run = agree(
        method,
        options,
        model=model,
        classes=classes,
        input_shape=input_shape,
        predicts=predicts,
        class_names=names,
    )
    has_server = not card(run["method"]).peers
    if addresses and not has_server:
        raise SparsonaError(
            f"--address for {run['method']}, which has no server",
            expected="addresses of peers",
            hint="`sparsona federation admit --address` for those that others dial",
        )
    if path.exists():
        raise SparsonaError(f"'{path}' exists already", expected="a new file", hint="give it another name")
    written: list[Path] = []
    try:
        authority = identity.new_authority(name, key_path(path, "authority"), max(days, identity.AUTHORITY_DAYS))
        written.append(key_path(path, "authority"))
        server = None
        if has_server:
            key = identity.write_new_key(key_path(path, "server"))
            written.append(key_path(path, "server"))
            request = identity.Request("server", key.public)
            certificate = identity.certify(request, authority, hosts=(*identity.LOCAL_HOSTS, *hosts), days=days)
            server = Server(key.public, certificate, addresses)
        made = FederationFile(name, run, authority.certificate, server, path=str(path))
        made.write(path)
    except BaseException:
        for one in written:  # of no use without the file
            one.unlink(missing_ok=True)
        raise
    echo(f"federation: {path} (for everybody)")
    for one in written:
        echo(f"key:        {one} (secret: it stays here)")
    if shape is None:
        usual = "x".join(map(str, run["input"]))
        echo(f"input:      {usual}, usual for {model}; for examples of another shape, make the file anew with --input")
    echo(f"next:       `sparsona federation admit {path} NAME.pub` for every client")


@federation.command()
@FILE
@click.argument("request", metavar="NAME.PUB", type=click.Path(path_type=Path))
@click.option("--capacity", type=float, default=1.0, show_default=True, help="Density that the client can hold.")
@click.option("--host", "hosts", multiple=True, help="Name or address under which others dial this client, a peer.")
@ADDRESS
@DAYS
def admit(
    path: Path, request: Path, capacity: float, hosts: tuple[str, ...], addresses: tuple[str, ...], days: int
) -> None:
    """Admit the client whose request is NAME.PUB.

    It gets the next index, and a certificate. Needs the authority's key beside the file. The file is then another one:
    admit all clients before it is handed out and the run begins. --address says where others find a peer; a few such
    peers are enough.
    """
    from sparsona.deploy.federation_file import FederationFile, key_path
    from sparsona.methods import find

    found = FederationFile.read(path)
    row = find(str(found.run.get("method")))
    if row is not None and row.peers:
        hosts = (*identity.LOCAL_HOSTS, *hosts)  # every peer listens
    authority = identity.Authority.read(key_path(path, "authority"), found.authority)
    asked = identity.read_request(request)
    grown = found.admit(asked, authority, capacity=capacity, addresses=addresses, hosts=hosts, days=days)
    grown.write(path)
    echo(f"client {grown.clients[-1].index}: {asked.name}, capacity {capacity:g}\n  {asked.key}")
    echo(f"digest:   {grown.digest}")


@federation.command()
@FILE
@DAYS
def renew(path: Path, days: int) -> None:
    """Renew all certificates. The run stays the same one; hand the file out again.

    Needs the authority's key beside the file.
    """
    from sparsona.deploy.federation_file import FederationFile, key_path
    from sparsona.deploy.identity import Authority, describe_certificate

    found = FederationFile.read(path)
    renewed = found.renew(Authority.read(key_path(path, "authority"), found.authority), days)
    renewed.write(path)
    parties = [one.certificate for one in (renewed.server, *renewed.clients) if one is not None]
    until = min(describe_certificate(one).until for one in (renewed.authority, *parties))
    echo(f"certificates in {path} are valid until {until:%Y-%m-%d}")


@federation.command()
@FILE
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def show(path: Path, as_json: bool) -> None:
    """Show method, options, digest, and who takes part."""
    from sparsona.deploy.federation_file import FederationFile
    from sparsona.deploy.identity import check_certificate

    found = FederationFile.read(path)

    def state(certificate: str, key: str, whose: str) -> str:
        try:
            return f"until {check_certificate(certificate, found.authority, key, whose).until:%Y-%m-%d}"
        except SparsonaError as error:
            return error.what

    rows: list[dict[str, Any]] = []
    parties: list[tuple[str, str, str, Any]] = []
    if found.server is not None:
        parties.append(("–", "server", "–", found.server))
    parties += [(str(one.index), one.name, f"{one.capacity:g}", one) for one in found.clients]
    for index, name, capacity, one in parties:
        rows.append(
            {
                "index": index,
                "name": name,
                "capacity": capacity,
                "certificate": state(one.certificate, one.key, name),
                "addresses": ", ".join(one.addresses) or "–",
                "public key": one.key,
            }
        )
    if as_json:
        about = {"name": found.name, "digest": found.digest, "run": found.run, "roster": rows}
        echo(json.dumps(about, indent=2))
        return
    run = dict(found.run)
    options = {**run, **(run.pop("options", None) or {})}
    options.pop("options", None)
    echo(f"{found.name}: {options.pop('method', '?')}, {options.pop('model', '?')}")
    echo(f"digest:  {found.digest}")
    echo("clients: " + (str(len(found.clients)) if found.clients else "none yet: `sparsona federation admit`"))
    if rows:
        print_table(rows)
    if options.get("per_round", 1) is None:
        options["per_round"] = "half of the clients"
    # What else is none is not chosen.
    print_table([{"option": key, "value": _text(value)} for key, value in options.items() if value is not None])


@federation.command("flower")
@FILE
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The run's folder; resumed if it exists.")
@click.option("--key", type=click.Path(path_type=Path), help="The server's secret key.  [the one beside the file]")
@click.option("--at-least", type=int, help="Clients to wait for before the first round.  [all of the roster]")
@click.option("--deadline", type=float, default=300.0, show_default=True, help="Seconds for a client's answer.")
@click.option("--wait", type=float, help="Seconds to wait for clients.  [as long as it takes]")
def flower_app(
    path: Path,
    folder: Path,
    out: Path,
    key: Path | None,
    at_least: int | None,
    deadline: float,
    wait: float | None,
) -> None:
    """Write a Flower app into the new folder DIR, for `flwr run DIR`.

    It is the server of the run that FED.TOML describes. Write it on the SuperLink's machine, where the server's side
    runs: the app holds the paths of FED.TOML, of the key and of --out, and nothing secret. Clients run `sparsona join
    --flower SOCKET` beside their SuperNode (docs/flower.md).
    """
    from sparsona.deploy.flower import write_app
    from sparsona.experiment.server_side import read_server

    read_server(path, key, at_least)
    config: dict[str, Any] = {"federation": str(path.absolute()), "out": str(out.absolute()), "deadline": deadline}
    given = {"key": key and str(key.absolute()), "at-least": at_least, "wait": wait}
    write_app(folder, config | {name: value for name, value in given.items() if value is not None})
    echo(f"app:  {folder}\nnext: `flwr run {folder} SUPERLINK --stream`")


def _text(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join("none" if one is None else str(one) for one in value) or "none"
    return "none" if value is None else shorten(str(value))
