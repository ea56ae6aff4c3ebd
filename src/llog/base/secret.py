"""Text that must not be shown. It has its own module because both settings and stores hold secrets."""

from __future__ import annotations

import msgspec


class Secret(msgspec.Struct, frozen=True):
    """A value that neither `repr` nor `str` shows."""

    value: str

    def __repr__(self) -> str:
        return "Secret('***')"

    __str__ = __repr__


def reveal(secret: Secret | None) -> str | None:
    return None if secret is None else secret.value
