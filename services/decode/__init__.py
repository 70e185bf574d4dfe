"""decode: streams tokens from an engine, loading what KV it can and computing the rest."""
