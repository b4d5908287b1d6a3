"""Real models: Hugging Face decoders in PyTorch, with their KV in pages that the control plane hands out.

Needs `kvarts[torch]`. Nothing outside this package imports PyTorch.
"""
