"""Certificates for a server on loopback, made when it starts and good for a day.

An authority and a server's own, since some clients refuse a certificate that is both.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["AUTHORITY", "SERVER", "make_certificates"]

AUTHORITY: Final = "authority.pem"
SERVER: Final = "server.pem"


def make_certificates(folder: Path) -> None:
    """Write the authority's certificate, and key and certificate of ``localhost``."""
    # Imported here because the server and contests without TLS do not need it.
    from cryptography import x509  # noqa: PLC0415
    from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
    from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415

    now = datetime.now(UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        for name in ("benchmarks", "localhost")
    ]
    certificates = [
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(names[0])
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=key is keys[0], path_length=None), critical=True)
        .sign(keys[0], hashes.SHA256())
        for key, name in zip(keys, names, strict=True)
    ]
    pem = serialization.Encoding.PEM
    plain = keys[1].private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / AUTHORITY).write_bytes(certificates[0].public_bytes(pem))
    (folder / SERVER).write_bytes(plain + certificates[1].public_bytes(pem))
