"""Verifier of KV timelines. Shares no code with the recorder.

The package is callable: `kvarts.verify(body)` judges a body, `kvarts.verify.verify_file(path)` a file.

>>> import kvarts
>>> kvarts.verify({"timeline": []}).verdict
'violated'
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvarts.proof.verify import verifier
    from kvarts.proof.verify.verifier import Verdict as Verdict
    from kvarts.proof.verify.verifier import verify_file as verify_file

    verify: CallableVerify

__all__ = ["CallableVerify", "Verdict", "verify", "verify_file"]


class CallableVerify(ModuleType):
    """Type of this module, which makes the module callable."""

    if TYPE_CHECKING:
        Verdict = verifier.Verdict
        verify_file = staticmethod(verifier.verify_file)

    def __call__(
        self,
        body: Any,
        *,
        preempt_threshold: float = 0.95,
        max_bytes: int | None = None,
        block_bytes: int | None = None,
    ) -> verifier.Verdict:
        """Judge a body in memory. Calls `kvarts.proof.verify.verifier.verify`."""
        from kvarts.proof.verify.verifier import verify

        return verify(body, preempt_threshold=preempt_threshold, max_bytes=max_bytes, block_bytes=block_bytes)


def __getattr__(name: str) -> Any:
    """Load the verifier on first access to one of its names. `verify` is this module."""
    if name == "verify":
        return sys.modules[__name__]
    if name in ("Verdict", "verify_file"):
        from kvarts.proof.verify import verifier

        return getattr(verifier, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


sys.modules[__name__].__class__ = CallableVerify
