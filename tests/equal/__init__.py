"""Laws L15 and L17: kvarts next to vLLM's and SGLang's own schedulers, and to NVIDIA Dynamo's replay."""
