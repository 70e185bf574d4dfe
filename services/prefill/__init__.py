"""prefill: computes long prompts and hands their KV to the kvstore, for a decode worker to load."""
