"""tools: runs what the model calls, each call at most once, code only inside a sandbox."""
