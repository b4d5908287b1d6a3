"""The control plane of an engine: plan, execute, commit, emit.

It owns requests, KV memory (`kv`), the scheduler (`sched`), tiers below the device (`tiers`), events and the step.
It must not know how long a step takes, whose clock it runs under, which readers its events have, or where requests come
from.
"""
