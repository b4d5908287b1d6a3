"""A certificate for 127.0.0.1 that signs itself."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

__all__ = ["make_certificate"]


def make_certificate(folder: Path, name: str = "server") -> tuple[Path, Path]:
    """The files of a new certificate and its key. Skip where there is no openssl."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the command openssl, to make a certificate")
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    request = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1"]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    subprocess.run(
        [openssl, *request, *subject, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=20
    )
    return cert, key
