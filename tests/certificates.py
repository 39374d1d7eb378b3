"""Certificates for tests: an authority of their own, and what it signs."""

from dataclasses import dataclass
from pathlib import Path

import trustme


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files of a server, of its client, and of the authority that signed both."""

    authority: Path
    server: Path
    server_key: Path
    client: Path
    client_key: Path


def write_certificates(directory: Path, *hosts: str) -> Certificates:
    """Write certificates of a server with these names; another directory has another authority."""
    authority = trustme.CA()
    server, client = authority.issue_cert(*hosts), authority.issue_cert("client@localhost")
    paths = Certificates(*(directory / f"{name}.pem" for name in Certificates.__slots__))
    authority.cert_pem.write_to_path(str(paths.authority))
    for issued, certificate, key in (
        (server, paths.server, paths.server_key),
        (client, paths.client, paths.client_key),
    ):
        issued.cert_chain_pems[0].write_to_path(str(certificate))
        issued.private_key_pem.write_to_path(str(key))
        key.chmod(0o600)
    return paths
