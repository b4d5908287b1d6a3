"""A certificate that signs itself: for 127.0.0.1, for another host, or one that has expired."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["make_certificate"]


AUTHORITY = """[ca]
default_ca = own
[own]
database = {folder}/index.txt
new_certs_dir = {folder}
rand_serial = yes
default_md = sha256
policy = any
copy_extensions = copy
[any]
commonName = supplied
"""


def make_certificate(
    folder: Path, name: str = "server", *, hosts: str = "IP:127.0.0.1,DNS:localhost", is_expired: bool = False
) -> tuple[Path, Path]:
    """The files of a new certificate and its key. Skip where there is no openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the command openssl, to make a certificate")
    cert, key, request = (folder / f"{name}.{suffix}" for suffix in ("crt", "key", "csr"))

    def run(*words: str | Path) -> None:
        subprocess.run([openssl, *words], check=True, capture_output=True, timeout=20)

    new = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", key)
    subject = ("-subj", "/CN=localhost", "-addext", f"subjectAltName={hosts}")
    if not is_expired:
        run(*new, "-x509", "-days", "1", *subject, "-out", cert)
        return cert, key
    run(*new, *subject, "-out", request)
    (folder / "index.txt").write_text("")
    (folder / "ca.cnf").write_text(AUTHORITY.format(folder=folder))
    dates = ("-startdate", "20200101000000Z", "-enddate", "20200102000000Z")
    run("ca", "-batch", "-notext", "-selfsign", "-config", folder / "ca.cnf", "-keyfile", key, *dates, "-in", request,
        "-out", cert)  # fmt: skip
    return cert, key
