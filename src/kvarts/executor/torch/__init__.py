"""Real models: Hugging Face decoders in PyTorch, with KV in pages that the control plane allocates.

Needs `kvarts[torch]`. Nothing outside this package imports PyTorch.
"""

from kvarts.executor.torch.huge_pages import ask_for_huge_pages
from kvarts.executor.torch.spinning import limit_spinning

limit_spinning()
ask_for_huge_pages()
