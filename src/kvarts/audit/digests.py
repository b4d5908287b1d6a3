"""Names of pages: digests of all tokens up to their end, and the request and page that each names."""

from __future__ import annotations

from hashlib import blake2b

from kvarts.content import Content

__all__ = ["PageDigests"]


class PageDigests:
    """Digests of pages, and the request and page where each is found."""

    def __init__(self) -> None:
        self.where: dict[bytes, tuple[int, int]] = {}
        """A request and page named by each resident digest."""
        self._spoken_of: dict[int, Content] = {}
        """Contents, by owner, whose digests were requested since `forget`."""

    def of(self, content: Content, page: int) -> bytes:
        """Return the digest of a page, as defined by `upto`."""
        return self.upto(content, page + 1)[page]

    def upto(self, content: Content, end: int) -> list[bytes]:
        """Return the digests of at least the first `end` pages of a content. The caller must not change the list.

        A digest covers the tenant and all tokens up to the end of the page; if some are unknown, the owner instead.
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
        """Return a request and page named by `digest`, which must be resident or requested since `forget`."""
        place = self.where.get(digest)
        if place is not None:
            return place
        for owner, content in self._spoken_of.items():
            digests: list[bytes] = content.noted(self) or []
            if digest in digests:
                return owner, digests.index(digest)
        raise KeyError(digest)

    def forget(self) -> None:
        """Forget digests that were requested and are not resident."""
        self._spoken_of.clear()
