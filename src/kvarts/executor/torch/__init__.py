"""Real models: Hugging Face decoders in PyTorch, with their KV in pages that the control plane hands out.

Needs `kvarts[torch]`. Nothing outside this package imports PyTorch.
"""

from kvarts.executor.torch.spinning import limit_spinning

limit_spinning()
