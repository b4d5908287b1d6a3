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
        self._spoken_of: dict[bytes, tuple[int, int]] = {}
        """And each that was asked for since `forget`."""

    def of(self, content: Content, page: int) -> bytes:
        """Name a page: of its tenant and all tokens up to its end, or of its owner if some are unknown."""
        digests: list[bytes] | None = content.noted(self)
        if digests is None:
            digests = []
            content.note(self, digests)
        size = content.page_size
        while len(digests) <= page:
            index = len(digests)
            before = digests[-1] if digests else repr(content.salt).encode()
            if index < content.num_known_pages:
                own = content.tokens(index * size, (index + 1) * size).tobytes()
            else:
                own = f"private {content.owner}".encode()
            digests.append(blake2b(before + own, digest_size=16).digest())
        digest = digests[page]
        self._spoken_of[digest] = content.owner, page
        return digest

    def backwards(self, content: Content, start: int, end: int) -> list[bytes]:
        """Return the digests of pages [start, end), the last page first."""
        return [self.of(content, page) for page in range(end - 1, start - 1, -1)]

    def place(self, digest: bytes) -> tuple[int, int]:
        """Return a request and page that `digest` names; it is resident, or was asked for since `forget`."""
        return self.where.get(digest) or self._spoken_of[digest]

    def forget(self) -> None:
        """Forget what was asked for and is not resident."""
        self._spoken_of.clear()
