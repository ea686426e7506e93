"""A self-made certificate authority and the certificates that it issues, for hosts without others.

Keys are of the curve P-256 and lie in files of mode 0600. Who trusts the authority trusts what it issued.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from allspan.protos.api.errors import ConfigError

AGENT_NAME = "allspan agent"
"""The common name by which agents know who may run commands; no other certificate has it."""
AUTHORITY_DAYS = 3650
ISSUED_DAYS = 825
"""Validity of an issued certificate in days; some clients refuse a longer one."""
EARLIER = datetime.timedelta(hours=1)
"""The time by which the start of the validity is dated back, for hosts whose clocks are behind."""


@dataclass(frozen=True)
class Issued:
    """A certificate and its private key, in PEM form."""

    certificate: bytes
    key: bytes

    def write(self, folder: Path, name: str) -> None:
        """Writes NAME.pem and NAME.key."""
        (folder / f"{name}.pem").write_bytes(self.certificate)
        handle = os.open(folder / f"{name}.key", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(self.key)


class Authority:
    """A new certificate authority; its private key is kept only if the caller writes `own` to a file."""

    def __init__(self, name: str) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name(name)
        builder = _builder(self._name, self._name, self._key.public_key(), AUTHORITY_DAYS)
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        self._identifier = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        certificate = (
            builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(self._identifier, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.own = Issued(certificate.public_bytes(serialization.Encoding.PEM), _pem(self._key))

    def issue(self, name: str, hosts: Sequence[str] = (), days: int = ISSUED_DAYS) -> Issued:
        """Issues a certificate for both ends of a connection; as a server's it is valid for `hosts` (names or
        addresses)."""
        key = ec.generate_private_key(ec.SECP256R1())
        purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        signer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._identifier)
        builder = (
            _builder(_name(name), self._name, key.public_key(), days)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(signer, critical=False)
        )
        if hosts:
            names = [_general_name(host) for host in hosts]
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Issued(certificate.public_bytes(serialization.Encoding.PEM), _pem(key))


def make_certificates(folder: Path, hosts: Sequence[str]) -> None:
    """Writes ca, server and agent (for `hosts`) and client, each .pem and .key. ConfigError when one is there already,
    or cannot be."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in ("ca", "server", "agent", "client"):
            if (folder / f"{name}.key").exists():
                raise ConfigError(f"{folder}/{name}.key exists; what trusts it would break: take another folder")
        authority = Authority("allspan authority")
        authority.own.write(folder, "ca")
        authority.issue("allspan server", hosts).write(folder, "server")
        authority.issue(AGENT_NAME, hosts).write(folder, "agent")
        authority.issue("allspan client").write(folder, "client")
    except OSError as error:
        raise ConfigError(f"certificates cannot be written to {folder}: {error.strerror}") from error


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLIER)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        try:
            return x509.DNSName(host)
        except ValueError as error:
            raise ConfigError(f"--hosts has {host!r}, which is neither a name nor an address: {error}") from error


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
