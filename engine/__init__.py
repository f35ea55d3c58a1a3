"""What prefill and decode workers share: blocks, scheduling, sampling and the step loop. Runs without Ray.

Torch-free: blocks, sequence, plan, scheduler, randomness. On top of them: kv_store, sampler, runner, engine.
"""
