"""What a failed request to an object store means, in words that contain no secrets."""

from __future__ import annotations

import re
from typing import NamedTuple

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from llog.stores.object.requests import BucketLocation

FAILURES = (BaseError, OSError, ValueError)
"""Everything that obstore raises."""
_TRANSPORT = ("Connect", "Request", "Timeout", "Interrupted", "Decode", "Unknown")
# Where obstore looks for credentials if none are given: a failure there is not one of the store.
_METADATA_SERVICE = re.compile(
    r"://([^/\s]+/latest/(api/token|meta-data)|169\.254\.|metadata\.google\.internal|[^/\s]+/computeMetadata/)"
)
_MISSING_BUCKET = ("NoSuchBucket", "ContainerNotFound", "BucketNotFound")


class Failure(NamedTuple):
    """Why a request failed. It never holds the library's text, in which addresses may be signed."""

    status: int | None
    """The HTTP status, or None if no answer came."""
    code: str
    """The store's own code, or the kind of transport failure."""
    is_missing_blob: bool
    is_credentials: bool

    @classmethod
    def of(cls, error: Exception) -> Failure:
        text = str(error)
        if _METADATA_SERVICE.search(text.partition("\n")[0]):
            return cls(None, "NoCredentials", False, True)
        status = re.search(r"status code: (\d{3})", text)
        code = re.search(r"<Code>(\w+)</Code>", text) or re.search(r"kind: (\w+)", text)
        name = code.group(1) if code else "" if status else type(error).__name__
        return cls(
            int(status.group(1)) if status else None,
            name,
            isinstance(error, FileNotFoundError) and name not in _MISSING_BUCKET,
            isinstance(error, PermissionDeniedError | UnauthenticatedError)
            or (status is not None and status.group(1) in ("401", "403")),
        )

    @property
    def is_refusal(self) -> bool:
        """Whether the store refused the request, and would refuse it again."""
        if self.status is None:
            return self.is_credentials
        return 400 <= self.status < 500 and self.status not in (408, 429)

    @property
    def may_have_happened(self) -> bool:
        """Whether the store may have acted on the request."""
        return self.status not in (None, 429) or self.may_still_happen

    @property
    def may_still_happen(self) -> bool:
        """Whether the store may yet act on the request: no answer came, or only that of a proxy."""
        if self.status is None:
            return self.code != "Connect" and not self.is_credentials
        return self.status in (408, 502, 504)

    def explain(self, location: BucketLocation) -> str:
        """Return the message of the error to raise: what failed, and what to do."""
        where = location.description
        if self.is_credentials:
            refused = f"{where} refused the credentials ({self._answer})"
            reason = refused if self.status else f"no credentials for {where}"
            return f"{reason}: check {location.credential_settings}, and that they allow to read, write and list there"
        if self.status == 404:
            return f"{where} does not exist ({self._answer}): create it, or correct its name"
        if self.status in (429, 503):
            return f"{where} is overloaded or down ({self._answer}): try again later, with fewer requests at a time"
        if self.status is not None:
            return f"{where} answered {self._answer}: check that it is the right store, and look into its log"
        if self.code not in _TRANSPORT:
            return f"{where} gave an answer that is against its protocol ({self.code}): check the address"
        return f"{where} cannot be reached ({self.code}): check the address, the network, and that the server runs"

    @property
    def _answer(self) -> str:
        return f"HTTP {self.status} {self.code}".rstrip()
