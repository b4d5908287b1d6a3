"""Names of pages: by all tokens up to their end, and back to a request and page."""

from __future__ import annotations

from hashlib import blake2b

from kvarts.content import Content

__all__ = ["PageDigests"]


class PageDigests:
    """Digests of pages, and where each is found: in which request, as which page."""

    def __init__(self) -> None:
        self.where: dict[bytes, tuple[int, int]] = {}
        """A request and page that each resident digest names."""
        self._spoken_of: dict[int, Content] = {}
        """Contents, by owner, of which digests were asked for since `forget`."""

    def of(self, content: Content, page: int) -> bytes:
        """Return the digest of a page, see `upto`."""
        return self.upto(content, page + 1)[page]

    def upto(self, content: Content, end: int) -> list[bytes]:
        """Return the digests of the pages of a content, at least the first `end`. The list is not to be changed.

        A digest is of the tenant and all tokens up to the end of the page, or of the owner if some are unknown.
        """
        digests: list[bytes] | None = content.noted(self)
        if digests is None:
            digests = []
            content.note(self, digests)
        self._spoken_of[content.owner] = content
        num_digests = len(digests)
        if num_digests >= end:
            return digests
        size = content.page_size
        before = digests[-1] if digests else repr(content.salt).encode()
        num_known = min(end, content.num_known_pages)
        if num_digests < num_known:
            tokens = content.tokens(num_digests * size, num_known * size)
            page_bytes = size * tokens.itemsize
            known = memoryview(tokens).cast("B")
            for start in range(0, len(known), page_bytes):
                before = blake2b(before + known[start : start + page_bytes], digest_size=16).digest()
                digests.append(before)
        private = f"private {content.owner}".encode()
        while len(digests) < end:
            before = blake2b(before + private, digest_size=16).digest()
            digests.append(before)
        return digests

    def place(self, digest: bytes) -> tuple[int, int]:
        """Return a request and page that `digest` names; it is resident, or was asked for since `forget`."""
        place = self.where.get(digest)
        if place is not None:
            return place
        for owner, content in self._spoken_of.items():
            digests: list[bytes] = content.noted(self) or []
            if digest in digests:
                return owner, digests.index(digest)
        raise KeyError(digest)

    def forget(self) -> None:
        """Forget what was asked for and is not resident."""
        self._spoken_of.clear()
