"""Certificates for a test: an authority, a server for localhost, and a client."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Certificates:
    authority: str
    key: str
    certificate: str
    client_key: str
    client_certificate: str


def make_certificates(folder: Path) -> Certificates:
    """Made with the openssl command; skips where there is none."""

    def openssl(*words: str) -> None:
        try:
            subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder)
        except FileNotFoundError:
            pytest.skip("needs the openssl command")

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj")
    openssl(*new, "/CN=authority", "-x509", "-days", "2", "-keyout", "ca.key", "-out", "ca.pem")
    (folder / "names").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    for name in ("server", "client"):
        openssl(*new, f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signed = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names")
        openssl("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signed)
    paths = (str(folder / name) for name in ("ca.pem", "server.key", "server.pem", "client.key", "client.pem"))
    return Certificates(*paths)
