"""Who is who: keys that sign frames, and certificates for the links between machines.

Every party has one Ed25519 key. Its public half stands in the federation file, and whoever receives a frame checks the
signature against it, whatever way the frame came. The same key serves TLS, under a certificate that the federation's
authority signed: what TLS signs begins with 64 spaces and what frames sign with their magic, so that no signature can
be taken for one of the other kind.

`cryptography` is imported where it is first needed: the extra `peers` installs it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from sparsona.core.errors import SparsonaError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

DAYS = 730  # that the certificate of a party is valid
AUTHORITY_DAYS = 3650
LOCAL_HOSTS = ("localhost", "127.0.0.1")
_EARLY = timedelta(hours=1)  # certificates are valid from before they were made: clocks differ
_MOST_BYTES = 1 << 16  # of a file of keys
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9_-]*[A-Za-z0-9])?)*")
_KEY = re.compile(r"ed25519:[0-9a-f]{64}")


def check_name(name: str) -> str:
    """Check the name of a party: it is part of file names and certificates."""
    if not _NAME.fullmatch(name):
        raise SparsonaError(
            f"the name {name[:80]!r}",
            expected="up to 63 letters, digits, dots, hyphens and underscores, the first a letter or digit",
            hint="for example hospital-3",
        )
    return name


def check_key(key: str) -> str:
    """Check the text of a public key."""
    if not _KEY.fullmatch(key):
        raise SparsonaError(
            f"the public key {key[:80]!r}", expected="'ed25519:' and 64 hexadecimal digits", hint="`sparsona keys show`"
        )
    return key


class KeyFile:
    """A private key: it signs frames (`Signer`) and serves TLS.

    Example:
        >>> key_path, _ = new_key("hospital-3", ".")
        >>> own = KeyFile.read(key_path)
        >>> Roster({3: own.public}).verify(3, b"data", own.sign(b"data"))
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self.public = _write_public(key.public_key())

    @staticmethod
    def read(path: str | Path) -> KeyFile:
        """The key in a file that `new_key` wrote."""
        _require()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        try:
            key = load_pem_private_key(_read_bytes(path), None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise SparsonaError(
                f"'{path}' has no private key",
                expected="an Ed25519 key in PEM, without a password",
                hint="`sparsona keys new NAME` makes one",
            )
        return KeyFile(key)

    @property
    def pem(self) -> str:
        """The key as text: secret."""
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        return self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()

    def sign(self, data: bytes) -> bytes:
        """The signature of `data`: 64 bytes."""
        return self._key.sign(data)

    def sign_certificate(self, builder: x509.CertificateBuilder) -> str:
        """The certificate as text, signed with this key."""
        from cryptography.hazmat.primitives.serialization import Encoding

        return builder.sign(self._key, None).public_bytes(Encoding.PEM).decode()

    def request(self, name: str) -> str:
        """A certificate request as text: it proves that who asks holds the key."""
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding

        builder = x509.CertificateSigningRequestBuilder().subject_name(_subject(check_name(name)))
        return builder.sign(self._key, None).public_bytes(Encoding.PEM).decode()


class Roster:
    """The public keys of all who may send: checks signatures (`Verifier`).

    Args:
        keys: the public key of each client, by index, and of the server, if there is one.
    """

    def __init__(self, keys: Mapping[int, str]) -> None:
        _require()
        self._keys = {party: _read_public(key) for party, key in keys.items()}

    def verify(self, sender: int, data: bytes, signature: bytes) -> None:
        """Raise a SparsonaError unless `signature` is that of `sender` under `data`."""
        from cryptography.exceptions import InvalidSignature

        who = "the server" if sender < 0 else f"client {sender}"
        if sender not in self._keys:
            raise SparsonaError(f"a frame from {who}", expected="a sender that the federation file names")
        try:
            self._keys[sender].verify(signature, data)
        except InvalidSignature:
            raise SparsonaError(
                f"a frame in the name of {who} is not signed by it",
                expected="a signature by the key that the federation file names",
                hint="all sides must use the same federation file; if they do, somebody forged a frame",
            ) from None


@dataclass(frozen=True)
class Request:
    """A party that asks to be admitted: its name and public key."""

    name: str
    key: str


def new_key(name: str, folder: str | Path) -> tuple[Path, Path]:
    """Make the key of a party, and the request with which it asks to be admitted.

    Args:
        name: of the party.
        folder: where the files go.

    Returns:
        The private key's file NAME.key, which only its owner can read and which is not to leave the machine, and the
        request's file NAME.pub, which is not secret. Neither is ever overwritten.
    """
    folder = Path(folder)
    paths = folder / f"{check_name(name)}.key", folder / f"{name}.pub"
    if paths[1].exists():
        raise _exists(paths[1])
    key = write_new_key(paths[0])
    try:
        write_new(paths[1], f"name: {name}\nkey:  {key.public}\n{key.request(name)}", 0o644)
    except SparsonaError:
        paths[0].unlink()  # nobody has seen it yet
        raise
    return paths


def write_new_key(path: Path) -> KeyFile:
    """Make a private key and write it into a new file."""
    _require()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = KeyFile(Ed25519PrivateKey.generate())
    write_new(path, key.pem, 0o600)
    return key


def write_new(path: Path, text: str, mode: int) -> None:
    """Write a file that does not exist yet; after an error there is none."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise _exists(path) from None
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with os.fdopen(file, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _unwritable(path, error) from None


def read_request(path: str | Path) -> Request:
    """The request in a file that `new_key` wrote. It may come from anybody: that its maker has the key is checked."""
    _require()
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    data = _read_bytes(path)
    try:
        request = x509.load_pem_x509_csr(data)
        key, is_signed = request.public_key(), request.is_signature_valid
        name = _common_name(request.subject)
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion):
        key, is_signed, name = None, False, ""
    if not isinstance(key, Ed25519PublicKey) or not is_signed:
        raise SparsonaError(
            f"'{path}' has no certificate request",
            expected="the file NAME.pub of `sparsona keys new NAME`, unchanged",
            hint="that is the public one of two files" if b"PRIVATE KEY" in data else "",
        )
    found = Request(check_name(name), _write_public(key))
    lines = dict(line.partition(":")[::2] for line in data.decode("utf-8", "replace").splitlines()[:2])
    if (lines.get("name", "").strip(), lines.get("key", "").strip()) != (found.name, found.key):
        raise SparsonaError(
            f"the first lines of '{path}' are not those of the request below them",
            expected=f"name: {found.name}, key: {found.key}",
            hint="ask its sender for the file again",
        )
    return found


@dataclass(frozen=True)
class Authority:
    """What signs the certificates of one federation: a key and its own certificate (PEM)."""

    key: KeyFile
    certificate: str

    @staticmethod
    def read(path: str | Path, certificate: str) -> Authority:
        """The authority whose key is in a file."""
        key = KeyFile.read(path)
        if describe_certificate(certificate).key != key.public:
            raise SparsonaError(
                f"'{path}' is not the key of this federation's authority",
                expected="the key that `sparsona federation new` wrote beside the federation file",
            )
        return Authority(key, certificate)


def new_authority(name: str, path: Path, days: int = AUTHORITY_DAYS) -> Authority:
    """Make the authority of a federation; its key is written into a new file.

    Args:
        name: of the federation.
        path: the key's file.
        days: how long its certificate is valid, and so all that it signs.

    Returns:
        The authority.
    """
    check_days(days)
    key = write_new_key(path)
    return Authority(key, _certify_authority(f"{check_name(name)[:50]} authority", key, days))  # no party has a space


def renew_authority(authority: Authority, days: int = AUTHORITY_DAYS) -> Authority:
    """The same authority with a certificate that is valid from now on; those that it signed stay valid."""
    name = describe_certificate(authority.certificate).name
    return Authority(authority.key, _certify_authority(name, authority.key, check_days(days)))


def _certify_authority(name: str, key: KeyFile, days: int) -> str:
    from cryptography import x509

    public = _read_public(key.public)
    builder = (
        _builder(name, name, public, days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(key_cert_sign=True, crl_sign=True), critical=True)
    )
    return key.sign_certificate(builder)


def certify(request: Request, authority: Authority, *, hosts: Sequence[str] = (), days: int = DAYS) -> str:
    """A certificate for TLS, as PEM.

    Args:
        request: whose it is.
        authority: who signs it.
        hosts: names and addresses under which others connect to this party. With any, the certificate is also that of a
            listener, for `LOCAL_HOSTS` as well. Without, it serves to dial only: a client cannot pose as the server.
        days: how long it is valid from now on, within the time of the authority's.

    Returns:
        The certificate.
    """
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    issuer = describe_certificate(authority.certificate)
    issuer.check_time("the federation's authority")
    public = _read_public(request.key)
    purposes = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])]
    builder = (
        _builder(check_name(request.name), issuer.name, public, check_days(days), issuer.until)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(_read_public(authority.key.public)), critical=False
        )
    )
    if hosts:
        names = [_host(host) for host in dict.fromkeys((*LOCAL_HOSTS, *hosts))]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return authority.key.sign_certificate(builder)


@dataclass(frozen=True)
class Certificate:
    """What a certificate says.

    Args:
        name: whose it is.
        key: the public key.
        hosts: under which it may listen; none: it may not.
        since: from when it is valid.
        until: and to when.
    """

    name: str
    key: str
    hosts: tuple[str, ...]
    since: datetime
    until: datetime

    def check_time(self, whose: str, now: datetime | None = None) -> None:
        """Raise a SparsonaError unless it is valid now.

        Args:
            whose: names its owner in the message.
            now: another time to check for.
        """
        now = now or datetime.now(UTC)
        if now > self.until:
            raise SparsonaError(
                f"the certificate of {whose} expired on {self.until:%Y-%m-%d}",
                expected=f"one that is valid today, {now:%Y-%m-%d}",
                hint="`sparsona federation renew fed.toml` where the authority's key is, then hand the file out again",
            )
        if now < self.since:
            raise SparsonaError(
                f"the certificate of {whose} is valid from {self.since:%Y-%m-%d %H:%M} UTC on",
                expected=f"one that is valid now, {now:%Y-%m-%d %H:%M} UTC",
                hint="set this machine's clock",
            )


def describe_certificate(certificate: str) -> Certificate:
    """What a certificate (PEM) says; who signed it is not checked."""
    _require()
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        found = x509.load_pem_x509_certificate(certificate.encode())
        key, name = found.public_key(), _common_name(found.subject)
        try:
            hosts = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            hosts = x509.SubjectAlternativeName([])
        if not isinstance(key, Ed25519PublicKey):
            raise ValueError("another kind of key")
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion, x509.DuplicateExtension) as error:
        raise SparsonaError(
            f"a certificate cannot be read: {error}", expected="a certificate with an Ed25519 key, in PEM"
        ) from None
    names = tuple(str(host.value) for host in hosts)
    return Certificate(name, _write_public(key), names, found.not_valid_before_utc, found.not_valid_after_utc)


def check_certificate(certificate: str, authority: str, key: str, whose: str) -> Certificate:
    """Check that a certificate is one for this key by this authority, and valid now.

    Args:
        certificate: the certificate, PEM.
        authority: the authority's certificate, PEM.
        key: the public key of its owner.
        whose: names the owner in messages.

    Returns:
        What it says.
    """
    from cryptography import x509
    from cryptography.exceptions import InvalidSignature

    found, issuer = describe_certificate(certificate), describe_certificate(authority)
    if found.key != key:
        raise SparsonaError(
            f"the certificate of {whose} is for another key", expected=key, hint="admit the party's .pub file again"
        )
    try:
        x509.load_pem_x509_certificate(certificate.encode()).verify_directly_issued_by(
            x509.load_pem_x509_certificate(authority.encode())
        )
    except (ValueError, TypeError, InvalidSignature):
        raise SparsonaError(
            f"the certificate of {whose} was not signed by the federation's authority",
            expected=f"one by {issuer.name}",
            hint="use the federation file as its authority wrote it",
        ) from None
    issuer.check_time("the federation's authority")
    found.check_time(whose)
    return found


def check_days(days: int) -> int:
    """Check how long a certificate is to be valid."""
    if not 1 <= days <= 36500:
        raise SparsonaError(f"a certificate for {days} days", expected="1 to 36500 days")
    return days


def _builder(
    name: str, issuer: str, public: Ed25519PublicKey, days: int, latest: datetime | None = None
) -> x509.CertificateBuilder:
    from cryptography import x509

    now = datetime.now(UTC)
    until = now + timedelta(days=days)
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(name))
        .issuer_name(_subject(issuer))
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _EARLY)
        .not_valid_after(until if latest is None else min(until, latest))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _key_usage(**of: bool) -> x509.KeyUsage:
    from cryptography import x509

    names = "digital_signature content_commitment key_encipherment data_encipherment key_agreement"
    names += " key_cert_sign crl_sign encipher_only decipher_only"
    return x509.KeyUsage(**{name: of.get(name, False) for name in names.split()})


def _subject(name: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _common_name(subject: x509.Name) -> str:
    from cryptography.x509.oid import NameOID

    found = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(found[0].value) if len(found) == 1 else ""


def _host(host: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        pass
    if len(host) > 253 or not _HOST.fullmatch(host):
        raise SparsonaError(
            f"the host {host[:80]!r}", expected="a name or an IP address", hint="for example fl.example.org"
        )
    return x509.DNSName(host)


def _write_public(key: Ed25519PublicKey) -> str:
    return f"ed25519:{key.public_bytes_raw().hex()}"


def _read_public(text: str) -> Ed25519PublicKey:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(check_key(text).removeprefix("ed25519:")))


def _read_bytes(path: str | Path) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise SparsonaError(f"'{path}' cannot be read: {error.strerror}", expected="a file of keys") from None
    if len(data) > _MOST_BYTES:
        raise SparsonaError(f"'{path}' is too large for a file of keys", expected=f"at most {_MOST_BYTES:,} bytes")
    return data


def _exists(path: Path) -> SparsonaError:
    return SparsonaError(
        f"'{path}' exists already", expected="a new file: keys are never overwritten", hint="another name or --out"
    )


def _unwritable(path: Path, error: OSError) -> SparsonaError:
    return SparsonaError(f"'{path}' cannot be written: {error.strerror}", expected="a folder to write into")


def _require() -> None:
    try:
        import cryptography  # noqa: F401
    except ImportError as error:
        raise SparsonaError(
            "keys and certificates need the package 'cryptography', which is not installed",
            expected="the extra 'peers'",
            hint="pip install 'sparsona[peers]'",
        ) from error
